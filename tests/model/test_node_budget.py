"""The budget: as many nodes as pay by what passes were seen to cost, and none where none pays."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hdtool.runtime.budget.averages import SmoothedSeconds
from hdtool.runtime.budget.cost_curve import CostCurve
from hdtool.runtime.budget.measure_passes import (
    MEASURED_NODES,
    cost_curve_for,
    save_at_home,
    saved_at_home,
    time_tree_passes,
)
from hdtool.runtime.budget.node_budget import (
    Budget,
    FixedBudget,
    MeasuredBudget,
    SharedBudget,
    SharedCosts,
    choose_all_nodes,
)
from hdtool.runtime.budget.pass_costs import PASS_SIZES, MeasuredCosts, estimated_cost
from hdtool.runtime.caches.slots import Cache
from hdtool.runtime.core.acceptance_rates import Probs
from hdtool.runtime.core.drafter import draft_many
from hdtool.runtime.core.engine_interface import PassLog, Verified
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.drafters.drafter_factory import drafter_for, shared_costs_for
from hdtool.runtime.drafters.hierarchy.hierarchy import Hierarchy
from hdtool.runtime.settings.decoding import DecodeConfig
from hdtool.runtime.settings.draft_token_limits import LARGEST_BUDGET
from hdtool.runtime.settings.model import SamplingConfig
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.target import Target
from tests.support.decoding import answer_of
from tests.support.families import model_of
from tests.support.rehearsed import Rehearsed


def confirmed(costs: MeasuredCosts) -> MeasuredCosts:
    """As if passes of all sizes had taken so long."""
    costs._record["passes"] = 100.0
    return costs


def budget_by(log: PassLog, curve: CostCurve, *, is_confirmed: bool = True, overhead: float = 0.0) -> MeasuredBudget:
    costs = MeasuredCosts(log, curve)
    return MeasuredBudget(log, confirmed(costs) if is_confirmed else costs, overhead=overhead)


def budget_of(costs: list[float], *, is_confirmed: bool = True) -> tuple[MeasuredBudget, PassLog]:
    log = PassLog()
    return budget_by(log, curve_of(costs), is_confirmed=is_confirmed), log


def curve_of(*costs: list[float], contexts: tuple[int, ...] = (0,)) -> CostCurve:
    return CostCurve(MEASURED_NODES, tuple(tuple(1e3 * seconds for seconds in row) for row in costs), contexts)


FLAT = [1.0] * len(PASS_SIZES)
STEEP = [1 + (rows - 1) / 2 for rows in PASS_SIZES]


def test_free_nodes_are_all_verified_and_expensive_ones_are_not() -> None:
    probs = np.array([0.9, 0.5, 0.3, 0.2, 0.1])
    assert budget_of(FLAT)[0].choose_size(probs) == 5
    assert budget_of(STEEP)[0].choose_size(probs[3:]) == 0
    assert budget_of([1.0, 1.1, 1.2, *[5.0] * (len(PASS_SIZES) - 3)])[0].choose_size(probs) == 3, (
        "four rows cost little"
    )
    assert budget_of(FLAT)[0].choose_size(np.empty(0)) == 0


@pytest.mark.parametrize("size", [0, 1, 7, LARGEST_BUDGET])
def test_a_fixed_budget_is_kept(size: int) -> None:
    assert FixedBudget(size).choose_size(np.ones(LARGEST_BUDGET)) == size


def test_pauses_of_drafting_grow_while_it_does_not_pay() -> None:
    budget, log = budget_of(STEEP)
    asked = []
    for step in range(400):
        if budget.max_nodes:
            asked.append(step)
            assert budget.choose_size(np.array([0.1])) == 0
        log.add(1.0, 0)
    assert 3 < len(asked) < 30
    assert max(np.diff(asked)) > 40
    while not budget.max_nodes:
        log.add(1.0, 0)
    budget.choose_size(np.full(20, 0.99))
    log.add(1.0, 0)
    assert budget.max_nodes, "what paid once is tried again at once"


def test_estimated_costs_follow_measured_passes() -> None:
    """At loading a pass of eight rows seemed as cheap as one; in the conversation it takes three times as long."""
    budget, log = budget_of(FLAT)
    probs = np.full(7, 0.12)
    assert budget.choose_size(probs) == 7
    sent = 7
    for _ in range(200):
        log.add(3.0 if sent else 1.0, sent)
        budget.end_step()
        sent = budget.choose_size(probs) if budget.max_nodes else 0
    assert sent == 0


def test_a_size_that_was_not_timed_costs_what_lies_between_unless_steps_are_captured() -> None:
    """Captured steps of five and of eight rows cost the same, so three more nodes are verified that gain little."""
    cheap = [1.0 if rows <= 4 else 1.3 if rows <= 8 else 100.0 for rows in PASS_SIZES]
    for captures, best in ((False, 4), (True, 7)):
        log = PassLog()
        costs = MeasuredCosts(log, curve_of(cheap), only_timed_sizes=captures)
        budget = MeasuredBudget(log, confirmed(costs), overhead=0.0)
        assert budget.choose_size(np.array([0.9, 0.9, 0.9, 0.9, 0.1, 0.1, 0.1])) == best


@pytest.mark.parametrize("verified", [-1, 15])
def test_a_pass_counts_for_the_nodes_that_it_verified(verified: int) -> None:
    """A prompt is read in a pass of its own, and a grammar adds nodes: neither is the cost of the chosen size."""
    budget, log = budget_of([1.0] * 5 + [1.5] * (len(PASS_SIZES) - 5))
    assert budget.choose_size(np.full(7, 0.2)) == 7
    for _ in range(20):
        log.add(3.0, verified)
        budget.end_step()
        assert budget.choose_size(np.full(7, 0.2)) == 7


def test_passes_of_every_size_are_timed_on_a_real_target() -> None:
    target = Target(model_of("llama"))
    taken = time_tree_passes(target, [0, 3, 64], lambda rounds, _: rounds == 2)
    assert taken.shape == (2, 3) and (taken > 0).all() and np.isfinite(taken).all()
    drafter = drafter_for(DecodeConfig("hd"), target, StoreSet())
    assert len(drafter.draft([1, 2, 3])) <= LARGEST_BUDGET


def test_a_saved_curve_is_used_and_a_damaged_file_is_noted(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = Target(model_of("llama"))
    assert not saved_at_home(target)
    assert len(cost_curve_for(target).nodes) == len(PASS_SIZES)
    curve = curve_of(FLAT, STEEP, contexts=(64, 256))
    save_at_home(target, curve)
    before = target.log.passes
    assert cost_curve_for(target) == curve
    assert target.log.passes == before, "nothing is measured that is known"
    assert cost_curve_for(target, batch=2) != curve, "in a batch passes cost something else"
    (file,) = [path for path in home.rglob("*.json") if path.parent.name != "quick"]
    file.write_text("{}")
    assert cost_curve_for(target) != curve
    (line,) = capsys.readouterr().err.splitlines()
    assert str(file) in line and "measure it again" in line


def test_a_quick_measurement_is_kept_for_a_day(home: Path) -> None:
    target = Target(model_of("llama"))
    curve, measured = cost_curve_for(target), target.log.passes
    assert cost_curve_for(target) == curve and target.log.passes == measured
    (file,) = home.rglob("*.json")
    os.utime(file, (1e9, 1e9))
    cost_curve_for(target)
    assert target.log.passes > measured
    file.write_text("{}")
    measured = target.log.passes
    cost_curve_for(target)
    assert target.log.passes > measured


def test_the_quick_measurement_knows_what_a_longer_context_adds(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    monkeypatch.setattr(model.config, "max_position_embeddings", 2048)
    target = Target(model)
    curve = cost_curve_for(target)
    short, long = curve.contexts
    assert short < 1000 < long < 2048
    assert all(after >= before for before, after in zip(*curve.milliseconds, strict=True))
    assert target.cache.capacity < long, "the cache of answers does not grow with it"
    monkeypatch.setattr(model.config, "max_position_embeddings", 256)
    assert cost_curve_for(Target(model)).contexts == (short,)


def test_captured_steps_are_timed_after_a_long_context_in_the_cache_of_answers(home: Path) -> None:
    capture = Rehearsed()
    target = Target(model_of("llama"), lambda device: capture)
    capacity = target.cache.capacity
    short, long = cost_curve_for(target).contexts
    recorded = capture.recorded
    assert short < 256 < long < capacity == target.cache.capacity and not target.cache.slots[0].tokens
    plain = answer_of(Target(model_of("llama")), [1, 2, 3], SamplingConfig(), 9)
    assert answer_of(target, [1, 2, 3], SamplingConfig(), 9) == plain
    assert capture.recorded == recorded, "answers use the steps that were timed"
    assert cost_curve_for(target).contexts == (short,), "an answer's context is in the cache"


def test_costs_follow_the_length_of_the_context_alone_and_in_a_batch() -> None:
    curve, probs = curve_of(FLAT, STEEP, contexts=(0, 1000)), np.full(8, 0.3)
    alone, together = PassLog(), PassLog()
    budget, budgets = budget_by(alone, curve), together_by(together, {4: curve}, 4, pads=False)
    for context, nodes in ((0, 8), (1000, 0)):
        for log, first in ((alone, budget), (together, budgets[0])):
            log.context = context
            first.end_step()
        assert budget.choose_size(probs) == nodes
        assert choose_all_nodes(budgets, [probs] * 4) == [nodes] * 4


@pytest.mark.parametrize("pads", [True, False])
def test_a_lone_answer_of_a_batch_has_costs_of_its_own(pads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of eight is timed after short contexts, each of which has rows of its own; what nodes add to a lone
    tree's pass after a long context would be extrapolated from them, and be many times too much."""
    after_one, after_eight = curve_of(FLAT, FLAT, contexts=(4, 3000)), curve_of(FLAT, STEEP, contexts=(4, 400))

    def curve_for(target: Target, batch: int = 1) -> CostCurve:
        return after_one if batch == 1 else after_eight

    monkeypatch.setattr("hdtool.runtime.drafters.drafter_factory.cost_curve_for", curve_for)
    target = Target(model_of("llama"))
    monkeypatch.setattr(Target, "pads", pads)
    together = shared_costs_for(target, {1, 2, 4, 8} if pads else {8})
    target.log.context = 3000
    for slots, curve in ((1, after_one), (2, after_eight)):
        costs = together.costs(slots)
        costs.update()
        assert estimated_cost(costs._record, 7) == pytest.approx(curve.seconds(7, 3000))


