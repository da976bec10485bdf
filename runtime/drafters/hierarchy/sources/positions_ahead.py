"""What is known of the places ahead of the root: a record of ``count`` of them, which go by as tokens are emitted."""

from __future__ import annotations

from typing import Any

from numba import njit


@njit(cache=True, nogil=True)
def place_behind(record: Any, depth: int) -> int:
    """The place that speaks of what follows a node at this depth, or -1."""
    place = depth + record.ahead
    return int(place) if place < record.count else -1


@njit(cache=True, nogil=True)
def pass_by(record: Any) -> None:
    """A token has been emitted."""
    record.ahead += 1


@njit(cache=True, nogil=True)
def fall_silent(record: Any) -> None:
    record.count = 0
