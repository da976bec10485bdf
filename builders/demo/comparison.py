"""Answers a question by plain decoding and with drafts, in turn, and times both."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median

import torch

from hdtool.builders.evaluation.bench_plan import ContenderFactory
from hdtool.builders.evaluation.replay import with_own_history
from hdtool.builders.evaluation.timing import Stopwatch
from hdtool.data.answered_questions import AnsweredTurn
from hdtool.data.chat import encode_conversation
from hdtool.data.prompts import Prompt
from hdtool.runtime.answerer import Answer, Conversation, decode
from hdtool.runtime.config.decoding import DecodeConfig
from hdtool.runtime.config.model import ModelConfig, SamplingConfig
from hdtool.runtime.core.drafter import Drafter, NoDraft
from hdtool.runtime.core.sequence import Stats
from hdtool.runtime.drafters.methods import budget_for, drafter_with_budget, shared_costs_for
from hdtool.runtime.generation.text_stream import Piece
from hdtool.runtime.samplers import sampler_for
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import Loaded

MAX_ROUNDS = 3
"""Number of times that each question is answered by both methods, if there is time."""
SECONDS_PER_QUESTION = 2.5
"""No further round begins after so many seconds."""
ENGINE_TOKENS = 32
"""Number of tokens by which plain decoding is compared with ``generate``."""
MAX_DEVIATION = 0.05
"""Relative difference between the speed-ups by the clock and by CPU time above which the machine counts as busy."""


@dataclass(frozen=True)
class TimedAnswer:
    """The answer to the last question of a conversation, and how long it took."""

    output_ids: tuple[int, ...]
    """Tokens of all answers of the conversation."""
    pieces: tuple[Piece, ...]
    """Text of each token of the last answer, with its source."""
    stats: Stats
    seconds: float
    cpu_seconds: float
    """See ``own_seconds``."""


@dataclass(frozen=True)
class SpeedUp:
    """How many times as fast one method is as another."""

    by_clock: float
    by_cpu: float
    """In CPU time, which other programs change little."""

    @property
    def is_disturbed(self) -> bool:
        """True if other programs seem to have slowed one of the methods down more than the other."""
        return abs(self.by_clock / self.by_cpu - 1) > MAX_DEVIATION

    @property
    def best_known(self) -> float:
        return self.by_cpu if self.is_disturbed else self.by_clock


@dataclass(frozen=True)
class Figures:
    """What one method took for the answers to one or more questions."""

    tokens: int
    seconds: float
    """Median over the rounds, as is ``cpu_seconds``."""
    cpu_seconds: float
    stats: Stats
    """Statistics of the last round."""

    @classmethod
    def of(cls, rounds: Sequence[TimedAnswer]) -> Figures:
        seconds, cpu_seconds = median(one.seconds for one in rounds), median(one.cpu_seconds for one in rounds)
        return cls(rounds[-1].stats.tokens, seconds, cpu_seconds, rounds[-1].stats)

    @classmethod
    def total(cls, parts: Sequence[Figures]) -> Figures:
        return cls(
            sum(part.tokens for part in parts),
            sum(part.seconds for part in parts),
            sum(part.cpu_seconds for part in parts),
            Stats.total(part.stats for part in parts),
        )

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def speed_up_over(self, other: Figures) -> SpeedUp:
        """Return how many times as fast this method is as another for the same tokens."""
        return SpeedUp(other.seconds / self.seconds, other.cpu_seconds / self.cpu_seconds)


@dataclass(frozen=True)
class Comparison:
    """The answers to one or more questions by plain decoding and with drafts."""

    plain: Figures
    drafted: Figures
    same: int
    """Number of questions to which all answers have the same tokens."""
    pieces: tuple[Piece, ...] = ()
    """Text of each token of the last answer with drafts, with its source; empty for several questions."""

    @classmethod
    def of(cls, plain: Sequence[TimedAnswer], drafted: Sequence[TimedAnswer]) -> Comparison:
        """Return the comparison of the answers to one question in several rounds."""
        is_same = len({answer.output_ids for answer in (*plain, *drafted)}) == 1
        return cls(Figures.of(plain), Figures.of(drafted), int(is_same), drafted[-1].pieces)

    @classmethod
    def total(cls, parts: Sequence[Comparison]) -> Comparison:
        plain, drafted = Figures.total([one.plain for one in parts]), Figures.total([one.drafted for one in parts])
        return cls(plain, drafted, sum(one.same for one in parts))

    @property
    def speed_up(self) -> SpeedUp:
        return self.drafted.speed_up_over(self.plain)


def own_seconds(device: torch.device, seconds: float, cpu_seconds: float | None) -> float:
    """Return the CPU time of a measurement, or its wall time if another device computes."""
    return cpu_seconds if device.type == "cpu" and cpu_seconds is not None else seconds


class SideBySide:
    """Plain decoding and one drafting method on one model.

    Every answer has a new drafter, whose history holds no earlier answer to the question. All drafters share the
    measured costs of passes. Within a conversation, the KV cache of its earlier turns is kept.
    """

    def __init__(self, loaded: Loaded, store_set: StoreSet, decoding: DecodeConfig) -> None:
        self._loaded, self._store_set, self._decoding = loaded, store_set, decoding
        self._costs = cache(lambda: shared_costs_for(loaded.target, {1}))

    def compare(self, prompt: Prompt, rounds: int = MAX_ROUNDS) -> Comparison:
        """Answer a question by both methods, at most ``rounds`` times; the method that begins alternates."""
        began = time.perf_counter()
        plain, drafted = list[TimedAnswer](), list[TimedAnswer]()
        while not drafted or (len(drafted) < rounds and time.perf_counter() - began < SECONDS_PER_QUESTION):
            turns = [(plain, NoDraft()), (drafted, self._new_drafter())]
            for answers, drafter in turns if len(drafted) % 2 == 0 else turns[::-1]:
                answers.append(self._answer(prompt, drafter))
        return Comparison.of(plain, drafted)

    def _new_drafter(self) -> Drafter:
        stores = with_own_history(self._store_set, self._decoding)
        return drafter_with_budget(
            lambda: budget_for(self._decoding, self._costs), self._decoding, stores, self._loaded.target
        )

    def _answer(self, prompt: Prompt, drafter: Drafter) -> TimedAnswer:
        device, conversation, output_ids = self._loaded.target.device, Conversation(prompt), list[int]()
        while True:
            answer = self._begun(conversation, drafter, goes_on=bool(output_ids))
            with Stopwatch(device) as watch:
                pieces = tuple(answer.by_source())
            output_ids += answer.output_ids
            if not conversation.add_answer(answer.text):
                cpu_seconds = own_seconds(device, watch.seconds, watch.cpu_seconds)
                return TimedAnswer(tuple(output_ids), pieces, answer.stats, watch.seconds, cpu_seconds)

    def _begun(self, conversation: Conversation, drafter: Drafter, *, goes_on: bool) -> Answer:
        """Return the next answer of a conversation, to be generated; ``goes_on`` is True after the first one.

        The first prompt is read as a whole, because the cache holds the other method's answer to it.
        """
        loaded, room = self._loaded, self._decoding.max_new_tokens
        ids = encode_conversation(loaded.tokenizer, conversation.messages)
        sampler, stops = sampler_for(loaded, SamplingConfig(), ids, max_new_tokens=room)
        steps = decode(
            loaded.target,
            ids,
            sampler,
            max_new_tokens=room,
            stops=stops,
            drafter=drafter,
            prefix_caching=goes_on,
        )
        return Answer(loaded, drafter, conversation, len(ids), steps)


def engine_and_generate(loaded: Loaded, loading: ModelConfig, prompt: Prompt) -> tuple[Figures, Figures]:
    """Return the figures of transformers' ``generate`` and of plain decoding, which answer a prompt on one thread each.

    With more threads, those of a library that waits for its own would take the cores of a busy machine from the rest.
    """
    decoding, threads = DecodeConfig("ar", max_new_tokens=ENGINE_TOKENS), torch.get_num_threads()
    contenders = ContenderFactory(loaded, StoreSet(), loading, decoding, SamplingConfig()).contenders(
        ["generate", "ar"]
    )
    ids = encode_conversation(loaded.tokenizer, prompt.messages)
    try:
        torch.set_num_threads(1)
        generate, plain = (
            _figures_of(contender.answer(ids), loaded.target.device) for contender in contenders.values()
        )
    finally:
        torch.set_num_threads(threads)
    return generate, plain


def _figures_of(turn: AnsweredTurn, device: torch.device) -> Figures:
    cpu_seconds = own_seconds(device, turn.seconds, turn.cpu_seconds)
    return Figures(len(turn.output_ids), turn.seconds, cpu_seconds, Stats())
