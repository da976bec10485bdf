"""The weights of back-off n-gram interpolation (Jelinek and Mercer, 1980), learned online.

Each source has evidence of several n-gram orders: what followed so many of the last tokens. The estimate goes from
the longest order to the shortest, and each gets its share of the probability that is left:

    P(token) += left * weight * count(token) / total;  left *= 1 - weight

The weight depends on the source, the order, how much evidence there is and how far it spreads. After each emitted
token, every order is credited with its part of the estimate: one step of expectation maximization, exact and online.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hdtool.runtime.config import MOST_HEADS
from hdtool.runtime.drafters.hierarchy.sources.context_table import LEVELS
from hdtool.runtime.drafters.hierarchy.sources.last_logits import KINDS
from hdtool.runtime.drafters.hierarchy.sources.neighbor_rankings import KINDS as AGREEMENTS
from hdtool.runtime.drafters.hierarchy.sources.plugin_evidence import MOST_PLUGINS
from hdtool.runtime.drafters.hierarchy.sources.recycled_rankings import LONGEST_NODE
from hdtool.runtime.kernels.compiled import compiled
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.stores.corpus_ranges import LONGEST_RANGE
from hdtool.runtime.stores.model_store import LONGEST_PREFIX


class Prior(NamedTuple):
    """The n-gram orders of a source, and the weights that they begin with."""

    orders: int
    """Or places: a trained head, or a plug-in, counts as an order of its own."""
    remainder: float
    """Left to shorter orders by evidence of one token,"""
    decay: float
    """which each doubling of the evidence multiplies by this."""
    few: float
    """The weight of evidence that names few tokens,"""
    many: float
    """and of evidence that names many."""


PRIORS = {
    SourceName.CONTEXT: Prior(LEVELS, 0.7, 0.62, 0.6, 0.25),
    SourceName.MODEL: Prior(LONGEST_PREFIX, 0.9, 0.75, 0.4, 0.05),
    SourceName.CORPUS: Prior(LONGEST_RANGE, 0.9, 0.75, 0.35, 0.12),
    SourceName.RECYCLED: Prior(LONGEST_NODE, 0.9, 0.9, 0.3, 0.3),
    SourceName.HISTORY: Prior(LEVELS, 0.93, 0.75, 0.4, 0.06),
    SourceName.HEADS: Prior(MOST_HEADS, 0.5, 0.85, 0.5, 0.5),
    SourceName.PREDICTION: Prior(LEVELS, 0.7, 0.62, 0.6, 0.25),
    SourceName.PLUGIN_1: Prior(MOST_PLUGINS, 0.5, 0.85, 0.5, 0.5),
}
"""Measured on one model's answers, and soon outweighed."""
ENDS = dict(zip(PRIORS, np.cumsum([prior.orders for prior in PRIORS.values()]).tolist(), strict=True))
STARTS = {source: ENDS[source] - prior.orders for source, prior in PRIORS.items()}
"""The row of the shortest order of each source."""
CONTEXT_ORDERS, MODEL_ORDERS = STARTS[SourceName.CONTEXT], STARTS[SourceName.MODEL]
CORPUS_ORDERS, RECYCLED_ORDERS = STARTS[SourceName.CORPUS], STARTS[SourceName.RECYCLED]
HEADS_ORDERS, PLUGIN_ORDERS = STARTS[SourceName.HEADS], STARTS[SourceName.PLUGIN_1]
HISTORY_ORDERS, PREDICTION_ORDERS = STARTS[SourceName.HISTORY], STARTS[SourceName.PREDICTION]
ORDERS = max(ENDS.values())

SIZES = 8
ONE, FEW, MANY = range(3)
"""How far the evidence spreads: one token, at most a quarter as many tokens as occurrences, or more."""
BUCKETS = SIZES * 3

STRENGTH = 20.0
"""Observations that the prior is worth."""
EMA_WINDOW = 100.0
"""Observations that a weight averages over: answers change with the questions."""
UNSEEN = 1 / 32_000
"""The share of a single token in the probability that is left in the end; it suits vocabularies of any size."""
NEGLIGIBLE = 1e-6

