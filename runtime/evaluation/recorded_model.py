"""Real forward passes with recorded answers: the speed of a model of some shape, without its weights."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hdtool.data.errors import HdtoolError, reason_of
from hdtool.runtime.config import SamplingConfig
from hdtool.runtime.decode import decode
from hdtool.runtime.drafter import Drafter
from hdtool.runtime.evaluation.bench import in_turn
from hdtool.runtime.evaluation.contenders import timed
from hdtool.runtime.evaluation.recorded_turns import RecordedTurn
from hdtool.runtime.kernels.topk import argmax
from hdtool.runtime.model.target import Target
from hdtool.runtime.sampling.sampler import Sampler
from hdtool.runtime.sequence import Step
from hdtool.runtime.stats import Stats

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
