"""Real steps that say what is on record: what drafting brings a model of some shape, without its weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hdtool.runtime.config import SamplingConfig
from hdtool.runtime.decode import Step, decode
from hdtool.runtime.drafter import Drafter
from hdtool.runtime.evaluation.bench import in_turn
from hdtool.runtime.evaluation.contenders import timed
from hdtool.runtime.evaluation.recorded_turns import RecordedTurn
from hdtool.runtime.kernels.topk import likeliest
from hdtool.runtime.model.target import Target
from hdtool.runtime.sampler import Sampler
from hdtool.runtime.stats import Stats

COPIED = {"cuda": 1 << 31}
"""Bytes that bandwidth is measured by, far more than a cache holds."""
COPIED_ELSEWHERE = 1 << 27
COPIES = 5


class RecordedSampler(Sampler):
    """Chooses what was said, whatever the logits say."""

    def __init__(self, turn: RecordedTurn) -> None:
        super().__init__(SamplingConfig(), turn.prompt)
        self._begin, self._answer = len(turn.prompt), turn.answer

    def over(self, logits: torch.Tensor, *, finite_only: bool = False) -> Callable[[int], int]:
        likeliest(logits)  # a real choice would wait for it
        return lambda row: self._answer[len(self.context) - self._begin]


@dataclass
class Timed:
    """What answers on record took somebody."""

    tokens: int = 0
    seconds: float = 0.0
    stats: Stats | None = None
    """Of ours, step by step."""
    later: Stats | None = None
    """The same without the prompts' own passes."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


Teller = Callable[[RecordedTurn], Timed]
"""Makes an answer that is on record."""


def ours(target: Target, drafter: Drafter) -> Teller:
    def tell(turn: RecordedTurn) -> Timed:
        steps = decode(target, turn.prompt, RecordedSampler(turn), max_new_tokens=len(turn.answer), drafter=drafter)
        made, seconds = timed(target.device, lambda: list(steps))
        stats = _added(made)
        return Timed(stats.tokens, seconds, stats, _added(made[1:]))

    return tell


def theirs(target: Target, **options: Any) -> Teller:
    """``model.generate``, for as many tokens; what it says are others."""
    model: Any = target.model

    def tell(turn: RecordedTurn) -> Timed:
        asked = torch.tensor([turn.prompt], device=target.device)
        many = len(turn.answer)
        given = {"attention_mask": torch.ones_like(asked), "do_sample": False, "eos_token_id": None, **options}
        said, seconds = timed(
            target.device, lambda: model.generate(asked, max_new_tokens=many, min_new_tokens=many, **given)
        )
        return Timed(said.shape[1] - len(turn.prompt), seconds)

    return tell


@dataclass
class Race:
    """Everybody answers a turn before the next one comes, and another one begins each time."""

    tellers: Mapping[str, Teller]
    found: dict[str, Timed] = field(default_factory=dict)

    def run(self, turns: Sequence[RecordedTurn]) -> Iterator[int]:
        """Yields how many turns are done; the first is told once before, and not counted."""
        for tell in self.tellers.values():
            tell(turns[0])
        totals: dict[str, list[Timed]] = {name: [] for name in self.tellers}
        for place, turn in enumerate(turns):
            for name in in_turn(list(self.tellers), place):
                totals[name].append(self.tellers[name](turn))
            self.found = {name: _sum(parts) for name, parts in totals.items()}
            yield place + 1


def _added(steps: Sequence[Step]) -> Stats:
    stats = Stats()
    for step in steps:
        stats.add(step)
    return stats


def _sum(parts: Sequence[Timed]) -> Timed:
    stats = [part.stats for part in parts if part.stats]
    later = [part.later for part in parts if part.later]
    return Timed(
        sum(part.tokens for part in parts),
        sum(part.seconds for part in parts),
        Stats.total(stats) if stats else None,
        Stats.total(later) if later else None,
    )


def bandwidth(device: torch.device) -> float:
    """Bytes per second that this device reads and writes when it copies; the best of some copies."""
    size = COPIED.get(device.type, COPIED_ELSEWHERE)
    source, copy = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(COPIES):
        started = time.perf_counter()
        copy.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return 2 * size / best


def fitting(turns: Sequence[RecordedTurn], target: Target, most: int) -> list[RecordedTurn]:
    """Turns that end within the model's context, answers cut off after ``most`` tokens."""
    kept = []
    for turn in turns:
        limit = target.context_limit(len(turn.prompt))
        if limit is None or len(turn.prompt) + min(most, len(turn.answer)) <= limit:
            kept.append(
                RecordedTurn(turn.conversation, turn.category, turn.number, turn.prompt, turn.answer[:most], turn.most)
            )
    return kept
