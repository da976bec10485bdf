"""Replays of held-out conversations in a set-up: tokens per step by source, and predicted speeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np

from hdtool.builders.evaluation.parallel_replay import replay
from hdtool.builders.evaluation.recording import RecordedTurn
from hdtool.builders.evaluation.replay import ReplayMethod, ReplayResult, SpeedPrediction
from hdtool.builders.evaluation.timing import timed
from hdtool.runtime.answering.answer_plan import plan_answer
from hdtool.runtime.budget.cost_curve import CostCurve, Floats
from hdtool.runtime.core.drafter import NoDraft
from hdtool.runtime.core.session import decode_request
from hdtool.runtime.engines.proofs.probes import some_context
from hdtool.runtime.settings.decoding import NO_HISTORY, DecodeConfig
from hdtool.runtime.settings.draft_sources import HISTORY_LETTER, SOURCE_NAMES
from hdtool.runtime.settings.model import SamplingConfig
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import Loaded

PROMPT_LENGTHS = (16, 128, 1024)
"""Lengths, in tokens, of the prompts whose prefill is timed."""
PREFILLS = 2
"""Number of prefills per length; the fastest prefill counts."""
ANSWER_TOKENS = 24
"""Number of tokens of the plain answer from which the host time per step is measured."""


@dataclass(frozen=True)
class Overhead:
    """Times that a cost curve does not include: prefill time by prompt length, and host time per step."""

    lengths: tuple[int, ...]
    """Measured prompt lengths, in tokens."""
    prefill_seconds: tuple[float, ...]
    host_seconds: float
    """Seconds per step outside the forward pass."""

    @classmethod
    def measured(cls, loaded: Loaded) -> Overhead:
        target, vocabulary = loaded.target, loaded.target.config.vocab_size
        limit = target.context_limit(max(PROMPT_LENGTHS))
        lengths = tuple(length for length in PROMPT_LENGTHS if limit is None or length < limit)
        fastest = []
        for length in lengths:
            prefill = partial(target.prefill, target.allocate(), 0, some_context(length, vocabulary))
            fastest.append(min(timed(target.device, prefill)[1] for _ in range(PREFILLS)))
        plan = plan_answer(loaded, SamplingConfig(), some_context(lengths[0], vocabulary), ANSWER_TOKENS)
        answer = decode_request(target, plan.request(None, NoDraft()), prefix_caching=False)
        steps = list(answer)[1:]  # the first step is the prefill
        host = float(np.median([step.seconds - step.verify_seconds for step in steps])) if steps else 0.0
        return cls(lengths, tuple(fastest), host)

    def predict(self, result: ReplayResult, curve: CostCurve) -> SpeedPrediction:
        """Predict tokens per second of a replayed method and plain decoding, averaged over answers as in ``bench``."""
        prompts = np.array([turn.prompt_tokens for turn in result.turns])
        # The first step of a turn is its prefill.
        prefills = self._prefills(prompts) - curve.seconds_of_passes(np.zeros(len(prompts)), prompts)
        drafted, plain = [], []
        for turn, prefill in zip(result.turns, prefills, strict=True):
            (one_by_one, trees), tokens = turn.seconds(curve), len(turn.tokens)
            plain.append(tokens / (one_by_one + prefill + tokens * self.host_seconds))
            drafted.append(tokens / (trees + prefill + len(turn.nodes) * self.host_seconds))
        return SpeedPrediction(fmean(drafted), fmean(plain))

    def _prefills(self, prompts: Floats) -> Floats:
        """Return each prefill's time in seconds, interpolated or, beyond the longest measured prompt, extrapolated."""
        seconds: Floats = np.interp(prompts, self.lengths, self.prefill_seconds)
        if len(self.lengths) > 1:
            rise = self.prefill_seconds[-1] - self.prefill_seconds[-2]
            slope = max(0.0, rise) / (self.lengths[-1] - self.lengths[-2])
            seconds = seconds + slope * np.maximum(0, prompts - self.lengths[-1])
        return seconds


def replay_by_source(
    conversations: Sequence[Sequence[RecordedTurn]],
    store_set: StoreSet,
    curve: CostCurve,
    overhead: Overhead,
) -> dict[str, Any]:
    """Return tokens per step as sources are added one by one, and predicted tokens per second.

    The predictions use all sources but the history, which starts empty.
    """
    letters = store_set.letters
    contenders = [_cold_method(letters[: index + 1], curve) for index in range(len(letters))]
    cold = contenders[-1].name
    contenders.append(ReplayMethod(SOURCE_NAMES[HISTORY_LETTER], DecodeConfig(sources=HISTORY_LETTER + letters), curve))
    replayed = replay(contenders, conversations, store_set)
    predicted = overhead.predict(replayed[cold], curve)
    return {
        "tokens_per_step": {name: round(result.tokens_per_step, 3) for name, result in replayed.items()},
        "accepted": {str(source): share.accepted for source, share in replayed[cold].by_source().items()},
        "draft_tokens_per_step": round(replayed[cold].nodes_per_step, 1),
        "tokens_per_second": predicted.tokens_per_second,
        "plain_tokens_per_second": predicted.plain_tokens_per_second,
    }


def replay_with_model_store(
    conversations: Sequence[Sequence[RecordedTurn]], store_set: StoreSet, curve: CostCurve
) -> float:
    """Return the tokens per step with only the conversation and the model store as sources."""
    contender = _cold_method("CM", curve)
    replayed = replay([contender], conversations, store_set)
    return round(replayed[contender.name].tokens_per_step, 3)


def _cold_method(letters: str, curve: CostCurve) -> ReplayMethod:
    """Return a method without history that drafts from the given sources and is named after the last source."""
    return ReplayMethod(SOURCE_NAMES[letters[-1]], DecodeConfig(sources=letters, history=NO_HISTORY), curve)
