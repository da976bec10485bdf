"""The logarithms of the model's probabilities at each token of an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from hdtool.runtime.accept import Accepted
from hdtool.runtime.drafter import Drafter, HistoryDrafter
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.tree import DraftTree


class TokenLogprobs(NamedTuple):
    """The log-probability of a token, and the most probable tokens in its place, before temperature and penalties."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


class LogprobRecorder:
    """A drafter that also records the log-probabilities of the accepted tokens."""

    def __init__(self, drafter: Drafter, most: int, recorded: list[TokenLogprobs]) -> None:
        """``most`` is the number of alternatives for each token; all are appended to ``recorded``."""
        self._drafter, self._most = drafter, most
        self._recorded = recorded

    @property
    def seconds(self) -> Mapping[SourceName, float]:
        return self._drafter.seconds

    def begin(self, prompt: Sequence[int]) -> None:
        self._drafter.begin(prompt)

    def predict(self, prediction: Sequence[int]) -> None:
        if isinstance(self._drafter, HistoryDrafter):
            self._drafter.predict(prediction)

    def draft(self, context: Sequence[int]) -> DraftTree:
        return self._drafter.draft(context)

    @torch.inference_mode()
    def observe(self, accepted: Accepted, logits: torch.Tensor) -> None:
        rows = [0, *(node + 1 for node in accepted.path)][: len(accepted.tokens)]
        scores = logits[rows].float().log_softmax(-1)
        chosen = scores.gather(1, torch.tensor(accepted.tokens, device=scores.device)[:, None])[:, 0].tolist()
        best = scores.topk(min(self._most, scores.shape[1])) if self._most else None
        for place, token in enumerate(accepted.tokens):
            pairs = zip(best.indices[place].tolist(), best.values[place].tolist(), strict=True) if best else ()
            self._recorded.append(TokenLogprobs(token, chosen[place], list(pairs)))
        self._drafter.observe(accepted, logits)

    def end(self) -> None:
        if isinstance(self._drafter, HistoryDrafter):
            self._drafter.end()
