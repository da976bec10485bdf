"""Times contenders as they reproduce recorded answers with real forward passes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hdtool.builders.evaluation.bench import rotated
from hdtool.builders.evaluation.recording import RecordedTurn
from hdtool.builders.evaluation.timing import Stopwatch, timed
from hdtool.data.errors import HdtoolError, error_reason
from hdtool.runtime.answerer import decode
from hdtool.runtime.config.model import SamplingConfig
from hdtool.runtime.core.drafter import Drafter
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.sequence import Stats, Step
from hdtool.runtime.kernels.topk import argmax
from hdtool.runtime.target.target import Target

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
