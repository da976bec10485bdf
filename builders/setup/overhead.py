"""What an answer takes beside its passes over draft trees: the prefill of its prompt, and the host's part of a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from hdtool.runtime.budget.cost_curve import CostCurve
from hdtool.runtime.config import SamplingConfig
from hdtool.runtime.drafter import NoDraft
from hdtool.runtime.evaluation.contenders import steps_of, timed
from hdtool.runtime.evaluation.replay_results import Prediction, ReplayResult
from hdtool.runtime.model.checks.small_tree import some_context
from hdtool.runtime.model.load import Loaded

PROMPT_LENGTHS = (16, 128, 1024)
"""Tokens of the prompts whose prefill is timed."""
PREFILLS = 2
"""The fastest of so many prefills counts."""
ANSWER_TOKENS = 24
"""Length of the plain answer that shows the host's part of a step."""

Floats = npt.NDArray[Any]


@dataclass(frozen=True)
class Overhead:
    """Seconds of answers that a cost curve does not hold."""

    lengths: tuple[int, ...]
    """Tokens of measured prompts."""
    prefill_seconds: tuple[float, ...]
    host_seconds: float
    """Of each step, outside the forward pass."""

    @classmethod
    def measured(cls, loaded: Loaded) -> Overhead:
        target, vocabulary = loaded.target, loaded.target.config.vocab_size
        limit = target.context_limit(max(PROMPT_LENGTHS))
        lengths = tuple(length for length in PROMPT_LENGTHS if limit is None or length < limit)
        fastest = []
        for length in lengths:
            prefill = partial(target.prefill, target.allocate(), 0, some_context(length, vocabulary))
            fastest.append(min(timed(target.device, prefill)[1] for _ in range(PREFILLS)))
        answer = steps_of(loaded, NoDraft(), SamplingConfig(), ANSWER_TOKENS, some_context(lengths[0], vocabulary))
        steps = list(answer)[1:]  # the first one is the prefill
        host = float(np.median([step.seconds - step.verify_seconds for step in steps])) if steps else 0.0
        return cls(lengths, tuple(fastest), host)

    def predict(self, result: ReplayResult, curve: CostCurve) -> Prediction:
        """Tokens per second of a replayed method and of plain decoding: means over answers, as `bench` prints them."""
        prompts = np.array([turn.prompt_tokens for turn in result.turns])
        # The first step of a turn is the pass over its prompt.
        prefills = self._prefills(prompts) - curve.of_passes(np.zeros(len(prompts)), prompts)
        drafted, plain = [], []
        for turn, prefill in zip(result.turns, prefills, strict=True):
            tokens, steps = len(turn.tokens), len(turn.nodes)
            places = turn.prompt_tokens + np.arange(tokens)
            one_by_one = curve.of_passes(np.zeros(tokens), places).sum() + prefill + tokens * self.host_seconds
            trees = curve.of_passes(turn.nodes, turn.contexts).sum() + prefill + steps * self.host_seconds
            plain.append(tokens / one_by_one)
            drafted.append(tokens / (trees + turn.draft_seconds.sum() + turn.observe_seconds.sum()))
        return Prediction(fmean(drafted), fmean(plain))

    def _prefills(self, prompts: Floats) -> Floats:
        """Seconds of prompts of these lengths, interpolated; longer ones continue the last slope."""
        found: Floats = np.interp(prompts, self.lengths, self.prefill_seconds)
        if len(self.lengths) > 1:
            rise = self.prefill_seconds[-1] - self.prefill_seconds[-2]
            slope = max(0.0, rise) / (self.lengths[-1] - self.lengths[-2])
            found = found + slope * np.maximum(0, prompts - self.lengths[-1])
        return found
