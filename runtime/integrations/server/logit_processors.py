"""Penalties and biases of requests, and the recorder of log probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from transformers import LogitsProcessor

from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.integrations.server.openai_formats import TokenLogprobs


class AnswerPenalty(LogitsProcessor):
    """Lowers the score of each token in the answer so far: by ``presence`` once, by ``frequency`` per occurrence."""

    def __init__(self, prompt_length: int, presence: float, frequency: float) -> None:
        self._start, self._presence, self._frequency = prompt_length, presence, frequency

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        tokens, counts = input_ids[0, self._start :].unique(return_counts=True)
        lowered = scores.clone()
        lowered[0, tokens] -= self._presence + self._frequency * counts
        return cast(torch.FloatTensor, lowered)


class LogitBias(LogitsProcessor):
    """Adds a bias to the score of each token in ``biases``."""

    def __init__(self, biases: Mapping[int, float]) -> None:
        self._tokens, self._biases = torch.tensor(list(biases)), torch.tensor(list(biases.values()))

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        biased = scores.clone()
        biased[0, self._tokens.to(scores.device)] += self._biases.to(scores.device, scores.dtype)
        return cast(torch.FloatTensor, biased)


class LogprobRecorder:
    """Observes the steps of a request, and records the log-probabilities of its tokens."""

    def __init__(self, num_alternatives: int, recorded: list[TokenLogprobs]) -> None:
        """``num_alternatives`` is how many top tokens to record per position; results are appended to ``recorded``."""
        self._num_alternatives, self._recorded = num_alternatives, recorded

    @torch.inference_mode()
    def __call__(self, accepted: Accepted, verified: Verified) -> None:
        scores = verified.logits[accepted.rows].float().log_softmax(-1)
        chosen = scores.gather(1, torch.tensor(accepted.tokens, device=scores.device)[:, None])[:, 0].tolist()
        best = scores.topk(min(self._num_alternatives, scores.shape[1])) if self._num_alternatives else None
        for index, token in enumerate(accepted.tokens):
            pairs = zip(best.indices[index].tolist(), best.values[index].tolist(), strict=True) if best else ()
            self._recorded.append(TokenLogprobs(token, chosen[index], list(pairs)))
