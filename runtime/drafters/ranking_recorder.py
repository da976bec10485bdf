"""A drafter that records the rankings of the target at each emitted token, for replays of methods that read logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hdtool.data.conversations.rankings import Rankings
from hdtool.runtime.accept import Accepted
from hdtool.runtime.drafter import Drafter, WrappedDrafter
from hdtool.runtime.kernels.topk import topk
from hdtool.runtime.verified import Verified


class RankingRecorder(WrappedDrafter):
    """Wraps the drafter of one answer."""

    reads_logits = True

    def __init__(self, drafter: Drafter, best: int) -> None:
        """``best`` is the number of tokens of a ranking."""
        super().__init__(drafter)
        self._best = best
        self._tokens: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []

    @property
    def rankings(self) -> Rankings:
        return Rankings(np.concatenate(self._tokens), np.concatenate(self._logprobs))

    def begin(self, prompt: Sequence[int]) -> None:
        self._tokens.clear()
        self._logprobs.clear()
        super().begin(prompt)

    def observe(self, accepted: Accepted, verified: Verified) -> None:
        rows = verified.logits[[0, *(node + 1 for node in accepted.path)]].float()
        tokens, scores = topk(rows, min(self._best, rows.shape[-1]))
        self._tokens.append(tokens.astype(np.int32))
        self._logprobs.append(scores - rows.logsumexp(-1, keepdim=True).cpu().numpy())
        super().observe(accepted, verified)
