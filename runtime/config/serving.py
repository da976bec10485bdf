"""Settings of drafting inside a serving engine."""

from __future__ import annotations

from dataclasses import dataclass

from hdtool.runtime.config.methods import LARGEST_BUDGET
from hdtool.runtime.config.setting import Settings, require, setting


@dataclass(frozen=True)
class ServeConfig(Settings):
    """How hdtool drafts inside a serving engine."""

    draft_tokens: int = setting(8, "Most draft tokens per request and step.")
    min_draft_prob: float | None = setting(
        None, "Minimum probability of a draft token, 0 to 1. Default: by the measured time of passes."
    )
    context_mib: int = setting(256, "Memory for the context tables of all requests, in MiB.", least=1)
    """Requests beyond it are not drafted for."""
    history: bool = setting(True, "Draft from earlier answers of this server, which are kept in memory.")

    def __post_init__(self) -> None:
        super().__post_init__()
        largest = LARGEST_BUDGET
        require(1 <= self.draft_tokens <= largest, "draft-tokens", self.draft_tokens, f"between 1 and {largest}")
        fits = self.min_draft_prob is None or 0 < self.min_draft_prob <= 1
        require(fits, "min-draft-prob", self.min_draft_prob, "above 0 and at most 1")
