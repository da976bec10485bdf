"""Answers a question by plain decoding and with drafts, in turn, and times both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch

from hdtool.builders.evaluation.bench_plan import ContenderFactory
from hdtool.builders.evaluation.contenders import FreshDrafters
from hdtool.builders.evaluation.experiment import Experiment, Figures, by_contender, identical, shown_pieces, timed_turn
from hdtool.data.answered_questions import AnsweredTurn
from hdtool.data.chat import encode_conversation
from hdtool.data.prompts import Prompt
from hdtool.runtime.answering.answer_plan import plan_answer
from hdtool.runtime.answering.dialogues import Dialogue
from hdtool.runtime.core.drafter import Drafter, NoDraft
from hdtool.runtime.generation.stop_strings import TextPiece
from hdtool.runtime.generation.text_stream import text_of
from hdtool.runtime.settings.decoding import DecodeConfig
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import Loaded

PLAIN, DRAFTED = "plain", "drafted"
MAX_ROUNDS = 3
"""Maximum number of times that both methods answer a question."""
SECONDS_PER_QUESTION = 2.5
"""Seconds after which no further round of a question begins."""
ENGINE_TOKENS = 32
"""Length, in tokens, of the answer on which plain decoding is compared with ``generate``."""
MAX_DEVIATION = 0.05
"""Relative difference between the speed-ups by the clock and by CPU time above which the machine counts as busy."""


@dataclass(frozen=True)
class SpeedUp:
    """How many times as fast one method is as another."""

    by_clock: float
    by_cpu: float
    """Ratio of CPU times, on which other programs have little effect."""

    @classmethod
    def of(cls, figures: Figures, other: Figures) -> SpeedUp:
        """Return how many times as fast the method with ``figures`` is as that with ``other``, for the same tokens."""
        return cls(other.seconds / figures.seconds, other.cpu_seconds / figures.cpu_seconds)

    @property
    def is_disturbed(self) -> bool:
        """True if other programs seem to have slowed one of the methods down more than the other."""
        return abs(self.by_clock / self.by_cpu - 1) > MAX_DEVIATION

    @property
    def best_known(self) -> float:
        return self.by_cpu if self.is_disturbed else self.by_clock


@dataclass(frozen=True)
class Comparison:
    """The answers to one or more questions by plain decoding and with drafts."""

    plain: Figures
    """Figures of plain decoding in the last round, with the median times of all rounds, as in ``drafted``."""
    drafted: Figures
    same: int
    """Number of questions to which all answers have the same tokens."""
    pieces: tuple[TextPiece, ...] = ()
    """Text of each token of the last answer with drafts, with its source; empty for several questions."""

    def __add__(self, other: Comparison) -> Comparison:
        return Comparison(self.plain + other.plain, self.drafted + other.drafted, self.same + other.same)

    @property
    def speed_up(self) -> SpeedUp:
        return SpeedUp.of(self.drafted, self.plain)


class SideBySide:
    """Plain decoding and one drafting method on one model.

    Every answer has a new drafter, whose history holds no earlier answer to the question. All drafters share the
    measured costs of passes. Within a conversation, the KV cache of its earlier turns is kept.
    """

    def __init__(self, loaded: Loaded, store_set: StoreSet, decoding: DecodeConfig) -> None:
        self._loaded, self._decoding = loaded, decoding
        self._new_drafter = FreshDrafters(loaded.target, store_set)

    def compare(self, prompt: Prompt, rounds: int = MAX_ROUNDS) -> Comparison:
        """Answer a question by both methods, at most ``rounds`` times, and return the figures of the last turn."""
        contenders = {
            PLAIN: lambda: partial(self._answered, NoDraft()),
            DRAFTED: lambda: partial(self._answered, self._new_drafter(self._decoding)),
        }
        (rows,) = Experiment(contenders, rounds, max_seconds=SECONDS_PER_QUESTION).rows([prompt])
        last_turns = {name: [row.turns[-1] for row in answered] for name, answered in by_contender(rows).items()}
        plain, drafted = (median_figures(last_turns[name], self._loaded.target.device) for name in contenders)
        last = last_turns[DRAFTED][-1]
        pieces = tuple(shown_pieces(self._loaded.tokenizer, last.output_ids, last.drafted_by))
        return Comparison(plain, drafted, int(identical(rows)), pieces)

    def _answered(self, drafter: Drafter, prompt: Prompt) -> list[AnsweredTurn]:
        loaded, dialogue, turns = self._loaded, Dialogue(prompt), list[AnsweredTurn]()
        while True:
            ids = encode_conversation(loaded.tokenizer, dialogue.messages)
            plan = plan_answer(loaded, SamplingConfig(), ids, self._decoding.max_new_tokens)
            # The first prompt is read as a whole, because the cache holds the other method's answer to it.
            turns.append(timed_turn(loaded.target, plan.request(None, drafter), prefix_caching=bool(turns)))
            if not dialogue.add_answer(text_of(loaded.tokenizer, turns[-1].output_ids)):
                return turns


def median_figures(rounds: Sequence[AnsweredTurn], device: torch.device) -> Figures:
    """Return the last round's figures with the median times; unless measured on a CPU, CPU time is the wall time."""
    seconds = median(turn.seconds for turn in rounds)
    measured = [turn.cpu_seconds for turn in rounds if turn.cpu_seconds is not None and device.type == "cpu"]
    return replace(Figures.of(rounds[-1:]), seconds=seconds, cpu_seconds=median(measured) if measured else seconds)


def engine_and_generate(loaded: Loaded, loading: ModelConfig, prompt: Prompt) -> tuple[Figures, Figures]:
    """Answer a prompt on one thread with ``generate`` and then with plain decoding; return ``(generate, plain)``.

    With several threads, a library that busy-waits would take the cores of a busy machine from everything else.
    """
    decoding, threads = DecodeConfig("ar", max_new_tokens=ENGINE_TOKENS), torch.get_num_threads()
    contenders = ContenderFactory(loaded, StoreSet(), loading, decoding, SamplingConfig()).contenders(
        ["generate", "ar"]
    )
    ids = encode_conversation(loaded.tokenizer, prompt.messages)
    try:
        torch.set_num_threads(1)
        generate, plain = (
            median_figures([contender.answer(ids)], loaded.target.device) for contender in contenders.values()
        )
    finally:
        torch.set_num_threads(threads)
    return generate, plain
