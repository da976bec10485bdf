"""The weights of back-off n-gram interpolation (Jelinek and Mercer, 1980), learned online.

The estimate goes from the longest n-gram order to the shortest; each gets its share of the probability that is left:

    P(token) += left * weight * count(token) / total;  left *= 1 - weight

After each emitted token, every order is credited with its part of the estimate: one step of expectation maximization.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hdtool.runtime.drafters.hierarchy.memory import MOST_ROWS, WEIGHTS_AT, Source, record_at
from hdtool.runtime.kernels.compiled import Array, compiled
from hdtool.runtime.source_names import SourceName

SIZES = 8
ONE, FEW, MANY = range(3)
"""How far the evidence spreads: one token, at most a quarter as many tokens as occurrences, or more."""
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
"""Gains by distance and by probability; only their ratios matter (``tests/benchmarks/recency.py``)."""

WEIGHTS = np.dtype(
    [
        ("weight", np.float64, (MOST_ROWS, 3 * SIZES)),
        ("credit", np.float64, (MOST_ROWS, 3 * SIZES)),
        ("used", np.float64, (MOST_ROWS, 3 * SIZES)),
        ("recency", np.float64, (len(RECENCY), len(RECENCY[0]))),  # gains of candidates; not learned
    ],
    align=True,
)


def rows_of_weights(sources: Sequence[Source]) -> dict[SourceName, slice]:
    """The rows of weights of each source, one for each n-gram order."""
    rows, free = dict[SourceName, slice](), 0
    for source in sources:
        if source.name not in rows:
            rows[source.name] = slice(free, free + source.prior.orders)
            free += source.prior.orders
    assert free <= MOST_ROWS
    return rows


def new_weights(sources: Sequence[Source]) -> Array:
    """The weights that a drafter begins with."""
    memory, rows = np.zeros(1, WEIGHTS), rows_of_weights(sources)
    weight = memory["weight"][0]
    for source in sources:
        prior = source.prior
        for size in range(SIZES):
            one = 1 - prior.remainder * prior.decay**size
            weight[rows[source.name], 3 * size : 3 * size + 3] = one, prior.few, prior.many
    memory["credit"], memory["used"], memory["recency"] = weight * STRENGTH, STRENGTH, RECENCY
    return memory


@compiled
def weights_at(at: int) -> Any:
    return record_at(at, WEIGHTS_AT, WEIGHTS)


@compiled
def bucket_of(total: Any, spread: int) -> int:
    """How much evidence there is, in powers of two, and how far it spreads."""
    size, left = 0, total
    while left >= 2 and size < SIZES - 1:
        left >>= 1
        size += 1
    return 3 * size + spread


@compiled
def spread_of(total: Any, distinct: Any) -> int:
    return ONE if distinct <= 1 else FEW if distinct * 4 <= total else MANY


@compiled
def bucket_of_share(share: Any, whole: int) -> int:
    """For rankings, the share of the best token takes the place of the amount of evidence."""
    certainty: Any = SIZES * np.int64(share) // whole
    return 3 * min(SIZES - 1, certainty)  # type: ignore[no-any-return]


@compiled
def learn(weights: Any, work: Any) -> None:
    """Credit the orders that were used with their shares of the estimate of the emitted token."""
    left, estimate = 1.0, 0.0
    for turn in range(work.used):
        weight = weights.weight[work.orders[turn], work.buckets[turn]]
        work.explained[turn] = left * weight * work.shares[turn]
        estimate += work.explained[turn]
        left *= 1 - weight
    estimate += left * UNSEEN
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
