"""Answers that take turns on one model have the tokens that each has alone, on every engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.core.drafter import Drafter
from hdtool.runtime.drafters.heads.head_rankings import HeadsState
from hdtool.runtime.drafters.standalone_drafter import StandaloneDrafter
from hdtool.runtime.settings.building import HeadsConfig
from hdtool.runtime.target.target import Target
from tests.support.engines import captured, compiled, stock, tiny
from tests.support.families import model_of
from tests.support.heads import random_for
from tests.support.interleaving import NODES, Interleaving
from tests.support.rehearsed import Replayed

ENGINES: dict[str, Callable[[], Target]] = {
    "stock": lambda: stock("llama").target,
    "captured": lambda: Target(model_of("llama"), lambda device: Replayed()),
    "captured with states": lambda: captured("qwen3_5").target,
    "in levels": lambda: stock("jamba").target,
    "compiled": lambda: compiled("llama").target,
    "replaying": lambda: tiny("bloom").target,
}
FEW, MORE, MANY = range(1), range(1, 7), range(7, 20)


def heads(target: Target) -> Drafter:
    """A drafter that reads hidden states, for which steps are captured again, even while one runs."""
    return StandaloneDrafter(HeadsState(random_for(target, HeadsConfig(rank=8)), target), FixedBudget(NODES))


@pytest.mark.parametrize(
    "seeds",
    [FEW, pytest.param(MORE, marks=pytest.mark.long), pytest.param(MANY, marks=pytest.mark.exhaustive)],
    ids=["few", "more", "many"],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_answers_that_take_turns_are_those_alone(engine: str, seeds: range) -> None:
    target = ENGINES[engine]()
    assert target.captures == engine.startswith("captured")
    interleaving = Interleaving(target, {"heads": heads} if target.takes_trees else {})
    for seed in seeds:
        interleaving.play(seed)
    assert {"stream", "batch", "abandoned"} <= interleaving.played.keys()
