"""Benchmarks that time contenders as they answer questions or replay recorded answers with real forward passes."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from hdtool.builders.evaluation.contenders import Contender
from hdtool.builders.evaluation.recording import RecordedTurn
from hdtool.builders.evaluation.timing import Stopwatch, timed
from hdtool.data.chat import encode_answer, encode_conversation
from hdtool.data.conversation_shapes import AnsweredQuestion, AnsweredTurn, question_id
from hdtool.data.errors import HdtoolError, PromptError, error_reason
from hdtool.data.prompts import Message, Prompt
from hdtool.runtime.answerer import decode
from hdtool.runtime.config import COLD, WARM, SamplingConfig
from hdtool.runtime.core.drafter import Drafter
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.sequence import Finish, Stats, Step, room_for
from hdtool.runtime.generation.grammar import GrammarCompiler, Guide
from hdtool.runtime.kernels.topk import argmax
from hdtool.runtime.samplers import compiler_for
from hdtool.runtime.target.load import Loaded
from hdtool.runtime.target.target import Target


@dataclass(frozen=True)
class Bench:
    """Benchmark of several contenders on one model.

    All contenders answer a question before the next question starts, so that changes in machine speed affect all of
    them; their order rotates from question to question. In later turns, each contender continues its own answers.

    No drafter answers a question twice, because its history would hold the answer. A ``COLD`` drafter answers one
    question only. A ``WARM`` drafter answers all questions of a round and starts after the warm-up. Compiled code and
    measured pass times are shared by all contenders.
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
        """Check in advance: raise a ``PromptError`` if a question is unanswerable or, with warm drafters, repeated."""
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

    def warm_up(self, questions: Iterable[Prompt]) -> None:
        """Answer questions that are not measured, to fill caches and select kernels."""
        for question in questions:
            for contender in self.contenders.values():
                self._answered(question, contender.fresh())

    def answers(self, questions: Sequence[Prompt], done: int = 0) -> Iterator[dict[str, AnsweredQuestion]]:
        """Yield all contenders' answers to each question, skipping the first ``done`` questions.

        With several rounds, each contender's answer comes from the round in which its speed was the median.
        """
        lasting = [self._fresh() for _ in range(self.rounds)] if self.drafters == WARM else None
        for place, question in enumerate(questions[done:], start=done):
            answers_by_name: dict[str, list[AnsweredQuestion]] = {name: [] for name in self.contenders}
            for number in range(self.rounds):
                contenders = lasting[number] if lasting else self._fresh()
                for name in rotated(list(contenders), place * self.rounds + number):
                    answers_by_name[name].append(self._answered(question, contenders[name]))
            yield {name: _median_round(rounds) for name, rounds in answers_by_name.items()}

    def _fresh(self) -> dict[str, Contender]:
        return {name: contender.fresh() for name, contender in self.contenders.items()}

    def _check_room(self, question: Prompt) -> None:
        room_for(self.loaded.target, self._encode(question, question.messages), self.max_new_tokens)
        self._guide(question)
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

    def _answered(self, question: Prompt, contender: Contender) -> AnsweredQuestion:
        turns: list[AnsweredTurn] = []
        for _ in range(turn_count(question)):
            ids = self._encode(question, question.conversation([turn.text for turn in turns]))
            limit = self.loaded.target.context_limit(len(ids))
            has_room = not turns or limit is None or len(ids) < limit
            guide, prediction = self._guide(question), () if turns else self._prediction(question)
            turns.append(contender.answer(ids, guide, prediction) if has_room else OUT_OF_CONTEXT)
            self.on_answer()
        return AnsweredQuestion(question_id(question.id), question.category, tuple(turns))

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        return compiler_for(self.loaded)

    def _guide(self, question: Prompt) -> Guide | None:
        return self._grammars.guide(question.grammar) if question.grammar else None

    def _prediction(self, question: Prompt) -> Sequence[int]:
        """Return the token ids of the question's predicted answer; empty if it has none."""
        return encode_answer(self.loaded.tokenizer, question.messages, question.prediction, chat=self.chat)

    def _encode(self, question: Prompt, messages: Sequence[Message]) -> list[int]:
        return encode_conversation(self.loaded.tokenizer, messages, chat=self.chat, tools=question.tools)


OUT_OF_CONTEXT = AnsweredTurn("", [], [], 0.0, finish=str(Finish.CONTEXT))
"""Answer to a later turn whose conversation already fills the model's context."""


def turn_count(question: Prompt) -> int:
    return 1 + len(question.later_turns)


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """Return the names, rotated to the left by ``turn`` places."""
    first = turn % len(names)
    return [*names[first:], *names[:first]]


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


