"""The logarithms of the model's probabilities at each token of an answer."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hdtool.runtime.accept import Accepted
from hdtool.runtime.drafter import Drafter, WrappedDrafter
from hdtool.runtime.verified import Verified


class TokenLogprobs(NamedTuple):
    """The log-probability of a token, and the most probable tokens in its place, before temperature and penalties."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


class LogprobRecorder(WrappedDrafter):
    """A drafter that also records the log-probabilities of the accepted tokens."""

    reads_logits = True

    def __init__(self, drafter: Drafter, most: int, recorded: list[TokenLogprobs]) -> None:
        """``most`` is the number of alternatives for each token; all are appended to ``recorded``."""
        super().__init__(drafter)
        self._most, self._recorded = most, recorded

    @torch.inference_mode()
    def observe(self, accepted: Accepted, verified: Verified) -> None:
        rows = [0, *(node + 1 for node in accepted.path)][: len(accepted.tokens)]
        scores = verified.logits[rows].float().log_softmax(-1)
        chosen = scores.gather(1, torch.tensor(accepted.tokens, device=scores.device)[:, None])[:, 0].tolist()
        best = scores.topk(min(self._most, scores.shape[1])) if self._most else None
        for place, token in enumerate(accepted.tokens):
            pairs = zip(best.indices[place].tolist(), best.values[place].tolist(), strict=True) if best else ()
            self._recorded.append(TokenLogprobs(token, chosen[place], list(pairs)))
        super().observe(accepted, verified)
