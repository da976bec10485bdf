"""Replay: compares a method's drafts with recorded answers, without running the model.

A recorded answer tells which draft tokens the model would have accepted, as long as the method drafts from tokens
alone. Methods that read logits get them at accepted positions if the recording has rankings, but never after rejected
nodes, so their results are lower bounds. As in the decoding loop, prefill is a step that yields one token, and the end
token counts. The drafter starts each turn with the whole prompt. A history grows with the answers, as it does in use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np

from hdtool.builders.evaluation.contenders import with_own_history
from hdtool.builders.evaluation.recording import RecordedLogits, RecordedTurn, RecordingEngine
from hdtool.runtime.budget.cost_curve import CostCurve, Floats
from hdtool.runtime.budget.node_budget import Budget, CostBudget, FixedBudget
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.drafter import Drafter, WrappedDrafter
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.session import decode
from hdtool.runtime.core.step import Step
from hdtool.runtime.core.tree import LARGEST_TREE, DraftTree
from hdtool.runtime.drafters.drafter_factory import drafter_with_budget
from hdtool.runtime.kernels.compiled import Ints
from hdtool.runtime.settings.decoding import READ_LOGITS, DecodeConfig
from hdtool.runtime.settings.draft_sources import SourceId
from hdtool.runtime.settings.draft_token_limits import FIXED_BUDGET
from hdtool.runtime.settings.model import SamplingConfig
from hdtool.runtime.stores.store_set import StoreSet


@dataclass(frozen=True, eq=False)
class ReplayedTurn:
    """Steps in which a method would have produced a recorded answer; the first step is the prefill."""

    conversation: str
    category: str
    number: int
    prompt_tokens: int
    tokens: Ints
    """Token ids of the answer."""
    sources: Ints
    """Per token: the ``SourceId`` that drafted it; NONE for a bonus token."""
    accept_lengths: Ints
    """Per step: number of accepted tokens plus the bonus token."""
    nodes: Ints
    """Per step: number of draft nodes."""
    draft_seconds: Floats
    """Per step: time for drafting and for the tree's mask and positions."""
    observe_seconds: Floats
    """Per step: time in the drafter's ``observe``."""
    drafted: Ints
    """Per source: number of drafted nodes."""
    hits: Ints
    """Per source: number of steps in which it drafted anything."""

    @property
    def tokens_per_step(self) -> float:
        return len(self.tokens) / len(self.accept_lengths)

    @property
    def contexts(self) -> Ints:
        """Per step: number of tokens in the conversation before the step, including the root of the draft tree."""
        return self.prompt_tokens + np.cumsum(self.accept_lengths) - self.accept_lengths

    def seconds(self, curve: CostCurve) -> tuple[float, float]:
        """Return ``(plain, drafting)``: the predicted times of the answer without and with drafts.

        A prefill counts as a pass without drafts.
        """
        places = self.prompt_tokens + np.arange(len(self.tokens))
        plain = curve.seconds_of_passes(np.zeros(len(places)), places).sum()
        passes = curve.seconds_of_passes(self.nodes, self.contexts).sum()
        return float(plain), float(passes + self.draft_seconds.sum() + self.observe_seconds.sum())


@dataclass(frozen=True)
class SourceShare:
    """What one source drafted, how much of it was accepted, and how long its lookups took."""

    drafted: int
    accepted: int
    hits: int
    unique: int
    """Number of distinct token ids among the accepted tokens."""
    seconds: float


@dataclass(frozen=True)
class SpeedPrediction:
    """Tokens per second, predicted from the cost of forward passes."""

    tokens_per_second: float
    plain_tokens_per_second: float

    @property
    def speedup(self) -> float:
        return self.tokens_per_second / self.plain_tokens_per_second

    @property
    def pays(self) -> bool:
        return self.speedup > 1


