"""Experiments: contenders answer the same questions in turn, and every answer becomes a row."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from transformers import PreTrainedTokenizerBase

from hdtool.builders.evaluation.timing import Stopwatch
from hdtool.data.answered_questions import AnsweredTurn, Answers
from hdtool.runtime.core.request import Request
from hdtool.runtime.core.session import decode_request
from hdtool.runtime.core.step import Stats, Step
from hdtool.runtime.generation.stop_strings import TextPiece
from hdtool.runtime.generation.text_stream import pieces_of
from hdtool.runtime.settings.draft_sources import SourceId
from hdtool.runtime.settings.measuring import COLD, WARM
from hdtool.runtime.target.target import Target

Question = TypeVar("Question")
Answering = Callable[[Question], Sequence[AnsweredTurn]]
"""Function by which a contender answers all turns of a question."""


@dataclass(frozen=True)
class Row(Answers):
    """Answers of a contender to the turns of a question in one round."""

    contender: str
    question: int
    round: int
    turns: tuple[AnsweredTurn, ...]


@dataclass(frozen=True)
class Experiment(Generic[Question]):
    """Contenders that answer the same questions.

    All contenders answer a question before the next question starts, so that changes in machine speed affect all of
    them; their order rotates from round to round and from question to question.
    """

    contenders: Mapping[str, Callable[[], Answering[Question]]]
    """Functions that make the contenders; a new contender has learned nothing from earlier questions."""
    rounds: int = 1
    memory: str = COLD
    """A ``COLD`` contender answers one question only; a ``WARM`` one answers all questions of a round."""
    max_seconds: float = math.inf
    """Seconds after which no further round of a question begins."""

    def rows(self, questions: Sequence[Question], done: int = 0) -> Iterator[list[Row]]:
        """Yield the rows of each question, skipping the first ``done`` questions."""
        lasting = [self._made() for _ in range(self.rounds)] if self.memory == WARM else None
        for place, question in enumerate(questions[done:], start=done):
            rows, began = list[Row](), time.perf_counter()
            for number in range(self.rounds):
                if number and time.perf_counter() - began >= self.max_seconds:
                    break
                contenders = lasting[number] if lasting else self._made()
                for name in rotated(list(contenders), place * self.rounds + number):
                    rows.append(Row(name, place, number, tuple(contenders[name](question))))
            yield rows

    def warm_up(self, questions: Iterable[Question]) -> None:
        """Answer questions that are not measured, to fill caches and select kernels."""
        for question in questions:
            for contender in self._made().values():
                contender(question)

    def _made(self) -> dict[str, Answering[Question]]:
        return {name: new() for name, new in self.contenders.items()}


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """Return the names, rotated to the left by ``turn`` places."""
    first = turn % len(names)
    return [*names[first:], *names[:first]]


def by_contender(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Group rows by contender; each group is in the order of rounds."""
    grouped: dict[str, list[Row]] = {}
    for row in rows:
        grouped.setdefault(row.contender, []).append(row)
    return grouped


def identical(answers: Sequence[Answers]) -> bool:
    """Return True if all answers have the same tokens."""
    return all(one.output_ids == answers[0].output_ids for one in answers)


def shown_pieces(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], sources: Sequence[int]) -> list[TextPiece]:
    """Return the text of each token that has any, with the source that drafted the token."""
    drafted = zip(tokens, map(SourceId, sources), strict=True)
    return [piece for piece in pieces_of(tokenizer, drafted) if piece[0]]


@dataclass(frozen=True)
class DecodedTurn(AnsweredTurn):
    """Turn answered by hdtool's loop, with the statistics of its steps."""

    stats: Stats = field(default_factory=Stats)
    later: Stats = field(default_factory=Stats)
    """Statistics of all steps but the prefill."""


def timed_turn(target: Target, request: Request[Any], *, prefix_caching: bool = False) -> DecodedTurn:
    """Answer a request, and return the timed answer, whose text is left empty.

    With ``prefix_caching``, a prefix of the prompt that an earlier answer left in the cache is not prefilled again.
    """
    stats, later, steps = Stats(), Stats(), list[Step]()
    decoding = decode_request(target, request, prefix_caching=prefix_caching)
    with Stopwatch(target.device) as watch:
        for step in stats.counted(decoding, request.drafter):
            watch.first_token()
            steps.append(step)
    for step in steps[1:]:
        later.add(step)
    return DecodedTurn(
        "",
        [token for step in steps for token in step.tokens],
        [len(step.tokens) for step in steps],
        **watch.times(),
        finish=str(steps[-1].finish),
        nodes=sum(len(step.tree) for step in steps),
        draft_seconds=stats.draft_seconds,
        model_seconds=stats.verify_seconds,
        drafted_by=[int(source) for step in steps for source in step.sources],
        sources=stats.sources_json(),
        stats=stats,
        later=later,
    )


@dataclass(frozen=True)
class Figures:
    """Token count, times and decoding statistics of one or more answers of a contender."""

    tokens: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    waited_seconds: float = 0.0
    stats: Stats = field(default_factory=Stats)
    """Statistics of all steps; empty for contenders that are not hdtool's methods."""
    later: Stats = field(default_factory=Stats)
    """Statistics of all steps but prefills."""

    @classmethod
    def of(cls, turns: Iterable[AnsweredTurn]) -> Figures:
        """Return the figures summed over ``turns``, in which an unknown time counts as 0."""
        whole = cls()
        for turn in turns:
            decoded = (turn.stats, turn.later) if isinstance(turn, DecodedTurn) else ()
            cpu_seconds, waited_seconds = turn.cpu_seconds or 0.0, turn.waited_seconds or 0.0
            whole += cls(len(turn.output_ids), turn.seconds, cpu_seconds, waited_seconds, *decoded)
        return whole

    def __add__(self, other: Figures) -> Figures:
        return Figures(
            self.tokens + other.tokens,
            self.seconds + other.seconds,
            self.cpu_seconds + other.cpu_seconds,
            self.waited_seconds + other.waited_seconds,
            Stats.total([self.stats, other.stats]),
            Stats.total([self.later, other.later]),
        )

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_cpu_second(self) -> float:
        return self.tokens / self.cpu_seconds if self.cpu_seconds else 0.0
