"""The candidates after a node: tokens and their probabilities, in a hash table."""

from __future__ import annotations

from typing import Any

from hdtool.runtime.drafters.hierarchy.sources.neighbor_rankings import UNNAMED
from hdtool.runtime.drafters.hierarchy.workspace import CANDIDATES, SLOTS
from hdtool.runtime.kernels.compiled import compiled


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
def find(work: Any, token: Any) -> int:
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
