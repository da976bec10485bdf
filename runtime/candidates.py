"""What may follow a node: tokens and their chances, found by a hash table."""

from __future__ import annotations

from typing import Any

from numba import njit

from hdtool.runtime.sources.neighbours import UNNAMED
from hdtool.runtime.workspace import CANDIDATES, SLOTS


@njit(cache=True, nogil=True)
def put(work: Any, source: int, token: Any, part: float) -> None:
    """Add to the chance of a candidate."""
    slot = (token * 40503) & (SLOTS - 1)
    while work.slots[slot] >= work.round * CANDIDATES:
        at = work.slots[slot] & (CANDIDATES - 1)
        if work.candidates[at] == token:
            work.chances[at] += part
            work.parts[at, source] += part
            return
        slot = (slot + 1) & (SLOTS - 1)
    if work.size < CANDIDATES:
        at = work.size
        work.slots[slot] = work.round * CANDIDATES + at
        work.candidates[at], work.chances[at], work.agreed[at] = token, part, UNNAMED
        work.parts[at, :] = 0.0
        work.parts[at, source] = part
        work.size += 1


@njit(cache=True, nogil=True)
def find(work: Any, token: Any) -> int:
    """Where a candidate is, or -1."""
    slot = (token * 40503) & (SLOTS - 1)
    while work.slots[slot] >= work.round * CANDIDATES:
        at = work.slots[slot] & (CANDIDATES - 1)
        if work.candidates[at] == token:
            return int(at)
        slot = (slot + 1) & (SLOTS - 1)
    return -1
