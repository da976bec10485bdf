"""The interface of the modules that trained drafters run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from hdtool.runtime.core.engine_interface import Ranked, Verified
from hdtool.runtime.drafters.trained.proposal import NO_RANKING_AFTER

ROWS_PER_PASS = 4
"""Maximum number of paths that one pass extends."""
MAX_PASSES = 12
"""Maximum number of passes per draft, not counting the first, which reads the accepted tokens."""
NO_RANKING: Ranked = np.full((1, 2), NO_RANKING_AFTER), np.zeros((1, 2))
"""Ranking of a single row whose next tokens are unknown, also as ``Proposal.in_tree`` reads it."""


class DraftModule:
    """Reads accepted tokens and draft paths after them, and ranks the tokens that may follow."""

    passes = 0
    """Maximum number of passes of a draft after the first, which reads the accepted tokens."""
    depth = 0
    """Number of a draft's passes after the first that the run that reads accepted tokens also makes, on the device."""
    paths_per_pass = ROWS_PER_PASS
    """Maximum number of paths that one pass extends."""
    relative_cost = 0.0
    """Expected cost of a pass in passes of the target; a higher one delays the drafter's first trial."""

    def begin(self, prompt: list[int]) -> None:
        """Discard everything read so far and begin another answer."""
        raise NotImplementedError

    def skip(self, tokens: int) -> None:
        """Continue after this many accepted tokens without reading them."""
        self.begin([])

    def read(self, hidden: torch.Tensor, tokens: list[int]) -> Ranked:
        """Read accepted tokens, each with the hidden state before it, and rank the tokens that may follow the last one.

        The first token of the prompt has no hidden state before it and is left out.
        """
        return self.start(hidden, tokens)()

    def start(self, hidden: torch.Tensor, tokens: list[int]) -> Callable[[], Ranked]:
        """Start to read accepted tokens; return a function that waits for what ``read`` returns."""
        raise NotImplementedError

    def extend(self, parents: list[int], tokens: list[int]) -> Ranked:
        """For each ``i``, extend the path of row ``parents[i]`` by ``tokens[i]``, and rank the tokens that may follow.

        Row 0 is the last token read; ``extend`` numbers its rows consecutively after it. All rows of one call are at
        the same depth.
        """
        raise NotImplementedError

    def draft_within_reading(self, depth: int) -> None:
        """Let a run that reads accepted tokens also make the draft's next ``depth`` passes, on the device."""
        self.depth = depth

    def follow(self, verified: Verified) -> None:
        """Note the result of the target's pass of a step; by default, it is ignored."""
