"""A record with predictions for the ``count`` positions after the root, which pass as tokens are emitted."""

from __future__ import annotations

from typing import Any

from hdtool.runtime.kernels.compiled import compiled


@compiled
def place_after(record: Any, depth: int) -> int:
    """The position after a node at this depth, or -1."""
    place = depth + record.ahead
    return int(place) if place < record.count else -1


@compiled
def pass_by(record: Any) -> None:
    """Move on by an emitted token."""
    record.ahead += 1


@compiled
def clear(record: Any) -> None:
    record.count = 0