@dataclass(frozen=True)
class ReplayResult:
    """Replayed turns of one method."""

    method: str
    turns: tuple[ReplayedTurn, ...]
    source_seconds: Mapping[SourceId, float]
    history: bool = False
    """True if the method drafted from earlier answers."""
    warm_tokens: int = 0
    """Number of answer tokens replayed before the measured turns, which ``turns`` does not include."""

    @classmethod
    def joined(cls, parts: Sequence[ReplayResult]) -> ReplayResult:
        """Concatenate the parts of one method's replay, in the given order."""
        seconds = dict.fromkeys((source for part in parts for source in part.source_seconds), 0.0)
        for part in parts:
            for source, taken in part.source_seconds.items():
                seconds[source] += taken
        return replace(parts[0], turns=tuple(turn for part in parts for turn in part.turns), source_seconds=seconds)

    @cached_property
    def tokens(self) -> int:
        return sum(len(turn.tokens) for turn in self.turns)

    @cached_property
    def steps(self) -> int:
        return sum(len(turn.accept_lengths) for turn in self.turns)

    @cached_property
    def nodes(self) -> int:
        return sum(int(turn.nodes.sum()) for turn in self.turns)

    @property
    def drafted_steps(self) -> int:
        """Number of steps that are not prefills; a prefill drafts nothing."""
        return self.steps - len(self.turns)

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps

    @property
    def nodes_per_step(self) -> float:
        return self.nodes / max(1, self.drafted_steps)

    @property
    def accepted_share(self) -> float:
        """Ratio of accepted tokens to drafted nodes."""
        return (self.tokens - self.steps) / max(1, self.nodes)

    def draft_us(self, percentile: float) -> float:
        """Return a percentile of the time per step, in µs, to draft and to build the tree's mask and positions."""
        return _percentile([turn.draft_seconds[1:] for turn in self.turns], percentile)

    def observe_us(self, percentile: float) -> float:
        return _percentile([turn.observe_seconds[1:] for turn in self.turns], percentile)

    def by_category(self) -> dict[str, ReplayResult]:
        """Split the result by category; the parts have no ``source_seconds``."""
        names = dict.fromkeys(turn.category for turn in self.turns)
        return {
            name: replace(self, turns=tuple(turn for turn in self.turns if turn.category == name), source_seconds={})
            for name in names
        }

    def by_source(self) -> dict[SourceId, SourceShare]:
        """Return a ``SourceShare`` for each source that drafted anything or took any time."""
        drafted = sum((turn.drafted for turn in self.turns), np.zeros(len(SourceId), np.int64))
        hits = sum((turn.hits for turn in self.turns), np.zeros(len(SourceId), np.int64))
        tokens = np.concatenate([turn.tokens for turn in self.turns])
        origins = np.concatenate([turn.sources for turn in self.turns])
        shares = {}
        for source in sorted(SourceId):
            seconds = self.source_seconds.get(source, 0.0)
            if source and (drafted[source] or seconds):
                taken = tokens[origins == source]
                shares[source] = SourceShare(
                    int(drafted[source]), len(taken), int(hits[source]), len(np.unique(taken)), seconds
                )
        return shares

    def predict(self, curve: CostCurve) -> SpeedPrediction:
        """Predict tokens per second from the cost of forward passes."""
        plain, drafting = map(sum, zip(*(turn.seconds(curve) for turn in self.turns), strict=True))
        return SpeedPrediction(self.tokens / drafting, self.tokens / plain)


def _percentile(seconds: Sequence[Floats], percentile: float) -> float:
    every = np.concatenate(seconds)
    return float(np.percentile(every, percentile)) * 1e6 if len(every) else 0.0


WARM_UP_TOKENS = 1000
"""Number of tokens replayed before measuring, to keep compilation and lazy loading out of the timings."""


@dataclass(frozen=True)
class ReplayMethod:
    """Method to replay, with its settings."""

    name: str
    config: DecodeConfig
    """Settings of the method. If ``draft_tokens`` is None, ``curve`` sets the budget or, without a curve, a default."""
    curve: CostCurve | None = None

    def budget(self) -> FixedBudget | CostBudget:
        if self.config.draft_tokens is None and self.curve:
            return CostBudget(self.curve)
        return FixedBudget(FIXED_BUDGET if self.config.draft_tokens is None else self.config.draft_tokens)


def replay_method(
    contender: ReplayMethod,
    turns: Sequence[RecordedTurn],
    store_set: StoreSet,
    on_turn: Callable[[], None] = lambda: None,
    warm: Sequence[RecordedTurn] = (),
) -> ReplayResult:
    """Return the result of replaying recorded answers in order, with a fresh drafter and a new history.

    The turns of ``warm`` are replayed first and left out of the result. ``on_turn`` is called after every turn,
    including the turns of ``warm``.
    """
    before = accumulate((len(turn.answer) for turn in turns), initial=0)
    start = [turn for turn, tokens in zip(turns, before, strict=False) if tokens < WARM_UP_TOKENS]
    _replay_turns(contender, start, store_set, lambda: None)  # warm-up; its drafter and history are discarded
    return _replay_turns(contender, turns, store_set, on_turn, warm)


