"""Benchmarks that time contenders as they answer questions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from hdtool.builders.evaluation.contenders import Contender
from hdtool.builders.evaluation.experiment import Answering, Experiment, Row, by_contender
from hdtool.data.answered_questions import AnsweredQuestion, AnsweredTurn, question_id
from hdtool.data.chat import encode_answer, encode_conversation
from hdtool.data.errors import PromptError
from hdtool.data.prompts import Message, Prompt
from hdtool.runtime.answering.answer_plan import compiler_for
from hdtool.runtime.core.request import room_for
from hdtool.runtime.core.step import Finish
from hdtool.runtime.generation.grammar import GrammarCompiler
from hdtool.runtime.settings.measuring import COLD, WARM
from hdtool.runtime.target.load import Loaded

OnTurn = Callable[[], None]


@dataclass(frozen=True)
class Bench:
    """Benchmark of several contenders on one model.

    In later turns, each contender continues its own answers. No drafter answers a question twice, because its history
    would hold the answer. Compiled code and measured pass times are shared by all contenders.
    """

    loaded: Loaded
    contenders: Mapping[str, Contender]
    max_new_tokens: int
    chat: bool | None = None
    rounds: int = 1
    drafters: str = COLD

    def check(self, questions: Sequence[Prompt]) -> None:
        """Raise a ``PromptError`` if a question cannot be answered or, with warm drafters, is repeated."""
        self._refuse_repeated(questions)
        for question in questions:
            try:
                self._check_room(question)
            except PromptError as error:
                raise PromptError(f"question {question.id}: {error}") from None

    def fits(self, question: Prompt) -> bool:
        """Return True if the question fits the context, its grammar is usable, and the chat template accepts it."""
        try:
            self._check_room(question)
        except PromptError:
            return False
        return True

    def warm_up(self, questions: Iterable[Prompt], on_turn: OnTurn = lambda: None) -> None:
        """Answer questions that are not measured, to fill caches and select kernels."""
        self._experiment(on_turn).warm_up(questions)

    def answers(
        self, questions: Sequence[Prompt], done: int = 0, on_turn: OnTurn = lambda: None
    ) -> Iterator[dict[str, AnsweredQuestion]]:
        """Yield all contenders' answers to each question, skipping the first ``done`` questions.

        With several rounds, each contender's answer comes from the round in which its speed was the median. ``on_turn``
        is called after each turn that a contender has answered.
        """
        for question, rows in zip(questions[done:], self._experiment(on_turn).rows(questions, done), strict=True):
            by_name = by_contender(rows)
            yield {name: _median_round(question, by_name[name]) for name in self.contenders}

    def _experiment(self, on_turn: OnTurn) -> Experiment[Prompt]:
        contenders = {name: partial(self._fresh, contender, on_turn) for name, contender in self.contenders.items()}
        return Experiment(contenders, self.rounds, self.drafters)

    def _fresh(self, contender: Contender, on_turn: OnTurn) -> Answering[Prompt]:
        return partial(self._answered, contender.fresh(), on_turn)

    def _check_room(self, question: Prompt) -> None:
        room_for(self.loaded.target, self._encode(question, question.messages), self.max_new_tokens)
        self._grammars.guide_for(question.grammar)
        if question.later_turns:
            self._encode(question, question.conversation([""] * len(question.later_turns)))

    def _refuse_repeated(self, questions: Sequence[Prompt]) -> None:
        """Raise a ``PromptError`` for repeated questions if drafters are warm: their history would hold the answer."""
        first_ids: dict[str, str] = {}
        for question in questions if self.drafters == WARM else ():
            text = json.dumps([question.messages, question.later_turns])
            if text in first_ids:
                raise PromptError(
                    f"questions {first_ids[text]} and {question.id} are equal, and warm drafters would know the "
                    f"answer to the second: remove it, or measure with --memory {COLD}"
                )
            first_ids[text] = question.id

    def _answered(self, contender: Contender, on_turn: OnTurn, question: Prompt) -> list[AnsweredTurn]:
        turns: list[AnsweredTurn] = []
        for _ in range(turn_count(question)):
            ids = self._encode(question, question.conversation([turn.text for turn in turns]))
            limit = self.loaded.target.context_limit(len(ids))
            has_room = not turns or limit is None or len(ids) < limit
            guide, prediction = self._grammars.guide_for(question.grammar), () if turns else self._prediction(question)
            turns.append(contender.answer(ids, guide, prediction) if has_room else OUT_OF_CONTEXT)
            on_turn()
        return turns

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        return compiler_for(self.loaded)

    def _prediction(self, question: Prompt) -> Sequence[int]:
        """Return the token ids of the question's predicted answer; empty if it has none."""
        return encode_answer(self.loaded.tokenizer, question.messages, question.prediction, chat=self.chat)

    def _encode(self, question: Prompt, messages: Sequence[Message]) -> list[int]:
        return encode_conversation(self.loaded.tokenizer, messages, chat=self.chat, tools=question.tools)


OUT_OF_CONTEXT = AnsweredTurn("", [], [], 0.0, finish=str(Finish.CONTEXT))
"""Answer to a later turn whose conversation already fills the model's context."""


def turn_count(question: Prompt) -> int:
    return 1 + len(question.later_turns)


def questions_hash(questions: Sequence[Prompt]) -> str:
    rows = []
    for question in questions:
        row: list[Any] = [question.id, question.category, question.messages, question.later_turns]
        grammar = [question.grammar.kind.value, question.grammar.text] if question.grammar else None
        if grammar or question.tools:  # omitted for free text, to keep its hash unchanged
            row += [grammar, question.tools]
        if question.prediction:
            row.append(question.prediction)
        rows.append(row)
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _median_round(question: Prompt, rows: Sequence[Row]) -> AnsweredQuestion:
    """Return the answer of the round with the (lower) median speed, and the seconds of all rounds."""
    by_speed = sorted(rows, key=lambda row: row.tokens_per_second)
    chosen = by_speed[(len(by_speed) - 1) // 2]
    seconds = tuple(tuple(turn.seconds for turn in row.turns) for row in rows)
    return AnsweredQuestion(question_id(question.id), question.category, chosen.turns, seconds)