def test_the_long_contexts_of_a_batch_take_no_more_memory(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    monkeypatch.setattr(model.config, "max_position_embeddings", 2048)
    target = Target(model)
    of_token = sum(one.heads * one.width * one.dtype.itemsize for layer in target.facts.shapes for one in layer.kept)
    monkeypatch.setattr("hdtool.runtime.budget.measure_passes.LONG_CONTEXT_BYTES", 1200 * of_token)
    found = [cost_curve_for(target, batch).contexts for batch in (1, 2, 4, 5)]
    assert [contexts[1:] for contexts in found] == [(1200,), (600,), (300,), ()]


def shared(costs: list[float], slots: int, log: PassLog) -> list[SharedBudget]:
    return together_by(log, {slots: curve_of(costs)}, slots)


def together_by(
    log: PassLog, curves: dict[int, CostCurve], slots: int, *, is_confirmed: bool = True, pads: bool = True
) -> list[SharedBudget]:
    shared_costs = SharedCosts(log, curves, pads=pads)
    if is_confirmed:
        for size in curves:
            confirmed(shared_costs.costs(size))
    return [SharedBudget(shared_costs, overhead=0.0) for _ in range(slots)]


@pytest.mark.parametrize("slots", [1, 4])
def test_slow_drafts_pause_in_a_batch_too(slots: int) -> None:
    """Nodes are free and bring half a token; plain steps take a second, and each draft 0.4 or 0.6 of the batch's."""
    for seconds, rests in ((0.4, False), (0.6, True)):
        log = PassLog()
        budgets = shared([1.0] * len(MEASURED_NODES), slots, log)
        awake = 0
        for _ in range(40):
            for budget in budgets:
                if budget.max_nodes:
                    awake += 1
                    budget.set_draft_seconds(seconds / slots)
                    budget.choose_size(np.array([0.5]))
            log.add(1.0, 0, slots)
        assert (awake < 20 * slots) is rests


@pytest.mark.parametrize("slots", [1, 4])
def test_plain_passes_in_a_pause_correct_the_costs(slots: int) -> None:
    log = PassLog()
    budgets = together_by(log, {slots: curve_of([2 * seconds for seconds in STEEP])}, slots)
    for budget in budgets:
        budget.pause.until = log.passes + 20
    for _ in range(15):
        log.add(1.0, 0, slots)
        for budget in budgets:
            budget.end_step()
        assert not any(budget.max_nodes for budget in budgets)
    assert cost_of_plain(budgets[0].shared_costs.costs(slots)) == pytest.approx(1.0, rel=0.1)


def test_a_batch_confirms_what_a_plain_pass_takes() -> None:
    """However fast drafts seem: a plain pass measured while the machine was busy would else never be corrected."""
    log = PassLog()
    costs = [4.0 if rows == 1 else 4.1 for rows in PASS_SIZES]
    budgets = together_by(log, {4: curve_of(costs)}, 4, is_confirmed=False)
    sizes = []
    for _ in range(16):
        sizes.append(max([budget.choose_size(np.full(3, 0.9)) if budget.max_nodes else 0 for budget in budgets][1:]))
        log.add(4.1 if sizes[-1] else 0.5, sizes[-1], 4)
        budgets[0].end_step()
    assert 0 in sizes[:2]
    assert sizes[-6:] == [0] * 6


def test_a_pass_of_few_trees_says_nothing_about_many() -> None:
    log = PassLog()
    costs = SharedCosts(log, {8: curve_of(FLAT)}).costs(8)
    before = cost_of_plain(costs)
    log.add(before / 5, 0, 4)
    costs.update()
    assert cost_of_plain(costs) == before
    log.add(before / 5, 0, 5)
    costs.update()
    assert cost_of_plain(costs) < before


def cost_of_plain(costs: MeasuredCosts) -> float:
    return float(estimated_cost(costs._record, 0))


def test_in_a_batch_one_size_is_chosen_by_all_trees() -> None:
    """Eight nodes cost half a pass more: one tree out of four that gains a token does not pay for it, three do."""
    costs = [1.0 if rows == 1 else 1.5 for rows in PASS_SIZES]
    good, poor = np.full(7, 0.15), np.full(7, 0.01)
    first, *others = shared(costs, 4, PassLog())
    assert first.choose_size(good) == 7, "as long as nothing is known of the others"
    for other in others:
        other.choose_size(poor)
    assert first.choose_size(good) == 0
    for other in others[:2]:
        other.choose_size(good)
    assert first.choose_size(good) == 7
    assert others[2].choose_size(poor[:3]) == 3, "who has fewer sends what there is, which costs nothing more"


def test_a_budget_counts_the_slots_in_use_and_their_costs() -> None:
    """Nodes pay in a batch of one, where they are free, and not in one of four, where they double the pass."""
    free = CostCurve(tuple(size - 1 for size in PASS_SIZES), ((1.0,) * len(PASS_SIZES),))
    dear = CostCurve(free.nodes, (tuple(1.0 if size == 1 else 2.0 for size in PASS_SIZES),))
    probs, poor, log = np.full(7, 0.3), np.full(7, 0.001), PassLog()
    first, *others = together_by(log, {1: free, 4: dear}, 4)
    for other in others:
        other.choose_size(poor)  # answers that end in this step and in the next one
    for _ in range(2):
        log.add(1.0, 0)
        first.choose_size(probs)
    assert first.choose_size(probs) == 7
    for other in others[:2]:
        other.choose_size(poor)
    assert first.choose_size(probs) == 0


def by_rows(costs: list[float], slots: int, log: PassLog | None = None) -> list[SharedBudget]:
    """Those of an engine that pads no tree; the costs are by all rows but one."""
    return together_by(log or PassLog(), {slots: curve_of(costs)}, slots, pads=False)


LINEAR = [float(rows) for rows in PASS_SIZES]
"""A row of a node takes as long as one of a plain pass."""
CHEAPER = [4.0 if rows < 4 else 4 + (rows - 4) / 2 for rows in PASS_SIZES]
"""It takes half as long."""


def test_without_padding_the_most_probable_nodes_of_all_trees_are_verified() -> None:
    probs = [np.array(row) for row in ([0.9, 0.8, 0.7, 0.6], [0.4, 0.3], [0.95], [0.2])]
    assert choose_all_nodes(by_rows(CHEAPER, 4), probs) == [3, 0, 1, 0]
    assert choose_all_nodes(by_rows(LINEAR, 4), probs) == [0, 0, 0, 0]
    assert choose_all_nodes(by_rows(FLAT, 4), probs) == [4, 2, 1, 1]


def test_no_larger_pass_is_chosen_than_is_known() -> None:
    for slots in (3, 60, 64, 80):
        sizes = choose_all_nodes(by_rows(FLAT, slots), [np.full(40, 0.9)] * slots)
        assert sum(sizes) == max(0, PASS_SIZES[-1] - slots)


def test_equal_probabilities_do_not_enlarge_the_pass() -> None:
    """Eight rows cost as much as four; a ninth one doubles the pass."""
    costs = [1.0 if rows <= 8 else 2.0 + rows for rows in PASS_SIZES]
    sizes = choose_all_nodes(by_rows(costs, 4), [np.full(6, 0.5)] * 4)
    assert sum(sizes) == 4


@given(
    probs=st.lists(st.lists(st.floats(0.01, 1.0), max_size=9), min_size=1, max_size=6),
    plain=st.floats(0.1, 4.0),
    rises=st.lists(st.floats(0.0, 1.0), min_size=len(PASS_SIZES), max_size=len(PASS_SIZES)),
)
def test_no_other_nodes_bring_more_tokens_per_second(
    probs: list[list[float]], plain: float, rises: list[float]
) -> None:
    trees = [np.sort(np.array(tree))[::-1] for tree in probs]
    budgets = by_rows([plain + sum(rises[: place + 1]) for place in range(len(PASS_SIZES))], len(trees))
    costs = budgets[0].shared_costs.costs(1)._record
    sizes = choose_all_nodes(budgets, trees)
    rate = [
        (len(trees) + gain) / estimated_cost(costs, len(trees) - 1 + nodes)
        for nodes, gain in enumerate(np.cumsum([0.0, *np.sort(np.concatenate(trees))[::-1]]))
    ]
    expected = len(trees) + sum(float(tree[:size].sum()) for tree, size in zip(trees, sizes, strict=True))
    found = expected / estimated_cost(costs, len(trees) - 1 + sum(sizes))
    assert found >= max(rate) * (1 - 1e-9)


def test_a_sequence_whose_drafts_bring_nothing_pauses_alone() -> None:
    log = PassLog()
    budgets = by_rows(CHEAPER, 4, log)
    awake = np.zeros(4, np.int64)
    for _ in range(60):
        drafting = [place for place, budget in enumerate(budgets) if budget.max_nodes]
        awake[drafting] += 1
        for place in drafting:
            budgets[place].set_draft_seconds(0.1)
        probs = [np.full(3, 0.9 if place == 1 else 0.1) for place in drafting]
        sizes = choose_all_nodes([budgets[place] for place in drafting], probs)
        log.add(5.0, 3 + sum(sizes), 4)
        budgets[0].end_step()
    assert awake[1] == 60
    assert max(awake[[0, 2, 3]]) < 20


def verified(budget: Budget, log: PassLog, probs: Probs, seconds: Callable[[int], float], steps: int) -> list[int]:
    """The nodes of each step, whose passes take other times than were measured before."""
    found = []
    for _ in range(steps):
        found.append(budget.choose_size(probs) if budget.max_nodes else 0)
        log.add(seconds(found[-1]), found[-1])
        budget.end_step()
    return found


def test_drafts_that_only_look_dear_are_tried() -> None:
    """The machine was busy while larger passes were measured: 4 times too slow."""
    probs = np.full(3, 0.3)
    slow = [1.0, *[4.0] * (len(PASS_SIZES) - 1)]
    alone, log = budget_of(slow, is_confirmed=False)
    found = verified(alone, log, probs, lambda nodes: 1.0, 60)
    assert found[-20:] == [3] * 20
    log = PassLog()
    (one,) = together_by(log, {1: curve_of(slow)}, 1, is_confirmed=False)
    found = verified(one, log, probs, lambda nodes: 1.0, 60)
    assert found[-20:] == [3] * 20


def test_a_plain_pass_that_only_looks_slow_is_tried() -> None:
    """Drafts seem to bring 1.3 tokens for the time of one, but a plain pass takes half of that time."""
    budget, log = budget_of(FLAT, is_confirmed=False)
    probs = np.full(3, 0.1)
    found = verified(budget, log, probs, lambda nodes: 1.0 if nodes else 0.5, 200)
    assert found[-100:].count(0) > 90


@pytest.mark.parametrize("wrong", [0.9, 6.0], ids=["a little too slow", "ten times too slow"])
def test_a_plain_pass_that_was_timed_on_a_busy_machine_is_corrected(wrong: float) -> None:
    """A small model on a CPU: a node costs 0.6 of a plain pass and brings 0.4 tokens."""
    true = [0.5, 0.8, 1.0, 2.2, *[5.0] * (len(PASS_SIZES) - 4)]
    budget, log = budget_of([wrong, *true[1:]], is_confirmed=False)
    seconds = dict(zip(MEASURED_NODES, true, strict=True))
    found = verified(budget, log, np.array([0.4]), seconds.__getitem__, 300)
    assert found[-200:].count(0) > 190


def test_a_cost_that_rises_is_found_out_although_larger_passes_seemed_to_pay() -> None:
    """A plain pass is timed again now and then, since passes over drafts tell nothing about it."""
    budget, log = budget_of(FLAT, is_confirmed=False)
    probs = np.full(3, 0.1)
    verified(budget, log, probs, lambda nodes: 1.0, 300)
    found = verified(budget, log, probs, lambda nodes: 1.0 if nodes else 0.5, 900)
    assert found[-100:].count(0) > 90


def test_a_plain_pass_is_timed_again_when_passes_become_faster() -> None:
    """A conversation with a short context follows one with a long context, of which the costs know nothing."""
    budget, log = budget_of([2 * seconds for seconds in STEEP], is_confirmed=False)
    probs = np.array([0.4])
    true = dict(zip(MEASURED_NODES, STEEP, strict=True))
    verified(budget, log, probs, lambda nodes: 2 * true[nodes], 300)
    budget._costs._record["corrections"][1:4] /= 2  # passes with a node were faster first
    found = verified(budget, log, probs, true.__getitem__, 300)
    assert found[-100:].count(0) > 90


def test_costs_that_passes_confirm_are_seldom_tried_again() -> None:
    steep, log = budget_of(STEEP, is_confirmed=False)
    probs = np.full(3, 0.3)
    rises = dict(zip(MEASURED_NODES, STEEP, strict=True))
    found = verified(steep, log, probs, rises.__getitem__, 400)
    assert 3 <= sum(map(bool, found)) <= 9, "three for each size that may pay"
    flat, log = budget_of(FLAT, is_confirmed=False)
    found = verified(flat, log, probs, lambda nodes: 1.0, 400)
    assert found.count(0) == 0, "clearly faster, whatever a plain pass takes"
    flat, log = budget_of(FLAT, is_confirmed=False)
    found = verified(flat, log, probs / 3, lambda nodes: 1.0, 400)
    assert 3 <= found.count(0) <= 6


@pytest.mark.parametrize("pads", [True, False])
def test_a_batch_learns_from_passes_with_as_many_trees(pads: bool) -> None:
    log = PassLog()
    shared_costs = SharedCosts(log, {1: curve_of(FLAT), 4: curve_of(FLAT)}, pads=pads)
    for slots, learns in ((1, 1), (3, 4), (4, 4)):
        before = {size: shared_costs.costs(size)._record["corrections"][0] for size in (1, 4)}
        log.add(2.0, 0, slots)
        for size, correction in before.items():
            shared_costs.costs(size).update()
            assert (shared_costs.costs(size)._record["corrections"][0] > correction) == (size == learns)


def test_a_plain_pass_is_not_thought_slower_than_larger_ones() -> None:
    """A plain pass was measured while the machine was busy: drafts that seldom help must not look as if they paid."""
    budget, _ = budget_of([3.0, *[1.0] * 3, *[9.0] * (len(PASS_SIZES) - 4)])
    budget.set_draft_seconds(0.5)
    for _ in range(8):
        if budget.max_nodes:
            budget.choose_size(np.array([0.2]))
    assert budget.pause._saved < 0 or budget.pause._length > 0


def test_the_time_between_passes_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 1.5 seconds with passes of one second, and drafts of 0.2: 0.3 are left for a step without a draft."""
    now = [0.0]
    monkeypatch.setattr("hdtool.runtime.budget.node_budget.time.perf_counter", lambda: now[0])
    log = PassLog()
    budget = budget_by(log, curve_of(FLAT), overhead=2.0)
    for _ in range(60):
        budget.set_draft_seconds(0.2)
        budget.choose_size(np.full(7, 0.9))
        log.add(1.0, 7)
        now[0] += 1.5
    assert budget.overhead == pytest.approx(0.3, rel=0.1)


def test_a_single_outlier_counts_little_in_an_average() -> None:
    average = SmoothedSeconds()
    for _ in range(20):
        average.observe(1.0)
    average.observe(1000.0)
    assert 1.0 < average.mean < 1.3
    for _ in range(60):
        average.observe(2.0)
    assert average.mean == pytest.approx(2.0, rel=0.05)
    begun_by_none = SmoothedSeconds()
    for observed in (0.0, 1.0, 1.0, 1.0):
        begun_by_none.observe(observed)
    assert begun_by_none.mean > 0.5


def test_a_hierarchy_states_what_its_drafts_cost() -> None:
    stated: list[float] = []

    class Noting(FixedBudget):
        def set_draft_seconds(self, seconds: float) -> None:
            stated.append(seconds)

    hierarchy = Hierarchy(budget=Noting(4))
    stated.clear()
    hierarchy.begin([1, 2, 1])
    hierarchy.draft([1, 2, 1])
    assert len(stated) == 1 and stated[0] > 0


def test_a_draft_that_finds_nothing_counts_as_one_that_does_not_pay() -> None:
    """So the look-up is skipped in the next steps, alone and in a batch."""
    asked: list[int] = []

    class Noting(FixedBudget):
        def choose_size(self, probs: Probs) -> int:
            asked.append(len(probs))
            return super().choose_size(probs)

    drafters = [Hierarchy(budget=Noting(4)) for _ in range(2)]
    for drafter in drafters:
        drafter.begin([1, 2, 3])
    asked.clear()
    assert not len(drafters[0].draft([1, 2, 3]))
    draft_many(drafters, [[1, 2, 3]] * 2)
    assert asked == [0, 0, 0]


@pytest.mark.parametrize("batch", [1, 2])
def test_timed_passes_verify_different_tokens(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal tokens have the same experts: a pass over many of them would read those of a single one."""
    seen: list[DraftTree] = []
    verify = Target.verify

    def noted(target: Target, cache: Cache, trees: Sequence[DraftTree]) -> list[Verified]:
        seen.extend(trees)
        return verify(target, cache, trees)

    monkeypatch.setattr(Target, "verify", noted)
    time_tree_passes(Target(model_of("qwen3_moe")), [0, 15], lambda rounds, _: rounds == 2, batch=batch)
    large = [tree for tree in seen if len(tree) == 15]
    assert len(large) == 2 * batch
    assert all(len(set(tree.tokens.tolist())) > 8 for tree in large)
    assert len({tuple(tree.all_tokens) for tree in large}) == len(large)