def _replay_turns(
    contender: ReplayMethod,
    turns: Sequence[RecordedTurn],
    store_set: StoreSet,
    on_turn: Callable[[], None],
    warm: Sequence[RecordedTurn] = (),
) -> ReplayResult:
    budget = contender.budget()
    drafter = drafter_with_budget(lambda: budget, contender.config, with_own_history(store_set, contender.config))
    engine = RecordingEngine(RecordedLogits((*warm, *turns)) if contender.config.method in READ_LOGITS else None)
    replayer = Replayer(drafter, engine, budget)

    def replay_turns(turns_to_replay: Sequence[RecordedTurn]) -> Iterator[ReplayedTurn]:
        for turn in turns_to_replay:
            yield replayer.replay(turn)
            on_turn()

    warmed = sum(len(turn.tokens) for turn in replay_turns(warm))
    before = dict(drafter.seconds)
    done = tuple(replay_turns(turns))
    seconds = {source: taken - before.get(source, 0.0) for source, taken in drafter.seconds.items()}
    return ReplayResult(contender.name, done, seconds, contender.config.has_history, warmed)


class _TimedDrafter(WrappedDrafter):
    """Wraps a drafter to pass the context length to a cost budget and to time ``observe``."""

    def __init__(self, drafter: Drafter, budget: Budget | None) -> None:
        super().__init__(drafter)
        self._start_step = budget.start_step if isinstance(budget, CostBudget) else None
        self.learning: list[float] = []
        """Seconds in ``observe``, per step of the current answer."""

    def begin(self, prompt: Sequence[int]) -> None:
        self.learning.clear()
        super().begin(prompt)

    def draft(self, context: Sequence[int]) -> DraftTree:
        if self._start_step:
            self._start_step(len(context) - 1)
        return super().draft(context)

    def observe(self, accepted: Accepted, verified: Verified) -> None:
        started = time.perf_counter()
        super().observe(accepted, verified)
        self.learning.append(time.perf_counter() - started)


class Replayer:
    """Replays recorded answers, one after another, with one drafter."""

    def __init__(self, drafter: Drafter, engine: RecordingEngine, budget: Budget | None = None) -> None:
        self._drafter, self._engine = _TimedDrafter(drafter, budget), engine

    def replay(self, turn: RecordedTurn) -> ReplayedTurn:
        self._engine.answer(turn)
        drafter, length = self._drafter, len(turn.answer)
        prompt, end = turn.prompt, len(turn.prompt) + length
        # An answer ends at its recorded length, whatever its last token is.
        sampler = Sampler(SamplingConfig(), prompt, criteria=[lambda sampler, _: len(sampler.context) == end])
        # Without a recorded limit, leave room for drafts beyond the end of the answer.
        limit = turn.max_tokens or length + LARGEST_TREE + 1
        steps = list(decode(self._engine, prompt, sampler, max_new_tokens=limit, drafter=drafter, prefix_caching=False))
        seconds = [(step.draft_seconds + step.verify_seconds) for step in steps]
        seconds[0] = 0.0
        return _turn_result(turn, steps, list(zip(seconds, [0.0, *drafter.learning[1:]], strict=True)))


def _turn_result(turn: RecordedTurn, steps: Sequence[Step], seconds: Sequence[tuple[float, float]]) -> ReplayedTurn:
    trees, paths = [step.tree for step in steps], [step.path for step in steps]
    drafted = np.array([np.bincount(tree.sources, minlength=len(SourceId)) for tree in trees])
    origins = [[*tree.sources[path].tolist(), int(SourceId.NONE)] for tree, path in zip(trees, paths, strict=True)]
    times = np.array(seconds)
    return ReplayedTurn(
        conversation=turn.conversation,
        category=turn.category,
        number=turn.number,
        prompt_tokens=len(turn.prompt),
        tokens=np.array(turn.answer, np.int32),
        sources=np.array([source for step in origins for source in step], np.uint8),
        accept_lengths=np.array([len(step) for step in origins], np.int32),
        nodes=np.array([len(tree) for tree in trees], np.int32),
        draft_seconds=times[:, 0],
        observe_seconds=times[:, 1],
        drafted=drafted.sum(axis=0),
        hits=(drafted > 0).sum(axis=0),
    )
