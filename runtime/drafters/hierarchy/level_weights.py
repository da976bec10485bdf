"""How far each level of evidence is trusted, learned while the target speaks.

A level is a source and how many of the last tokens it knows. Levels are asked from the longest to the
shortest; each gives its share of what is still open and leaves the rest to those behind it:

    P(token) += open * weight * count(token) / total;  open *= 1 - weight

The weight of a level depends on how much evidence there is and how far it spreads. After each emitted
token every level that was asked is credited with the part of the estimate that it gave, as in one step
of expectation maximisation for this mixture, exact and online.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from hdtool.runtime.config import MOST_HEADS
from hdtool.runtime.drafters.hierarchy.sources.context_table import LONGEST_MATCH
from hdtool.runtime.drafters.hierarchy.sources.corpus_evidence import LONGEST_RANGE
from hdtool.runtime.drafters.hierarchy.sources.last_logits import KINDS
from hdtool.runtime.drafters.hierarchy.sources.neighbor_rankings import KINDS as AGREEMENTS
from hdtool.runtime.drafters.hierarchy.sources.recycled_rankings import LONGEST_NODE
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.stores.model_store import LONGEST_PREFIX

CONTEXT_LEVELS = 0
"""Where the levels of a source begin; the one that knows a single token comes first."""
MODEL_LEVELS = CONTEXT_LEVELS + LONGEST_MATCH
CORPUS_LEVELS = MODEL_LEVELS + LONGEST_PREFIX
COPIED_LEVELS = CORPUS_LEVELS + LONGEST_RANGE
RECYCLED_LEVELS = COPIED_LEVELS + LONGEST_NODE
HEADS_LEVELS = RECYCLED_LEVELS + LONGEST_NODE
LEVELS = HEADS_LEVELS + MOST_HEADS

SIZES = 8
ONE, FEW, MANY = range(3)
"""How far the evidence spreads: one token, at most a quarter as many tokens as places, or more."""
BUCKETS = SIZES * 3

STRENGTH = 20.0
"""Observations that the prior is worth."""
MEMORY = 100.0
"""Observations that a weight remembers: what a model says changes with what it is asked."""
UNHEARD = 1 / 32_000
"""Of what no level explains, the share of a single token; vocabularies of any size do as well with this one."""
NOTHING_LEFT = 1e-6

WEIGHTS = np.dtype(
    [
        ("weight", np.float64, (LEVELS, BUCKETS)),
        ("credit", np.float64, (LEVELS, BUCKETS)),
        ("asked", np.float64, (LEVELS, BUCKETS)),
        # Of what no level explains, the part of one candidate of the last logit, by its kind.
        ("rates", np.float64, KINDS),
        ("rate_credit", np.float64, KINDS),
        ("rate_asked", np.float64, KINDS),
        ("gains", np.float64, AGREEMENTS),  # of candidates that neighbouring rankings name, by kind
    ],
    align=True,
)

Memory = npt.NDArray[Any]

PRIOR = {
    # Of one token only, the doubt and how fast it fades with each doubling of the evidence; of few; of many.
    SourceName.CONTEXT: (CONTEXT_LEVELS, MODEL_LEVELS, 0.7, 0.62, 0.6, 0.25),
    SourceName.MODEL: (MODEL_LEVELS, CORPUS_LEVELS, 0.9, 0.75, 0.4, 0.05),
    SourceName.CORPUS: (CORPUS_LEVELS, COPIED_LEVELS, 0.9, 0.75, 0.35, 0.12),
    SourceName.COPIED: (COPIED_LEVELS, RECYCLED_LEVELS, 0.9, 0.9, 0.3, 0.3),
    SourceName.RECYCLED: (RECYCLED_LEVELS, HEADS_LEVELS, 0.9, 0.9, 0.3, 0.3),
    SourceName.HEADS: (HEADS_LEVELS, LEVELS, 0.5, 0.85, 0.5, 0.5),
}
GAINS = (13.0, 9.0, 6.0, 4.0, 3.0, 2.0, 1.5, 1.3)
RATES = (0.04, 0.03, 0.02, 0.015, 0.012, 0.01, 0.007, 0.003)


def new_weights() -> Memory:
    """Weights that have seen nothing; the prior was measured on one model's answers and is soon outweighed."""
    memory = np.zeros(1, WEIGHTS)
    weight = memory["weight"][0]
    for first, stop, doubt, fading, few, many in PRIOR.values():
        for size in range(SIZES):
            weight[first:stop, 3 * size : 3 * size + 3] = 1 - doubt * fading**size, few, many
    memory["credit"] = weight * STRENGTH
    memory["asked"] = STRENGTH
    memory["rates"] = RATES
    memory["rate_credit"] = memory["rates"] * STRENGTH
    memory["rate_asked"] = STRENGTH
    memory["gains"] = GAINS
    return memory


@njit(cache=True, nogil=True)
def bucket_of(total: Any, distinct: Any) -> int:
    """How much evidence there is, and how far it spreads."""
    size = 0
    left = total
    while left >= 2 and size < SIZES - 1:
        left >>= 1
        size += 1
    return 3 * size + (ONE if distinct <= 1 else FEW if distinct * 4 <= total else MANY)


@njit(cache=True, nogil=True)
def learn(weights: Any, work: Any, last: Any) -> None:
    """Credit the levels that were asked, with the shares that they gave to the token that came."""
    left_open, heard = 1.0, 0.0
    for turn in range(work.asked):
        weight = weights.weight[work.levels[turn], work.buckets[turn]]
        work.explained[turn] = left_open * weight * work.shares[turn]
        heard += work.explained[turn]
        left_open *= 1 - weight
    heard += work.last_part + left_open * UNHEARD
    left = 1.0
    for turn in range(work.asked):
        level, bucket = work.levels[turn], work.buckets[turn]
        credit = work.explained[turn] / heard
        fading = min(1.0, MEMORY / weights.asked[level, bucket])
        weights.credit[level, bucket] = weights.credit[level, bucket] * fading + credit
        weights.asked[level, bucket] = weights.asked[level, bucket] * fading + left
        weights.weight[level, bucket] = weights.credit[level, bucket] / weights.asked[level, bucket]
        left -= credit
        if left < NOTHING_LEFT:
            break
    if work.last_open > 0:
        _learn_last(weights, work, last, work.last_part / heard)


@njit(cache=True, nogil=True)
def _learn_last(weights: Any, work: Any, last: Any, credit: float) -> None:
    """Asked is counted by what was open before: few candidates are ever right, and the odds must say how few."""
    for place in range(last.count):
        kind = last.kinds[place]
        fading = min(1.0, MEMORY / weights.rate_asked[kind])
        weights.rate_asked[kind] = weights.rate_asked[kind] * fading + work.last_open
        weights.rate_credit[kind] *= fading
    if work.last_part > 0:
        weights.rate_credit[work.last_kind] += credit
    for kind in range(KINDS):
        weights.rates[kind] = weights.rate_credit[kind] / weights.rate_asked[kind]
