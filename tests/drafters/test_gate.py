"""Trained drafters run while they pay, and go on after a pause without reading all of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.config.model import SamplingConfig
from hdtool.runtime.config.source_names import SourceId
from hdtool.runtime.drafters.hierarchy.drafter import Hierarchy
from hdtool.runtime.drafters.trained import sequential
from hdtool.runtime.drafters.trained.assistant import DraftModel
from hdtool.runtime.drafters.trained.draft_length import (
    MAX_TRIAL_LOSS,
    MIN_TRIAL_STEPS,
    TRIAL_STEPS,
    FixedPace,
    TrainedGate,
)
from hdtool.runtime.drafters.trained.mtp import mtp_drafter
from hdtool.runtime.drafters.trained.proposal import TrainedDrafter
from hdtool.runtime.drafters.trained.sequential import AcceptedTokens, QueuedTokens, SequentialDrafter
from hdtool.runtime.drafters.trained_methods import StandaloneDrafter, published_drafter
from hdtool.runtime.target.target import Target
from tests.support.decoding import output_tokens, run
from tests.support.families import model_of, random_model
from tests.support.mtp import with_mtp
from tests.support.oracle import prompt_of
from tests.support.published_drafters import assistant, dflash, eagle3, let_all_layers_share
from tests.sweep.models import tiny_model


def speed(gate: TrainedGate, steps: int, drafting: tuple[float, float], without: tuple[float, float]) -> float:
    """Tokens per second of so many steps, each kind with its tokens and seconds."""
    tokens = seconds = 0.0
    for _ in range(steps):
        step = drafting if gate.runs_drafter else without
        gate.observe(*step)
        tokens, seconds = tokens + step[0], seconds + step[1]
    return tokens / seconds


@pytest.mark.parametrize("drafting", [(3.0, 1.5), (2.2, 1.5), (1.9, 1.02), (1.8, 3.0)])
def test_trials_lose_little(drafting: tuple[float, float]) -> None:
    gate, without = TrainedGate(), (1.8, 1.0)
    best = max(drafting[0] / drafting[1], 1.8)
    speed(gate, 1000, drafting, without)
    assert speed(gate, 2000, drafting, without) > (1 - 2 * MAX_TRIAL_LOSS) * best


def test_a_drafter_that_costs_much_is_switched_off_in_the_first_answer() -> None:
    assert speed(TrainedGate(), 200, (1.9, 1.6), (1.8, 1.0)) > 0.97 * 1.8


def test_a_drafter_that_costs_the_time_of_many_steps_is_tried_rarely() -> None:
    """As an MTP layer of a small model, whose own passes are compiled."""
    gate, drafting, without = TrainedGate(), (1.8, 30.0), (1.0, 1.0)
    assert speed(gate, 100, drafting, without) > 0.6
    assert gate._observed[1] == MIN_TRIAL_STEPS
    speed(gate, 10_000, drafting, without)
    assert speed(gate, 20_000, drafting, without) > 1 - MAX_TRIAL_LOSS


def test_a_single_interruption_does_not_switch_it_off() -> None:
    gate = TrainedGate()
    speed(gate, 500, (3.0, 1.1), (1.8, 1.0))
    gate.observe(3.0, 1e6, used=True)
    assert speed(gate, 500, (3.0, 1.1), (1.8, 1.0)) > 0.95 * 3.0 / 1.1


def test_a_step_counts_for_its_own_kind_though_another_answer_has_switched_the_gate() -> None:
    gate = TrainedGate()
    while not gate.runs_drafter:
        gate.observe(3.0, 1.0, used=False)
    gate.observe(100.0, 1.0, used=False)  # this step began before the switch
    assert gate._observed == [TRIAL_STEPS + 1, 0]


def test_the_gate_follows_a_change() -> None:
    gate = TrainedGate()
    for tokens in (3.0, 1.0, 3.0):
        speed(gate, 3000, (tokens, 1.2), (1.5, 1.0))
        used = list[bool]()
        for _ in range(500):
            used.append(gate.runs_drafter)
            gate.observe(*((tokens, 1.2) if gate.runs_drafter else (1.5, 1.0)))
        assert np.mean(used) > 0.9 if tokens > 1.8 else np.mean(used) < 0.1


Maker = Callable[..., Path]


class Pauses:
    """In place of a gate: runs the drafter in three steps of ten."""

    def __init__(self) -> None:
        self.steps = 0

    @property
    def runs_drafter(self) -> bool:
        return self.steps % 10 < 3

    def observe(self, tokens: float, seconds: float, used: bool) -> None:
        self.steps += 1


def six_layers() -> PreTrainedModel:
    model = random_model("Llama", num_hidden_layers=6)
    model.eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def of_layers(number: int, folder: Path) -> tuple[Target, TrainedDrafter]:
    target = Target(with_mtp("deepseek_v3", folder, number))
    return target, mtp_drafter(target, is_measured=False)


def of_model(folder: Path) -> tuple[Target, TrainedDrafter]:
    target = Target(model_of("llama"))
    module = DraftModel(Target(model_of("qwen3")), target.vocabulary)
    return target, SequentialDrafter(module, FixedPace(), source=SourceId.DRAFTER, width=1)


def published(model: Callable[[], PreTrainedModel], make: Maker, folder: Path) -> tuple[Target, TrainedDrafter]:
    target = Target(model())
    return target, published_drafter(str(make(folder, target.model)), target, is_measured=False)


MAKERS: dict[str, Callable[[Path], tuple[Target, TrainedDrafter]]] = {
    "a layer": partial(of_layers, 1),
    "layers in turn": partial(of_layers, 3),
    "draft model": of_model,
    "eagle3": partial(published, six_layers, eagle3),
    "dflash": partial(published, six_layers, dflash),
    "assistant": partial(published, partial(tiny_model, "gemma4_text"), assistant),
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.one_in(2)
def test_pauses_change_no_token(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequential, "LONG_PAUSE", 4)
    monkeypatch.setattr(sequential, "READ_AFTER_PAUSE", 3)
    read = list[QueuedTokens]()
    take = AcceptedTokens.take

    def taking(queue: AcceptedTokens) -> QueuedTokens:
        read.append(take(queue))
        return read[-1]

    monkeypatch.setattr(AcceptedTokens, "take", taking)
    let_all_layers_share(monkeypatch)
    target, trained = MAKERS[kind](tmp_path)
    alone, combined = (
        StandaloneDrafter(trained, FixedBudget(6)),
        Hierarchy(budget=FixedBudget(6), trained=trained),
    )
    for sampling in (SamplingConfig(), SamplingConfig(temperature=0.8, seed=3)):
        plain = output_tokens(run(target, prompt_of(20), sampling, max_new_tokens=25))
        for drafter in (alone, combined):
            monkeypatch.setattr(drafter, "_gate", Pauses())
            read.clear()
            steps = [
                step
                for _ in range(2)
                for step in run(target, prompt_of(20), sampling, max_new_tokens=25, drafter=drafter)
            ]
            assert output_tokens(steps) == 2 * plain
            skips = [unread for unread in read if unread.skipped]
            assert len(skips) > 2 and all(len(unread.tokens) == 3 for unread in skips)
            assert trained.source in {source for step in steps for source in step.tree.sources.tolist()}
