"""Where steps are captured, a step is given out while the next one runs; the answers and trees are the same."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import pytest

from hdtool.data.errors import ModelError
from hdtool.runtime.budget.measure_passes import time_tree_passes
from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.caches.slots import Cache
from hdtool.runtime.core.engine_interface import PassOptions, WaitForResults
from hdtool.runtime.core.request import Request
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.session import decode, decode_batch
from hdtool.runtime.core.step import Step
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.drafters.hierarchy.hierarchy import Hierarchy
from hdtool.runtime.engines.captured_functions import CaptureMaker, never
from hdtool.runtime.settings.model import SamplingConfig
from hdtool.runtime.stores.history_store import History
from hdtool.runtime.target.target import Target
from tests.support.families import model_of
from tests.support.oracle import prompt_of
from tests.support.rehearsed import direct
from tests.support.samplers import sampler_of

GREEDY = SamplingConfig()
SAMPLINGS = {"greedy": GREEDY, "T 0.5": SamplingConfig(temperature=0.5, seed=3)}
ORDERS: dict[str, CaptureMaker] = {"after": never, "meanwhile": direct}


class Noted(Target):
    """A target that notes its calls."""

    notes: list[str]

    def launch(self, cache: Cache, trees: Sequence[DraftTree], options: Sequence[PassOptions] = ()) -> WaitForResults:
        results = super().launch(cache, trees, options)
        self.notes.append("started")
        return results

    def commit(self, cache: Cache, slot: int, path: Sequence[int]) -> None:
        super().commit(cache, slot, path)
        self.notes.append("committed")


def noted(order: str) -> Noted:
    Noted.notes = []
    return Noted(model_of("llama"), ORDERS[order])


def steps_of(target: Target, sampling: SamplingConfig, length: int, drafter: Hierarchy) -> Iterator[Step]:
    prompt = prompt_of(length)
    return decode(target, prompt, sampler_of(sampling, prompt), max_new_tokens=40, drafter=drafter)


def drafting() -> Hierarchy:
    return Hierarchy(budget=FixedBudget(12), last=True, recycled=True, history=History())


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_trees_and_answers_do_not_depend_on_the_order(sampling: SamplingConfig) -> None:
    found = {}
    for order in ORDERS:
        target, drafter = noted(order), drafting()
        steps = [step for length in (20, 9, 30) for step in steps_of(target, sampling, length, drafter)]
        found[order] = [
            (step.tokens, step.path, step.tree.tokens.tolist(), step.tree.parents.tolist()) for step in steps
        ]
    assert found["after"] == found["meanwhile"]
    assert sum(len(path) for _, path, _, _ in found["after"]) > 0, "drafts that are never accepted test little"


@pytest.mark.parametrize("order", ORDERS)
def test_a_step_is_given_out_as_soon_as_the_device_works(order: str) -> None:
    target = noted(order)
    target.notes.clear()
    for _ in steps_of(target, SamplingConfig(), 20, drafting()):
        target.notes.append("text")
    pattern = {"after": ["committed", "text", "started"], "meanwhile": ["committed", "started", "text"]}[order]
    assert target.notes[: 3 * 4] == pattern * 4
    assert target.notes[-2:] == ["committed", "text"], "the last step waits for nothing"


@pytest.mark.parametrize("order", ORDERS)
def test_an_answer_that_is_left_leaves_nothing_behind(order: str) -> None:
    target = noted(order)
    expected = [step.tokens for step in steps_of(target, SamplingConfig(), 30, drafting())]
    left = steps_of(target, SamplingConfig(), 20, drafting())
    for _ in range(3):
        next(left)
    assert [step.tokens for step in steps_of(target, SamplingConfig(), 30, drafting())] == expected
    with pytest.raises(ModelError, match="another conversation began"):
        list(left)
    assert [step.tokens for step in steps_of(target, SamplingConfig(), 30, drafting())] == expected


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("meanwhile", ["a batch", "a measurement", "a change of the model"])
def test_passes_for_another_cache_between_two_steps_change_nothing(meanwhile: str, sampling: SamplingConfig) -> None:
    model = copy.deepcopy(model_of("llama"))
    target = Target(model, direct)

    def pause() -> None:
        if meanwhile == "a measurement":
            time_tree_passes(target, [0, 3], lambda *_: True)
            return
        if meanwhile == "a change of the model":  # it is proved and captured again
            model.register_forward_hook(lambda *_: None)
        asked = iter([Request(None, prompt_of(9), Sampler(GREEDY, prompt_of(9)))])
        for _ in decode_batch(target, lambda: next(asked, None), 1, max_new_tokens=5):
            pass

    expected = [step.tokens for step in steps_of(target, sampling, 20, drafting())]
    found = []
    for step in steps_of(target, sampling, 20, drafting()):
        found.append(step.tokens)
        if len(found) in (1, 4):
            pause()
    assert found == expected
