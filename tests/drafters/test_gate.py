"""Trained drafters run while they pay and as far as they pay, and go on after a pause without reading all of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

from hdtool.data import demo
from hdtool.runtime.budget.averages import LinearCost
from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.budget.trained_drafter_gate import (
    MAX_EXPECTED_LOSS,
    MAX_TRIAL_LOSS,
    MIN_TRIAL_STEPS,
    TRIAL_STEPS,
    TrainedDrafterGate,
)
from hdtool.runtime.core.engine_interface import PassLog
from hdtool.runtime.drafters.hierarchy.hierarchy import Hierarchy
from hdtool.runtime.drafters.standalone_drafter import StandaloneDrafter
from hdtool.runtime.drafters.trained import accepted_tokens
from hdtool.runtime.drafters.trained.accepted_tokens import AcceptedTokens, QueuedTokens
from hdtool.runtime.drafters.trained.draft_model import DraftModel
from hdtool.runtime.drafters.trained.mtp import mtp_drafter
from hdtool.runtime.drafters.trained.proposer import TrainedProposer
from hdtool.runtime.drafters.trained.sequential_drafter import SequentialDrafter
from hdtool.runtime.drafters.trained_drafter_factory import published_drafter, trained_drafter
from hdtool.runtime.kernels.compiled import Array
from hdtool.runtime.settings.decoding import DecodeConfig
from hdtool.runtime.settings.draft_sources import SourceId
from hdtool.runtime.settings.model import SamplingConfig
from hdtool.runtime.target.load import load
from hdtool.runtime.target.target import Target
from tests.support.decoding import answer_of, output_tokens, run
from tests.support.families import model_of, random_model
from tests.support.mtp import with_mtp
from tests.support.oracle import prompt_of
from tests.support.published_drafters import assistant, block_drafter, dflash, eagle3, let_all_layers_share
from tests.sweep.models import tiny_model


def speed(gate: TrainedDrafterGate, steps: int, drafting: tuple[float, float], without: tuple[float, float]) -> float:
    """Tokens per second of so many steps, each kind with its tokens and seconds."""
    tokens = seconds = 0.0
    for _ in range(steps):
        step = drafting if gate.runs_drafter else without
        gate.observe(*step)
        tokens, seconds = tokens + step[0], seconds + step[1]
    return tokens / seconds


@pytest.mark.parametrize("drafting", [(3.0, 1.5), (2.2, 1.5), (1.9, 1.02), (1.8, 3.0)])
def test_trials_lose_little(drafting: tuple[float, float]) -> None:
    gate, without = TrainedDrafterGate(PassLog()), (1.8, 1.0)
    best = max(drafting[0] / drafting[1], 1.8)
    speed(gate, 1000, drafting, without)
    assert speed(gate, 2000, drafting, without) > (1 - 2 * MAX_TRIAL_LOSS) * best


def test_a_drafter_that_costs_much_is_switched_off_in_the_first_answer() -> None:
    assert speed(TrainedDrafterGate(PassLog()), 200, (1.9, 1.6), (1.8, 1.0)) > 0.97 * 1.8


def test_a_drafter_that_costs_the_time_of_many_steps_is_tried_rarely() -> None:
    """As an MTP layer of a small model, whose own passes are compiled."""
    gate, drafting, without = TrainedDrafterGate(PassLog()), (1.8, 30.0), (1.0, 1.0)
    assert speed(gate, 100, drafting, without) > 0.6
    assert gate._seconds[1].observed == MIN_TRIAL_STEPS
    speed(gate, 10_000, drafting, without)
    assert speed(gate, 20_000, drafting, without) > 1 - MAX_TRIAL_LOSS


def test_a_single_interruption_does_not_switch_it_off() -> None:
    gate = TrainedDrafterGate(PassLog())
    speed(gate, 500, (3.0, 1.1), (1.8, 1.0))
    gate.observe(3.0, 1e6, used=True)
    assert speed(gate, 500, (3.0, 1.1), (1.8, 1.0)) > 0.95 * 3.0 / 1.1


def test_a_step_counts_for_its_own_kind_though_another_answer_has_switched_the_gate() -> None:
    gate = TrainedDrafterGate(PassLog())
    while not gate.runs_drafter:
        gate.observe(3.0, 1.0, used=False)
    gate.observe(100.0, 1.0, used=False)  # this step began before the switch
    assert [kind.observed for kind in gate._seconds] == [TRIAL_STEPS + 1, 0]


def test_the_gate_follows_a_change() -> None:
    gate = TrainedDrafterGate(PassLog())
    for tokens in (3.0, 1.0, 3.0):
        speed(gate, 3000, (tokens, 1.2), (1.5, 1.0))
        used = list[bool]()
        for _ in range(500):
            used.append(gate.runs_drafter)
            gate.observe(*((tokens, 1.2) if gate.runs_drafter else (1.5, 1.0)))
        assert np.mean(used) > 0.9 if tokens > 1.8 else np.mean(used) < 0.1


@pytest.mark.parametrize("drafting", [1.4, 2.5])
def test_a_trial_that_must_lose_time_waits_until_little_is_lost(drafting: float) -> None:
    """As a draft model of a third of the model's size: its first step reads the prompt, and takes eight steps."""
    gate, seconds, loss = TrainedDrafterGate(PassLog()), 0.0, 0.0
    used, last = list[int](), -1000
    for step in range(20_000):
        if gate.may_run(8.0):
            took = 1.0 + (8.0 if step - last > 100 else drafting - 1)
            used.append(step)
            last = step
        else:
            took = 1.0
        gate.observe(1.1 if last == step else 1.0, took, used=last == step)
        seconds, loss = seconds + took, loss + took - (1.1 if last == step else 1.0)
        assert loss <= 2 * MAX_EXPECTED_LOSS * seconds
        assert step > 64 or not loss, "nothing is lost in the first answer"
    assert 4 < len(used) < 200, "it is tried again, and seldom"


