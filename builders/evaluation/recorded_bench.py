"""Times contenders as they reproduce recorded answers with real forward passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hdtool.builders.evaluation.experiment import Answering, Experiment, Figures, timed_turn
from hdtool.builders.evaluation.recording import RecordedTurn
from hdtool.builders.evaluation.timing import Stopwatch, timed
from hdtool.data.answered_questions import AnsweredTurn
from hdtool.data.errors import HdtoolError, error_reason
from hdtool.data.notes import note
from hdtool.runtime.core.drafter import Drafter
from hdtool.runtime.core.request import Request
from hdtool.runtime.core.sampler import Sampler, Shortcuts
from hdtool.runtime.core.step import Finish
from hdtool.runtime.kernels.topk import argmax
from hdtool.runtime.settings.measuring import WARM
from hdtool.runtime.settings.model import SamplingConfig
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
        self.shortcuts = Shortcuts()

    def chooser(self, logits: torch.Tensor, **known: Any) -> Callable[[int], int]:
        if logits.is_cpu:  # takes as long as a real choice; on other devices, argmax is part of the pass
            argmax(logits)
        return lambda row: self._answer[len(self.context) - self._begin]


Reproducing = Answering[RecordedTurn]
"""Function that reproduces a recorded answer with real forward passes."""


def drafting_contender(target: Target, drafter: Drafter) -> Reproducing:
    """Return a contender that feeds recorded answers through hdtool's decoding loop."""

    def answer(turn: RecordedTurn) -> list[AnsweredTurn]:
        sampler, max_tokens = RecordedSampler(turn), len(turn.answer)
        return [timed_turn(target, Request(None, turn.prompt, sampler, drafter, max_new_tokens=max_tokens))]

    return answer


def generate_contender(target: Target, **options: Any) -> Reproducing:
    """Return a contender that calls ``model.generate`` for as many tokens as were recorded; their ids may differ."""
    model: Any = target.model

    def answer(turn: RecordedTurn) -> list[AnsweredTurn]:
        prompt = torch.tensor([turn.prompt], device=target.device)
        length = len(turn.answer)
        settings = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "eos_token_id": None, **options}
        with Stopwatch(target.device) as watch:
            output = model.generate(prompt, max_new_tokens=length, min_new_tokens=length, **settings)
        ids = output[0, len(turn.prompt) :].tolist()
        return [AnsweredTurn("", ids, [1] * len(ids), **watch.times(), finish=str(Finish.LENGTH))]

    return answer


def recorded_benchmark(
    contenders: Mapping[str, Callable[[], Reproducing]], turns: Sequence[RecordedTurn]
) -> Iterator[dict[str, Figures]]:
    """Time all contenders on recorded turns, yielding each contender's running total after every turn.

    To warm up, the longest turn runs first with separate contenders, so that no cache grows in a measured turn and no
    history is carried over. A contender that fails is left out with a note, without affecting the other results; only
    an ``HdtoolError`` ends the benchmark.
    """
    failed = set[str]()
    careful = {name: partial(_careful, name, new, failed) for name, new in contenders.items()}
    experiment = Experiment(careful, memory=WARM)
    experiment.warm_up([max(turns, key=lambda turn: len(turn.prompt) + len(turn.answer))])
    totals = dict.fromkeys(contenders, Figures())
    for rows in experiment.rows(turns):
        for row in rows:
            totals[row.contender] += Figures.of(row.turns)
        yield {name: total for name, total in totals.items() if name not in failed}


def _careful(name: str, new: Callable[[], Reproducing], failed: set[str]) -> Reproducing:
    """Return a new contender that notes its first error other than an ``HdtoolError`` and then answers nothing."""
    contender = new()

    def answer(turn: RecordedTurn) -> Sequence[AnsweredTurn]:
        try:
            return () if name in failed else contender(turn)
        except HdtoolError:
            raise
        except Exception as error:  # compilers and kernels raise many kinds of errors
            note(f"{name} is left out, because it failed ({error_reason(error)})")
            failed.add(name)
            return ()

    return answer


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
