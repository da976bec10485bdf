"""How logs are turned into a set-up, and how much of it is measured."""

from __future__ import annotations

from dataclasses import dataclass

from hdtool.runtime.config.building import MAX_BAD_FRACTION
from hdtool.runtime.config.setting import Settings, require, setting

MOST_HELD_OUT = 200
"""Conversations: more would take longer to replay without changing the figures."""


@dataclass(frozen=True)
class SetupConfig(Settings):
    """What setup holds out of the stores, and what it measures with it."""

    held_out: float = setting(
        0.1,
        f"Share of the conversations held out of the stores, {MOST_HELD_OUT} at most; they are what is measured.",
        option="held_out_fraction",
    )
    limit: int | None = setting(
        None,
        "Held-out prompts that the model answers. Default: as many as take about 40 seconds without drafts, 3 to 24.",
        option="num_prompts",
        least=1,
    )
    max_new_tokens: int = setting(128, "Maximum number of tokens in each of these answers.", least=1)
    max_bad_fraction: float = setting(0.05, MAX_BAD_FRACTION, least=0, most=1)
    rankings: bool = setting(
        False,
        "Add to the model store what the model ranks highest after each token of its vocabulary: a pass for each 256 "
        "tokens.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.held_out < 1, "held-out-fraction", self.held_out, "above 0 and below 1")
