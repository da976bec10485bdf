"""Penalties and biases of OpenAI's API, as logits processors of ``generate``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from transformers import LogitsProcessor


class AnswerPenalty(LogitsProcessor):
    """Lowers the scores of tokens that the answer holds: by ``presence``, and by ``frequency`` for each occurrence."""

    def __init__(self, prompt_length: int, presence: float, frequency: float) -> None:
        self._start, self._presence, self._frequency = prompt_length, presence, frequency

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        tokens, counts = input_ids[0, self._start :].unique(return_counts=True)
        lowered = scores.clone()
        lowered[0, tokens] -= self._presence + self._frequency * counts
        return cast(torch.FloatTensor, lowered)


class LogitBias(LogitsProcessor):
    """Adds a number to the scores of some tokens."""

    def __init__(self, biases: Mapping[int, float]) -> None:
        self._tokens, self._biases = torch.tensor(list(biases)), torch.tensor(list(biases.values()))

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        biased = scores.clone()
        biased[0, self._tokens.to(scores.device)] += self._biases.to(scores.device, scores.dtype)
        return cast(torch.FloatTensor, biased)
