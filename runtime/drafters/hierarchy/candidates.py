"""The candidates after a node: tokens and their probabilities, how evidence adds to them, and what multiplies them.

Recency: texts tend to reuse their own words, so a token that occurred lately is more probable than n-gram counts
predict, and one that never occurred is less probable (cache language models; Kuhn and De Mori, 1990). Known draws:
with a seed, a token's time in the exponential race does not depend on the model.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hdtool.runtime.drafters.hierarchy.memory import CANDIDATES, DRAFTING, SLOTS, work_at
from hdtool.runtime.drafters.hierarchy.weights import RECENCY, weights_at
from hdtool.runtime.kernels.compiled import Array, compiled
from hdtool.runtime.sampling.exponential_race import start_of, time_of
from hdtool.runtime.stores.context_table import latest_place

DISTANCES = len(RECENCY)
"""Classes of distances: never, 1 token ago, 2 or 3, 4 to 7, and so on by doubling; the last one has no end."""
PROBS = (0.1, 0.01, 0.001)
"""Bounds of the classes of probabilities."""
EARLIEST = 1e-12
"""Least time of a token in the race: drawn times may be 0."""


@compiled
def contribute(
    at: int, source: int, row: int, tokens: Array, counts: Array, read: int, bucket: int, left: float
) -> float:
    """Give each token of an order its part of what is left, and return what is left then.

    ``row`` and ``bucket`` select the weight; ``tokens`` were counted among so many that were ``read``. When the
    estimate is to learn from an emitted token, that token's share is noted instead.
    """
    work = work_at(at)
    weight = weights_at(at).weight[row, bucket]
    if work.truth == DRAFTING:
        unit, floor = left * weight / read, work.floor
        # No count exceeds ``read``, so nothing of a weak order counts.
        for place in range(len(tokens) if left * weight >= floor else 0):
            part = unit * min(np.int64(counts[place]), read)
            # A damaged file may hold tokens outside the vocabulary.
            if part >= floor and 0 <= tokens[place] < work.vocabulary:
                put(work, source, np.int64(tokens[place]), part)
    else:
        share = 0.0
        for place in range(len(tokens)):
            if tokens[place] == work.truth:
                count: Any = np.int64(counts[place])
                share = max(0, min(count, read)) / read
        work.orders[work.used], work.buckets[work.used], work.shares[work.used] = row, bucket, share
        work.used += 1
    return left * (1 - weight)  # type: ignore[no-any-return]


@compiled
def put(work: Any, source: int, token: Any, part: float) -> None:
    """Add to the probability of a candidate."""
    slot = _slot_of(work, token)
    if _is_taken(work, slot):
        at = work.slots[slot] & (CANDIDATES - 1)
        work.chances[at] += part
        work.parts[at, source] += part
    elif work.size < CANDIDATES:
        at = work.size
        work.slots[slot] = work.round * CANDIDATES + at
        work.candidates[at], work.chances[at] = token, part
        work.parts[at, :] = 0.0
        work.parts[at, source] = part
        work.size += 1


@compiled
def index_of(work: Any, token: Any) -> int:
    """The index of a candidate, or -1."""
    slot = _slot_of(work, token)
    return int(work.slots[slot] & (CANDIDATES - 1)) if _is_taken(work, slot) else -1


@compiled
def whole(work: Any) -> float:
    """The sum of all probabilities."""
    sum_of_all = 0.0
    for at in range(work.size):
        sum_of_all += work.chances[at]
    return sum_of_all


@compiled
def rescale(work: Any, sum_of_all: float) -> None:
    """Multiply all probabilities by the same factor, so that this is their sum."""
    if work.size > 0:
        factor = sum_of_all / whole(work)
        for at in range(work.size):
            work.chances[at] *= factor


@compiled
def _slot_of(work: Any, token: Any) -> Any:
    """The slot of a candidate, or the free one where it would go."""
    slot = (token * 40503) & (SLOTS - 1)
    while _is_taken(work, slot) and work.candidates[work.slots[slot] & (CANDIDATES - 1)] != token:
        slot = (slot + 1) & (SLOTS - 1)
    return slot


@compiled
def _is_taken(work: Any, slot: Any) -> Any:
    """Whether a slot has been filled in this round."""
    return work.slots[slot] >= work.round * CANDIDATES


@compiled
def weigh_recency(work: Any, gains: Any, table: Any, node: int) -> None:
    """Multiply the probability of each candidate after a node by the gain of its recency, and keep the sum.

    Small probabilities gain most, as few counts stand against it.
    """
    next_place = table.end + work.depths[node]
    for at in range(work.size):
        place = latest_place(table, work.candidates[at])
        work.recency[at] = 0 if place < 0 else distance_class(next_place - place)
    before = whole(work)
    for at in range(work.size):
        work.chances[at] *= gains[work.recency[at], prob_class(work.chances[at])]
    rescale(work, before)


@compiled
def distance_class(distance: int) -> int:
    """Its number of binary digits, as far as there are classes."""
    digits = 0
    while distance > 0 and digits < DISTANCES - 1:
        distance >>= 1
        digits += 1
    return digits


@compiled
def prob_class(prob: float) -> int:
    at = 0
    while at < len(PROBS) and prob < PROBS[at]:
        at += 1
    return at


@compiled
def weigh_draws(work: Any, node: int) -> None:
    """Divide the probability of each candidate after a node by the root of its time, and rescale.

    With exact probabilities the token with the shortest time would be known. Estimates are not exact: the inverse root
    fits best. All other tokens together have no time that is known: they keep the root of what is left to them.
    """
    start = start_of(work.seed, work.position + work.depths[node])
    sum_of_all = np.sqrt(max(0.0, 1.0 - whole(work)))
    for at in range(work.size):
        work.chances[at] /= np.sqrt(max(EARLIEST, time_of(start, work.candidates[at])))
        sum_of_all += work.chances[at]
    for at in range(work.size):
        work.chances[at] /= sum_of_all