RECENCY = (
    (0.42, 0.47, 0.37, 0.93),  # the token never occurred,
    (0.51, 0.72, 1.13, 1.13),  # it is the last token,
    (0.78, 0.74, 0.95, 1.04),  # it occurred 2 or 3 tokens ago,
    (0.74, 1.09, 1.90, 1.36),
    (0.79, 1.24, 2.44, 2.30),
    (0.87, 1.38, 2.31, 2.65),
    (0.85, 1.24, 1.88, 2.98),
    (0.67, 0.83, 1.53, 2.20),
    (0.55, 0.60, 1.06, 1.95),
    (0.61, 0.50, 0.94, 1.17),
    (0.70, 0.61, 0.68, 0.95),
    (0.70, 0.61, 0.68, 0.95),  # or 1,024 and more; conversations that long were too few to fit
)
"""Gains by distance and by probability; only their ratios matter (``recency.py``, ``tests/benchmarks/recency.py``)."""

WEIGHTS = np.dtype(
    [
        ("weight", np.float64, (ORDERS, BUCKETS)),
        ("credit", np.float64, (ORDERS, BUCKETS)),
        ("used", np.float64, (ORDERS, BUCKETS)),
        # The share of one candidate of the last logit in the probability that is left, by its kind.
        ("rates", np.float64, KINDS),
        ("rate_credit", np.float64, KINDS),
        ("rate_used", np.float64, KINDS),
        ("gains", np.float64, AGREEMENTS),  # of candidates in neighboring rankings, by kind
        ("recency", np.float64, (len(RECENCY), len(RECENCY[0]))),  # gains of candidates; not learned
    ],
    align=True,
)

Memory = npt.NDArray[Any]

GAINS = (13.0, 9.0, 6.0, 4.0, 3.0, 2.0, 1.5, 1.3)
RATES = (0.04, 0.03, 0.02, 0.015, 0.012, 0.01, 0.007, 0.003)


def new_weights() -> Memory:
    """The weights that a drafter begins with."""
    memory = np.zeros(1, WEIGHTS)
    weight = memory["weight"][0]
    for source, prior in PRIORS.items():
        rows = slice(STARTS[source], ENDS[source])
        for size in range(SIZES):
            one = 1 - prior.remainder * prior.decay**size
            weight[rows, 3 * size : 3 * size + 3] = one, prior.few, prior.many
    memory["credit"] = weight * STRENGTH
    memory["used"] = STRENGTH
    memory["rates"] = RATES
    memory["rate_credit"] = memory["rates"] * STRENGTH
    memory["rate_used"] = STRENGTH
    memory["gains"] = GAINS
    memory["recency"] = RECENCY
    return memory


@compiled
def bucket_of(total: Any, distinct: Any) -> int:
    """How much evidence there is, and how far it spreads."""
    size = 0
    left = total
    while left >= 2 and size < SIZES - 1:
        left >>= 1
        size += 1
    return 3 * size + (ONE if distinct <= 1 else FEW if distinct * 4 <= total else MANY)


@compiled
def learn(weights: Any, work: Any, last: Any) -> None:
    """Credit the orders that were used with their shares of the estimate of the emitted token."""
    left, estimate = 1.0, 0.0
    for turn in range(work.used):
        weight = weights.weight[work.orders[turn], work.buckets[turn]]
        work.explained[turn] = left * weight * work.shares[turn]
        estimate += work.explained[turn]
        left *= 1 - weight
    estimate += work.last_part + left * UNSEEN
    left = 1.0
    for turn in range(work.used):
        order, bucket = work.orders[turn], work.buckets[turn]
        credit = work.explained[turn] / estimate
        fading = min(1.0, EMA_WINDOW / weights.used[order, bucket])
        weights.credit[order, bucket] = weights.credit[order, bucket] * fading + credit
        weights.used[order, bucket] = weights.used[order, bucket] * fading + left
        weights.weight[order, bucket] = weights.credit[order, bucket] / weights.used[order, bucket]
        left -= credit
        if left < NEGLIGIBLE:
            break
    if work.last_open > 0:
        _learn_last(weights, work, last, work.last_part / estimate)


@compiled
def _learn_last(weights: Any, work: Any, last: Any, credit: float) -> None:
    """Uses count by the probability that was left before: few candidates are ever right, and the rates must show it."""
    for place in range(last.count):
        kind = last.kinds[place]
        fading = min(1.0, EMA_WINDOW / weights.rate_used[kind])
        weights.rate_used[kind] = weights.rate_used[kind] * fading + work.last_open
        weights.rate_credit[kind] *= fading
    if work.last_part > 0:
        weights.rate_credit[work.last_kind] += credit
    for kind in range(KINDS):
        weights.rates[kind] = weights.rate_credit[kind] / weights.rate_used[kind]
