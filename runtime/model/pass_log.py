"""What the forward passes of an engine have cost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields

PROMPT = -1
"""The number of nodes of a pass that verified no tree."""


@dataclass(slots=True)
class PassLog:
    """Counts of passes, and what the last one was: budgets learn from it what drafts cost."""

    passes: int = 0
    seconds: float = 0.0
    nodes: int = PROMPT
    """Draft tokens that the last pass verified. Of several trees, those of the largest, to which the others are padded;
    without padding, the rows of all trees but one."""
    slots: int = 1
    """Trees of the last pass that verified any."""
    last_seconds: float = 0.0
    context: int = 0
    """Tokens before the tree of the last pass, before the longest one if there were several."""

    def add(self, seconds: float, nodes: int = PROMPT, slots: int = 1) -> None:
        self.seconds += seconds
        self.passes += 1
        self.nodes, self.last_seconds = nodes, seconds
        if nodes != PROMPT:
            self.slots = slots

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Count no pass of this block: it belongs to a check or a measurement."""
        before = astuple(self)
        try:
            yield
        finally:
            for field, value in zip(fields(self), before, strict=True):
                setattr(self, field.name, value)
