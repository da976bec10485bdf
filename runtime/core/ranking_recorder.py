"""Records the target's top tokens at each position of an answer."""

from __future__ import annotations

import numpy as np

from hdtool.data.conversation import RecordedRankings
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.kernels.topk import topk


class RankingRecorder:
    """Observes the steps of a request, and records the target's top tokens at each position of its answer."""

    def __init__(self, num_tokens: int) -> None:
        """``num_tokens`` is the number of tokens to record per position."""
        self._num_tokens = num_tokens
        self._tokens: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []

    @property
    def rankings(self) -> RecordedRankings:
        return RecordedRankings(np.concatenate(self._tokens), np.concatenate(self._logprobs))

    def __call__(self, accepted: Accepted, verified: Verified) -> None:
        rows = verified.logits[[0, *(node + 1 for node in accepted.path)]].float()
        tokens, scores = topk(rows, min(self._num_tokens, rows.shape[-1]))
        self._tokens.append(tokens.astype(np.int32))
        self._logprobs.append(scores - rows.logsumexp(-1, keepdim=True).cpu().numpy())