def _median_round(rounds: Sequence[AnsweredQuestion]) -> AnsweredQuestion:
    """Return the answer of the round with the (lower) median speed, so that its tokens and times belong together."""
    by_speed = sorted(rounds, key=lambda answered: answered.tokens_per_second)
    chosen = by_speed[(len(by_speed) - 1) // 2]
    seconds = tuple(tuple(turn.seconds for turn in answered.turns) for answered in rounds)
    return AnsweredQuestion(chosen.question_id, chosen.category, chosen.turns, seconds)


COPIED_BYTES = {"cuda": 1 << 31}
"""Bytes copied to measure memory bandwidth, by device type: several times the size of the device's caches."""
DEFAULT_COPIED_BYTES = 1 << 27
COPIES = 5


class RecordedSampler(Sampler):
    """Sampler that chooses the recorded tokens, regardless of the logits."""

    def __init__(self, turn: RecordedTurn) -> None:
        super().__init__(SamplingConfig(), turn.prompt)
        self._begin, self._answer = len(turn.prompt), turn.answer
        self.chooses_by_argmax = False
        self.draws = None

    def chooser(self, logits: torch.Tensor, **known: Any) -> Callable[[int], int]:
        if logits.is_cpu:  # takes as long as a real choice; on other devices, argmax is part of the pass
            argmax(logits)
        return lambda row: self._answer[len(self.context) - self._begin]


@dataclass
class Timing:
    """Time that one contender took to reproduce recorded answers."""

    tokens: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    waited_seconds: float = 0.0
    stats: Stats | None = None
    """Statistics of all steps; None if the contender is not one of hdtool's methods."""
    later: Stats | None = None
    """Statistics of all steps but the prefill; None if ``stats`` is None."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_cpu_second(self) -> float:
        return self.tokens / self.cpu_seconds if self.cpu_seconds else 0.0


ReplayRunner = Callable[[RecordedTurn], Timing]
"""Reproduces a recorded answer with real forward passes and times it."""


def drafting_runner(target: Target, drafter: Drafter) -> ReplayRunner:
    """Return a runner that feeds a recorded answer through hdtool's decoding loop."""

    def run(turn: RecordedTurn) -> Timing:
        sampler, max_tokens = RecordedSampler(turn), len(turn.answer)
        steps = decode(
            target, turn.prompt, sampler, max_new_tokens=max_tokens, drafter=drafter, prefix_caching=False
        )  # prefix caching would let a contender profit from prompts that another contender has prefilled
        with Stopwatch(target.device) as watch:
            made = list(steps)
        stats = _total_stats(made)
        return Timing(
            stats.tokens, watch.seconds, watch.cpu_seconds, watch.waited_seconds, stats, _total_stats(made[1:])
        )

    return run


def generate_runner(target: Target, **options: Any) -> ReplayRunner:
    """Return a runner that calls ``model.generate`` for as many tokens as were recorded; their ids may differ."""
    model: Any = target.model

    def run(turn: RecordedTurn) -> Timing:
        prompt = torch.tensor([turn.prompt], device=target.device)
        length = len(turn.answer)
        settings = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "eos_token_id": None, **options}
        with Stopwatch(target.device) as watch:
            output = model.generate(prompt, max_new_tokens=length, min_new_tokens=length, **settings)
        made = output.shape[1] - len(turn.prompt)
        return Timing(made, watch.seconds, watch.cpu_seconds, watch.waited_seconds)

    return run


def paired_benchmark(
    new_runners: Callable[[], Mapping[str, ReplayRunner]], turns: Sequence[RecordedTurn]
) -> Iterator[dict[str, Timing]]:
    """Time all contenders on recorded turns, yielding each contender's running total after every turn.

    All contenders run a turn before the next turn starts, and their order rotates. Every turn runs once per contender.
    To warm up, the longest turn runs first with separate runners, so that no cache grows in a measured turn and no
    history is carried over. A contender that fails is left out with a note, without affecting the other results.
    """
    longest = max(turns, key=lambda turn: len(turn.prompt) + len(turn.answer))
    failed = {name for name, runner in new_runners().items() if _timed(name, runner, longest) is None}
    runners = {name: runner for name, runner in new_runners().items() if name not in failed}
    totals: dict[str, list[Timing]] = {name: [] for name in runners}
    for place, turn in enumerate(turns):
        for name in rotated(list(totals), place):
            timing = _timed(name, runners[name], turn)
            if timing is None:
                del totals[name]
            else:
                totals[name].append(timing)
        yield {name: _total_timing(parts) for name, parts in totals.items()}


def _timed(name: str, runner: ReplayRunner, turn: RecordedTurn) -> Timing | None:
    """Time a turn; print a note and return None if the contender fails."""
    try:
        return runner(turn)
    except HdtoolError:
        raise
    except Exception as error:  # compilers and kernels raise many kinds of errors
        print(f"note: {name} is left out, because it failed ({error_reason(error)})", file=sys.stderr)
        return None


def _total_stats(steps: Sequence[Step]) -> Stats:
    stats = Stats()
    for step in steps:
        stats.add(step)
    return stats


def _total_timing(parts: Sequence[Timing]) -> Timing:
    stats = [part.stats for part in parts if part.stats]
    later = [part.later for part in parts if part.later]
    return Timing(
        sum(part.tokens for part in parts),
        sum(part.seconds for part in parts),
        sum(part.cpu_seconds for part in parts),
        sum(part.waited_seconds for part in parts),
        Stats.total(stats) if stats else None,
        Stats.total(later) if later else None,
    )


def copy_bandwidth(device: torch.device) -> float:
    """Return the device's memory bandwidth (bytes read plus written per second), from the fastest of several copies."""
    size = COPIED_BYTES.get(device.type, DEFAULT_COPIED_BYTES)
    source, copy = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / min(timed(device, lambda: copy.copy_(source))[1] for _ in range(COPIES))


def fitting_turns(turns: Sequence[RecordedTurn], target: Target, max_tokens: int) -> list[RecordedTurn]:
    """Return the turns that fit the model's context, with answers cut to ``max_tokens`` tokens."""
    fitting = []
    for turn in turns:
        limit = target.context_limit(len(turn.prompt))
        if limit is None or len(turn.prompt) + min(max_tokens, len(turn.answer)) <= limit:
            fitting.append(replace(turn, answer=turn.answer[:max_tokens]))
    return fitting
