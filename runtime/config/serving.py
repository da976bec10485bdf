"""Settings of drafting inside a serving engine."""

from __future__ import annotations

from dataclasses import dataclass

from hdtool.runtime.config.checks import require
from hdtool.runtime.config.methods import LARGEST_BUDGET


@dataclass(frozen=True)
class ServeConfig:
    """How requests are drafted for inside a serving engine."""

    draft_tokens: int = 8
    """Of each request in a step, at most."""
    worth: float | None = None
    """From which odds on a draft is sent; None means those that pay, by what the engine's passes take."""
    context_mib: int = 256
    """For the context tables of requests; those that find no place are not drafted for."""

    def __post_init__(self) -> None:
        largest = LARGEST_BUDGET
        require(1 <= self.draft_tokens <= largest, "draft-tokens", self.draft_tokens, f"from 1 to {largest}")
        fits = self.worth is None or 0 < self.worth <= 1
        require(fits, "worth", self.worth, "above 0 and at most 1")
        require(self.context_mib >= 1, "context-mib", self.context_mib, "1 or more")
