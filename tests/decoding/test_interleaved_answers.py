"""Answers that take turns on one model have the tokens that each has alone, on every engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.config.building import HeadsConfig
from hdtool.runtime.core.drafter import Drafter
from hdtool.runtime.drafters.heads.state import HeadsState
from hdtool.runtime.drafters.trained_methods import StandaloneDrafter
from hdtool.runtime.engines.capture import never
from hdtool.runtime.target.target import Target
from tests.support import fused
from tests.support.families import model_of, random_model
from tests.support.heads import random_for
from tests.support.interleaving import NODES, Interleaving
from tests.support.rehearsed import Rehearsed, Replayed


def compiled() -> Target:
    with pytest.MonkeyPatch.context() as patch:
        return fused.compiled_target(patch)


def replaying() -> Target:
    model = random_model("Bloom", n_layer=2, n_head=4, pad_token_id=None).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    target = Target(model)
    assert not target.takes_trees
    return target


ENGINES: dict[str, Callable[[], Target]] = {
    "stock": lambda: Target(model_of("llama"), never),
    "captured": lambda: Target(model_of("llama"), lambda device: Replayed()),
    "captured with states": lambda: Target(model_of("qwen3_5"), lambda device: Rehearsed()),
    "in levels": lambda: Target(model_of("jamba"), never),
    "compiled": compiled,
    "replaying": replaying,
}
FEW, MANY = range(1), range(1, 20)


def heads(target: Target) -> Drafter:
    """A drafter that reads hidden states, for which steps are captured again, even while one runs."""
    return StandaloneDrafter(HeadsState(random_for(target, HeadsConfig(rank=8)), target), FixedBudget(NODES))


@pytest.mark.parametrize("seeds", [FEW, pytest.param(MANY, marks=pytest.mark.long)], ids=["few", "many"])
@pytest.mark.parametrize("engine", ENGINES)
def test_answers_that_take_turns_are_those_alone(engine: str, seeds: range) -> None:
    target = ENGINES[engine]()
    assert target.captures == engine.startswith("captured")
    interleaving = Interleaving(target, {"heads": heads} if target.takes_trees else {})
    for seed in seeds:
        interleaving.play(seed)
    assert {"stream", "batch", "abandoned"} <= interleaving.played.keys()
