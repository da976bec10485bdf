"""Settings of drafting inside a serving engine."""

from __future__ import annotations

from dataclasses import dataclass

from hdtool.runtime.config.checks import require
from hdtool.runtime.config.methods import LARGEST_BUDGET


@dataclass(frozen=True)
class ServeConfig:
    """How hdtool drafts inside a serving engine."""

    draft_tokens: int = 8
    """Most draft tokens per request and step."""
    min_draft_prob: float | None = None
    """Minimum probability of a draft token; None derives it from the measured time of the engine's passes."""
    context_mib: int = 256
    """Memory in MiB for the context tables of all requests; requests beyond it are not drafted for."""

    def __post_init__(self) -> None:
        largest = LARGEST_BUDGET
        require(1 <= self.draft_tokens <= largest, "draft-tokens", self.draft_tokens, f"between 1 and {largest}")
        fits = self.min_draft_prob is None or 0 < self.min_draft_prob <= 1
        require(fits, "min-draft-prob", self.min_draft_prob, "above 0 and at most 1")
        require(self.context_mib >= 1, "context-mib", self.context_mib, "1 or more")
