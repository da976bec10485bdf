"""A benchmark: all contenders answer every question, one after another, on one model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hdtool.data.chat import encode_answer, encode_conversation
from hdtool.data.errors import PromptError
from hdtool.data.prompts import Message, Prompt
from hdtool.data.spec_bench import AnsweredQuestion, AnsweredTurn, question_id
from hdtool.runtime.config import COLD, WARM
from hdtool.runtime.evaluation.contenders import Contender
from hdtool.runtime.model.load import Loaded
from hdtool.runtime.sequence import Finish, room_for


@dataclass(frozen=True)
class Bench:
    """Contenders on one model.

    All of them answer a question before the next one starts, so that a change in the speed of the machine affects
    all of them; the order rotates from question to question. Later turns follow a contender's own answers.

    No drafter answers a question twice, because its history would hold the answer. ``COLD`` drafters answer one
    question; ``WARM`` ones answer all questions in one round and begin after the warm-up. Compiled code and the
    measured times of forward passes are common to all of them.
    """

    loaded: Loaded
    contenders: Mapping[str, Contender]
    max_new_tokens: int
    chat: bool | None = None
    rounds: int = 1
    drafters: str = COLD
    on_answer: Callable[[], None] = lambda: None
    """Called after each turn that a contender has answered."""

    def check(self, questions: Sequence[Prompt]) -> None:
        """Refuse a question that cannot be answered, before any is answered."""
        self._refuse_repeated(questions)
        for question in questions:
            try:
                self._check_room(question)
            except PromptError as error:
                raise PromptError(f"question {question.id}: {error}") from None

    def fits(self, question: Prompt) -> bool:
        """Whether a question can be answered."""
        try:
            self._check_room(question)
        except PromptError:
            return False
        return True

    def warm_up(self, questions: Iterable[Prompt]) -> None:
        """Answer questions without measuring, to fill caches and choose kernels; none of them may be measured."""
        for question in questions:
            for contender in self.contenders.values():
                self._answered(question, contender.fresh())

    def answers(self, questions: Sequence[Prompt], done: int = 0) -> Iterator[dict[str, AnsweredQuestion]]:
        """The answers of all contenders to each question; of several rounds, the one of median speed."""
        lasting = [self._fresh() for _ in range(self.rounds)] if self.drafters == WARM else None
        for place, question in enumerate(questions[done:], start=done):
            found: dict[str, list[AnsweredQuestion]] = {name: [] for name in self.contenders}
            for number in range(self.rounds):
                contenders = lasting[number] if lasting else self._fresh()
                for name in in_turn(list(contenders), place * self.rounds + number):
                    found[name].append(self._answered(question, contenders[name]))
            yield {name: _of_median_speed(rounds) for name, rounds in found.items()}

    def _fresh(self) -> dict[str, Contender]:
        return {name: contender.fresh() for name, contender in self.contenders.items()}

    def _check_room(self, question: Prompt) -> None:
        room_for(self.loaded.target, self._encode(question, question.messages), self.max_new_tokens)
        self.loaded.guide(question.grammar)
        if question.later_turns:
            self._encode(question, question.conversation([""] * len(question.later_turns)))

    def _refuse_repeated(self, questions: Sequence[Prompt]) -> None:
        """Refuse equal questions for warm drafters, which would draft the answer from the history."""
        asked: dict[str, str] = {}
        for question in questions if self.drafters == WARM else ():
            text = json.dumps([question.messages, question.later_turns])
            if text in asked:
                raise PromptError(
                    f"questions {asked[text]} and {question.id} are equal, and warm drafters would know the answer to "
                    f"the second: remove it, or measure with --memory {COLD}"
                )
            asked[text] = question.id

    def _answered(self, question: Prompt, contender: Contender) -> AnsweredQuestion:
        turns: list[AnsweredTurn] = []
        for _ in range(turns_of(question)):
            ids = self._encode(question, question.conversation([turn.text for turn in turns]))
            limit = self.loaded.target.context_limit(len(ids))
            has_room = not turns or limit is None or len(ids) < limit
            guide, prediction = self.loaded.guide(question.grammar), () if turns else self._prediction(question)
            turns.append(contender.answer(ids, guide, prediction) if has_room else OUT_OF_CONTEXT)
            self.on_answer()
        return AnsweredQuestion(question_id(question.id), question.category, tuple(turns))

    def _prediction(self, question: Prompt) -> Sequence[int]:
        """The prediction of the first answer, if there is one."""
        return encode_answer(self.loaded.tokenizer, question.messages, question.prediction, chat=self.chat)

    def _encode(self, question: Prompt, messages: Sequence[Message]) -> list[int]:
        return encode_conversation(self.loaded.tokenizer, messages, chat=self.chat, tools=question.tools)


OUT_OF_CONTEXT = AnsweredTurn("", [], [], 0.0, finish=str(Finish.CONTEXT))
"""The answer to a later turn if the turns before it fill the model's context."""


def turns_of(question: Prompt) -> int:
    return 1 + len(question.later_turns)


def in_turn(names: Sequence[str], turn: int) -> list[str]:
    """The names, rotated by one more place each turn."""
    first = turn % len(names)
    return [*names[first:], *names[:first]]


def hash_of(questions: Sequence[Prompt]) -> str:
    """A hash of a list of questions."""
    rows = []
    for question in questions:
        row: list[Any] = [question.id, question.category, question.messages, question.later_turns]
        grammar = [question.grammar.kind.value, question.grammar.text] if question.grammar else None
        if grammar or question.tools:  # nothing for free text, whose hash stays as it was
            row += [grammar, question.tools]
        if question.prediction:
            row.append(question.prediction)
        rows.append(row)
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _of_median_speed(rounds: Sequence[AnsweredQuestion]) -> AnsweredQuestion:
    """The round of median speed as a whole, so that tokens and times belong together; of two, the slower."""
    by_speed = sorted(rounds, key=lambda answered: answered.tokens_per_second)
    chosen = by_speed[(len(by_speed) - 1) // 2]
    seconds = tuple(tuple(turn.seconds for turn in answered.turns) for answered in rounds)
    return AnsweredQuestion(chosen.question_id, chosen.category, chosen.turns, seconds)