def test_a_cheap_trial_does_not_wait() -> None:
    gate = TrainedDrafterGate(PassLog())
    for _ in range(TRIAL_STEPS):
        assert not gate.may_run(0.5)
        gate.observe(1.0, 1.0, used=False)
    assert gate.may_run(0.5) and not gate.may_run(8.0)


PROBS = np.array([0.6, 0.3, 0.05, 0.01])


def gate_of(base: float, row: float) -> TrainedDrafterGate:
    """A gate that knows what the drafter's passes take, and that the last pass of the target took 10 seconds."""
    log = PassLog()
    log.add(10.0)
    gate = TrainedDrafterGate(log)
    for rows in (1, 4, 2, 3) * 4:
        gate.note_pass(rows, base + row * rows)
    return gate


def test_costs_are_a_base_and_a_price_of_each_row() -> None:
    costs = gate_of(2.0, 0.5).pass_cost
    assert [costs.of(rows) for rows in (1, 2, 4)] == pytest.approx([2.5, 3.0, 4.0], rel=0.02)
    costs.observe(1, 1e6)  # a single interruption
    assert costs.of(1) < 3.5
    same = LinearCost()
    for _ in range(5):
        same.observe(3, 6.0)
    assert 0 < same.of(1) <= same.of(3) == pytest.approx(6.0)


def test_rows_are_added_while_they_bring_more_than_they_cost() -> None:
    """A pass of the target takes 10 seconds for a token, so a pass of one second must bring a tenth of one."""
    for base, row, certainty, expected in (
        (1.0, 0.0, 0.9, 4),  # rows are free
        (1.0, 0.5, 0.9, 2),  # the third one brings 0.045 for 0.05
        (1.0, 0.5, 0.1, 0),  # little is accepted after them
        (7.0, 0.1, 0.9, 3),  # 0.855 for 0.73
        (9.0, 0.1, 0.9, 0),
    ):
        assert gate_of(base, row).paths_to_extend(PROBS, certainty) == expected, (base, row, certainty)


def test_drafts_must_bring_as_much_as_steps_do() -> None:
    """Steps of three tokens in ten seconds: the same pass must bring three times as much."""
    gate = gate_of(1.0, 1.0)
    assert gate.paths_to_extend(PROBS, 0.9) == 2
    gate.observe(3.0, 10.0)
    assert gate.paths_to_extend(PROBS, 0.9) == 0


def test_the_first_pass_is_made_to_learn_its_cost_and_prompts_tell_nothing_of_it() -> None:
    log = PassLog()
    log.add(1e-9)
    gate = TrainedDrafterGate(log)
    gate.note_pass(500, 3.0)
    assert gate.pass_cost.observed == 0 and gate.paths_to_extend(PROBS, 0.9) == 4
    gate.note_pass(4, 3.0)
    assert gate.pass_cost.observed == 1 and gate.paths_to_extend(PROBS, 0.9) == 0


def test_the_drafters_of_a_method_share_a_gate_unless_drafts_have_a_fixed_size() -> None:
    target, config = load(str(demo.MODEL)).target, DecodeConfig("amphista")
    first, second, fixed = (trained_drafter(each, target) for each in (config, config, replace(config, draft_tokens=8)))
    assert first._gate is second._gate is not None and fixed._gate is None


Maker = Callable[..., Path]


class Pauses:
    """In place of a gate: runs the drafter in three steps of ten."""

    def __init__(self) -> None:
        self.steps = 0

    def may_run(self, cost: float) -> bool:
        return self.steps % 10 < 3

    def paths_to_extend(self, path_probs: Array, certainty: float) -> int:
        return len(path_probs)

    def note_pass(self, rows: int, seconds: float) -> None: ...

    def observe(self, tokens: float, seconds: float, used: bool) -> None:
        self.steps += 1


def six_layers() -> PreTrainedModel:
    model = random_model("Llama", num_hidden_layers=6)
    model.eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def of_layers(number: int, folder: Path) -> tuple[Target, TrainedProposer]:
    target = Target(with_mtp("deepseek_v3", folder, number))
    return target, mtp_drafter(target)


def of_model(folder: Path) -> tuple[Target, TrainedProposer]:
    target = Target(model_of("llama"))
    module = DraftModel(Target(model_of("qwen3")), target.vocabulary)
    return target, SequentialDrafter(module, source=SourceId.DRAFTER)


def published(model: Callable[[], PreTrainedModel], make: Maker, folder: Path) -> tuple[Target, TrainedProposer]:
    target = Target(model())
    return target, published_drafter(str(make(folder, target.model)), target)


MAKERS: dict[str, Callable[[Path], tuple[Target, TrainedProposer]]] = {
    "a layer": partial(of_layers, 1),
    "layers in turn": partial(of_layers, 3),
    "draft model": of_model,
    "eagle3": partial(published, six_layers, eagle3),
    "dflash": partial(published, six_layers, dflash),
    "dspark": partial(published, six_layers, partial(block_drafter, markov="vanilla")),
    "assistant": partial(published, partial(tiny_model, "gemma4_text"), assistant),
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.one_in(4)
def test_pauses_change_no_token(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepted_tokens, "LONG_PAUSE", 4)
    monkeypatch.setattr(accepted_tokens, "READ_AFTER_PAUSE", 3)
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
        plain = answer_of(target, prompt_of(20), sampling, max_new_tokens=25)
        for drafter in (alone, combined):
            monkeypatch.setattr(trained, "_gate", Pauses())
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
