"""Real forward passes with recorded answers: the speed of a model of some shape, without its weights."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hdtool.builders.evaluation.contenders import Contender, timed
from hdtool.builders.evaluation.recording import RecordedTurn
from hdtool.data.chat import encode_answer, encode_conversation
from hdtool.data.conversation_shapes import AnsweredQuestion, AnsweredTurn, question_id
from hdtool.data.errors import HdtoolError, PromptError, reason_of
from hdtool.data.prompts import Message, Prompt
from hdtool.runtime.answerer import decode
from hdtool.runtime.config import COLD, WARM, SamplingConfig
from hdtool.runtime.drafter import Drafter
from hdtool.runtime.kernels.topk import argmax
from hdtool.runtime.model.load import Loaded
from hdtool.runtime.model.target import Target
from hdtool.runtime.sampling.sampler import Sampler
from hdtool.runtime.sequence import Finish, Stats, Step, room_for


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


COPIED = {"cuda": 1 << 31}
"""Bytes copied to measure memory bandwidth: many times the size of the processor's caches."""
COPIED_ELSEWHERE = 1 << 27
COPIES = 5


class RecordedSampler(Sampler):
    """Chooses the recorded tokens, whatever the logits."""

    def __init__(self, turn: RecordedTurn) -> None:
        super().__init__(SamplingConfig(), turn.prompt)
        self._begin, self._answer = len(turn.prompt), turn.answer
        self.walks = False
        self.draws = None

    def chooser(self, logits: torch.Tensor, **known: Any) -> Callable[[int], int]:
        if logits.is_cpu:  # as slow as a real choice; elsewhere the arg-max is part of the pass
            argmax(logits)
        return lambda row: self._answer[len(self.context) - self._begin]


@dataclass
class Timing:
    """The time that one contender took for recorded answers."""

    tokens: int = 0
    seconds: float = 0.0
    stats: Stats | None = None
    """Only for hdtool's own methods."""
    later: Stats | None = None
    """The same without the passes over prompts."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


ReplayRunner = Callable[[RecordedTurn], Timing]
"""Makes a recorded answer again and times it."""


def drafting_runner(target: Target, drafter: Drafter) -> ReplayRunner:
    """hdtool's own loop."""

    def run(turn: RecordedTurn) -> Timing:
        sampler, most = RecordedSampler(turn), len(turn.answer)
        steps = decode(
            target, turn.prompt, sampler, max_new_tokens=most, drafter=drafter, prefix_caching=False
        )  # a contender would profit from prompts that others read
        made, seconds = timed(target.device, lambda: list(steps))
        stats = _added(made)
        return Timing(stats.tokens, seconds, stats, _added(made[1:]))

    return run


def generate_runner(target: Target, **options: Any) -> ReplayRunner:
    """``model.generate``, for as many tokens as recorded; its tokens differ from the recorded ones."""
    model: Any = target.model

    def run(turn: RecordedTurn) -> Timing:
        prompt = torch.tensor([turn.prompt], device=target.device)
        length = len(turn.answer)
        given = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "eos_token_id": None, **options}
        output, seconds = timed(
            target.device, lambda: model.generate(prompt, max_new_tokens=length, min_new_tokens=length, **given)
        )
        return Timing(output.shape[1] - len(turn.prompt), seconds)

    return run


def paired_benchmark(
    new_runners: Callable[[], Mapping[str, ReplayRunner]], turns: Sequence[RecordedTurn]
) -> Iterator[dict[str, Timing]]:
    """Time all contenders on recorded turns; yields what each took so far, after every turn.

    All of them answer a turn before the next turn starts; the order rotates from turn to turn. Each runs every turn
    once: the longest is run before as a warm-up, so that no cache grows in a measured one, by runners of its own, whose
    history is discarded. A contender that fails is left out with a note, so that the figures of the others are not
    lost.
    """
    longest = max(turns, key=lambda turn: len(turn.prompt) + len(turn.answer))
    failed = {name for name, runner in new_runners().items() if _timed(name, runner, longest) is None}
    runners = {name: runner for name, runner in new_runners().items() if name not in failed}
    totals: dict[str, list[Timing]] = {name: [] for name in runners}
    for place, turn in enumerate(turns):
        for name in in_turn(list(totals), place):
            timing = _timed(name, runners[name], turn)
            if timing is None:
                del totals[name]
            else:
                totals[name].append(timing)
        yield {name: _sum(parts) for name, parts in totals.items()}


def _timed(name: str, runner: ReplayRunner, turn: RecordedTurn) -> Timing | None:
    """The timing of a turn; None, with a note, if the contender failed."""
    try:
        return runner(turn)
    except HdtoolError:
        raise
    except Exception as error:  # compilers and kernels raise errors of many classes
        print(f"note: {name} is left out, because it failed ({reason_of(error)})", file=sys.stderr)
        return None


def _added(steps: Sequence[Step]) -> Stats:
    stats = Stats()
    for step in steps:
        stats.add(step)
    return stats


def _sum(parts: Sequence[Timing]) -> Timing:
    stats = [part.stats for part in parts if part.stats]
    later = [part.later for part in parts if part.later]
    return Timing(
        sum(part.tokens for part in parts),
        sum(part.seconds for part in parts),
        Stats.total(stats) if stats else None,
        Stats.total(later) if later else None,
    )


def bandwidth(device: torch.device) -> float:
    """Bytes per second that this device reads and writes in a copy; the best of several copies."""
    size = COPIED.get(device.type, COPIED_ELSEWHERE)
    source, copy = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / min(timed(device, lambda: copy.copy_(source))[1] for _ in range(COPIES))


def fitting(turns: Sequence[RecordedTurn], target: Target, most: int) -> list[RecordedTurn]:
    """Turns that end within the model's context, answers cut off after ``most`` tokens."""
    kept = []
    for turn in turns:
        limit = target.context_limit(len(turn.prompt))
        if limit is None or len(turn.prompt) + min(most, len(turn.answer)) <= limit:
            kept.append(replace(turn, answer=turn.answer[:most]))
    return kept
