"""The candidates after a node: tokens and their probabilities, in a hash table, and how evidence adds to them."""

from __future__ import annotations

from typing import Any

import numpy as np

from hdtool.runtime.drafters.hierarchy.memory import CANDIDATES, DRAFTING, SLOTS, work_at
from hdtool.runtime.drafters.hierarchy.weights import weights_at
from hdtool.runtime.kernels.compiled import Array, compiled

UNNAMED = 8
"""The kind of candidates that no neighboring ranking holds."""


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
        work.candidates[at], work.chances[at], work.agreed[at] = token, part, UNNAMED
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
