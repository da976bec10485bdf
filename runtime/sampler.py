"""How the next token is chosen from the target's logits, the same way wherever they were computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hdtool.data.errors import ModelError
from hdtool.runtime.config import SamplingConfig

if TYPE_CHECKING:
    from transformers import GenerationConfig

DRAWS_AT_ONCE = 1024


class Draws:
    """One uniform number in [0, 1) for each position: a function of (seed, position) and of nothing else.

    Built on Philox's raw stream, which NumPy keeps the same over its versions.
    """

    def __init__(self, seed: int) -> None:
        self._stream = np.random.Philox(key=seed)
        self._drawn = np.empty(0)

    def __getitem__(self, position: int) -> float:
        while position >= len(self._drawn):
            raw = self._stream.random_raw(DRAWS_AT_ONCE)
            self._drawn = np.concatenate([self._drawn, (raw >> np.uint64(11)) * 2.0**-53])
        return float(self._drawn[position])


class Sampler:
    """Chooses tokens one after another; it is told each choice that stands, so that it knows the context.

    The choice at a position depends on the context before it, its logits and the draw for that
    position. Whether the logits came from plain decoding or from a node of a tree plays no part,
    which is why drafting changes nothing in what is said.
    """

    def __init__(self, config: SamplingConfig, context: Sequence[int], generation: GenerationConfig | None = None):
        self._greedy = config.is_greedy
        self._processors = processors_of(config, generation)
        self._draws = Draws(config.seed)
        self.context = list(context)

    def over(self, logits: torch.Tensor) -> Callable[[int], int]:
        """A function from a row of ``logits`` to the token chosen there, given the context so far."""
        if self._greedy and not self._processors:
            likeliest = logits.argmax(dim=-1).tolist()
            return lambda row: int(likeliest[row])
        return lambda row: self._choose(logits[row])

    @torch.inference_mode()
    def _choose(self, logits: torch.Tensor) -> int:
        ids = torch.tensor([self.context], device=logits.device)
        scores = self._processors(cast(torch.LongTensor, ids), cast(torch.FloatTensor, logits[None].float()))[0]
        if self._greedy:
            return int(scores.argmax())
        # The first token whose cumulative probability exceeds the draw; one of no probability never does.
        reached = scores.softmax(dim=-1).double().cumsum(dim=-1)
        token = int(torch.searchsorted(reached, self._draws[len(self.context)] * reached[-1], right=True))
        if token == len(reached):
            raise ModelError("the model's logits are not numbers: its dtype may be too small, try --dtype float32")
        return token


def processors_of(config: SamplingConfig, generation: GenerationConfig | None) -> LogitsProcessorList:
    """The processors of ``generate``, in its order; settings that are None are the model's own."""
    penalty = _first(config.repetition_penalty, getattr(generation, "repetition_penalty", None), 1.0)
    chosen = LogitsProcessorList()
    if penalty != 1.0:
        chosen.append(RepetitionPenaltyLogitsProcessor(penalty))
    if config.is_greedy:
        return chosen
    if config.temperature != 1.0:
        chosen.append(TemperatureLogitsWarper(config.temperature))
    if top_k := int(_first(config.top_k, getattr(generation, "top_k", None), 0)):
        chosen.append(TopKLogitsWarper(top_k))
    if (top_p := _first(config.top_p, getattr(generation, "top_p", None), 1.0)) < 1.0:
        chosen.append(TopPLogitsWarper(top_p))
    return chosen


def _first(*settings: float | None) -> float:
    return next(setting for setting in settings if setting is not None)
