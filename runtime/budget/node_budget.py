"""Budgets decide how many nodes of a draft tree to verify: a fixed number, or as many as maximize throughput."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hdtool.runtime.budget.averages import SmoothedSeconds
from hdtool.runtime.budget.drafting_pause import MAX_PAUSE_STEPS, DraftingPause
from hdtool.runtime.budget.pass_costs import (
    COSTS,
    MAX_CHOSEN_NODES,
    OUTDATED_RATIO,
    PASS_SIZES,
    MeasuredCosts,
    PassCosts,
    confirming_passes,
    estimated_cost,
)
from hdtool.runtime.core.acceptance_rates import Probs
from hdtool.runtime.kernels.compiled import Ints, array_at, compiled
from hdtool.runtime.settings.draft_token_limits import FIXED_BUDGET, LARGEST_BUDGET

if TYPE_CHECKING:
    from hdtool.runtime.budget.cost_curve import CostCurve
    from hdtool.runtime.core.engine_interface import PassLog

STEP_OVERHEAD = 2e-4
"""Initial estimate of the seconds that a step spends outside its forward pass, used until they are measured."""
CONFIRMED_PASSES = 3.0
"""Number of passes that must confirm a cost before it can rule drafting in or out without a trial."""
WORTH_TRYING, CLEARLY_FASTER = 1.2, 1.5
"""Thresholds for trying a pass whose cost is unconfirmed. Drafts that do not seem to pay are tried if they multiply the
expected tokens of a step by the first factor; a plain pass is tried unless drafts seem faster by the second factor."""
MIN_DRAFTED_NODES = PASS_SIZES[3]
"""Smallest ``max_nodes`` of an ``AdaptiveBudget`` while drafting is not paused."""


class Budget:
    """Decides how many nodes of a draft tree to verify, given their probabilities of acceptance in descending order."""

    @property
    def max_nodes(self) -> int:
        """Maximum number of nodes worth drafting in this step; 0 if the step should not draft."""
        raise NotImplementedError

    def choose_size(self, probs: Probs) -> int:
        """Return how many of the most probable nodes to verify."""
        raise NotImplementedError

    def set_draft_seconds(self, seconds: float) -> None:
        """Set how many seconds the current draft took, for drafters whose own time is counted as a cost."""

    def end_step(self) -> None:
        """Learn from the pass of a step, with or without drafts, if costs are measured."""


@dataclass(frozen=True)
class FixedBudget(Budget):
    """A budget that allows all nodes, up to a fixed number."""

    max_nodes: int = FIXED_BUDGET

    def choose_size(self, probs: Probs) -> int:
        return min(len(probs), self.max_nodes)


class StepOverhead(SmoothedSeconds):
    """Average time in seconds that a step spends outside its forward pass and its drafting."""

    def __init__(self, log: PassLog, expected: float = 0.0) -> None:
        super().__init__(expected=expected)
        self._log, self._passes, self._began = log, -1, 0.0

    def begin_step(self, draft_seconds: float) -> bool:
        """Begin a step that took ``draft_seconds`` to draft; measure the last one if it ran a single pass, over trees.

        Return False, and do nothing, if this step has begun already.
        """
        log, now = self._log, time.perf_counter()
        if log.passes == self._passes:
            return False
        if log.passes == self._passes + 1 and log.nodes >= 0:
            self.observe(max(0.0, now - self._began - log.last_seconds - draft_seconds))
        self._passes, self._began = log.passes, now
        return True


class AdaptiveBudget(Budget):
    """A budget that chooses the number of nodes with the most expected tokens per second.

    While drafting does not pay, it is paused; see ``DraftingPause``.
    """

    def __init__(self, overhead: float, step: Callable[[], int], costs: PassCosts) -> None:
        """Choose based on ``costs`` and ``overhead``, the seconds that a step spends outside its pass.

        ``step`` returns the number of the current step.
        """
        self._costs, self.overhead, self.pause = costs, overhead, DraftingPause(step)
        self._max_nodes = MAX_CHOSEN_NODES
        # Compile ``choose_nodes``, or load it from the cache, before the first step.
        choose_nodes(np.empty((1, 0)), 1, 0, True, overhead, costs.address)

    @property
    def max_nodes(self) -> int:
        return 0 if self.pause.lasts else self._max_nodes

    def set_draft_seconds(self, seconds: float) -> None:
        self.pause.draft_seconds = seconds

    def choose_size(self, probs: Probs) -> int:
        sizes, saved, pays, tries, plain = choose_nodes(probs[None], 1, 0, True, self.overhead, self._costs.address)
        size = int(sizes[0])
        self.apply_choice(size, pays, tries, float(saved[0]), max(MAX_PAUSE_STEPS, self.pause.retry_steps(plain)))
        return size

    def apply_choice(self, size: int, pays: bool, tries: bool, saved: float, max_pause: int) -> None:
        """Adapt ``max_nodes`` to the chosen size, and begin a pause of drafting if drafts do not pay.

        A pause lasts at most ``max_pause`` steps; see ``choose_nodes`` for the other arguments.
        """
        self._max_nodes = min(MAX_CHOSEN_NODES, max(2 * size, self._max_nodes - 1, MIN_DRAFTED_NODES))
        self.pause.until = 0
        if not tries:
            self.pause.learn(pays, saved, max_pause)


class CostBudget(AdaptiveBudget):
    """A budget that chooses based on a given cost curve.

    The caller passes the length of the context to ``start_step`` before each step.
    """

    def __init__(self, curve: CostCurve, overhead: float = STEP_OVERHEAD) -> None:
        super().__init__(overhead, lambda: self._steps, PassCosts())
        self._curve = curve
        self._steps = 0
        self.start_step(0)

    def set_draft_seconds(self, seconds: float) -> None:
        """Do nothing: decisions based on a given curve must not depend on how busy the machine is."""

    def start_step(self, context: int) -> None:
        """Begin a step after a context of this length."""
        self._steps += 1
        if self._steps == 1 or len(self._curve.contexts) > 1:
            self._costs.set(self._curve.seconds_by_size(LARGEST_BUDGET, context))


class MeasuredBudget(AdaptiveBudget):
    """A budget that chooses based on costs that each measured pass corrects, and on the time between passes."""

    _costs: MeasuredCosts

    def __init__(self, log: PassLog, costs: MeasuredCosts, overhead: float = STEP_OVERHEAD) -> None:
        super().__init__(overhead, lambda: log.passes, costs)
        self._outside = StepOverhead(log, overhead)

    def end_step(self) -> None:
        self._costs.update()

    def choose_size(self, probs: Probs) -> int:
        self._measure_overhead()
        return super().choose_size(probs)

    def _measure_overhead(self) -> None:
        self._outside.begin_step(self.pause.draft_seconds)
        self.overhead = self._outside.mean


@compiled
def best_size(gain: Probs, first: int, overhead: float, costs: Any) -> tuple[int, bool, bool, float, float]:
    """Choose the number of nodes with the most expected tokens per second, where n nodes yield ``gain[n]`` tokens.

    Return ``(size, pays, tries, cost, plain)``: the number of nodes; whether drafts pay; whether the opposite was
    chosen to try out an unconfirmed cost; and the estimated seconds of the best pass with nodes and of a plain pass,
    which has no nodes and ``first`` rows besides the first root.
    """
    plain = estimated_cost(costs, first)
    best, best_rate, cost = 0, 0.0, plain
    for nodes in range(1, len(gain)):
        seconds = estimated_cost(costs, first + nodes)
        # A plain pass takes no longer than a larger one, whose cost may be more recent.
        plain = min(plain, seconds)
        rate = gain[nodes] / (seconds + overhead)
        if rate > best_rate:
            best, best_rate, cost = nodes, rate, seconds
    # A plain pass yields one token for each sequence of a batch.
    speedup = best_rate * (plain + overhead) / gain[0]
    pays = speedup > 1.0
    if pays:
        is_outdated = estimated_cost(costs, first) > OUTDATED_RATIO * plain
        # If a plain pass seems slower than a larger one, its cost is outdated, and drafts only seem fast. In a batch,
        # drafts gain little, and a single plain pass confirms the cost for all sequences.
        is_worthwhile = is_outdated or speedup < CLEARLY_FASTER or gain[0] > 1
        tries = is_worthwhile and confirming_passes(costs, first) < CONFIRMED_PASSES
    else:
        tries = gain[best] >= WORTH_TRYING * gain[0] and confirming_passes(costs, first + best) < CONFIRMED_PASSES
    return best if pays != tries else 0, pays, tries, cost, plain


class SharedCosts:
    """Costs of batched passes, and the latest probabilities of each tree, shared by the budgets of a batch."""

    def __init__(
        self, log: PassLog, curves: Mapping[int, CostCurve], *, only_timed_sizes: bool = False, pads: bool = True
    ) -> None:
        """``curves`` maps a number of slots to the cost curve of passes over that many trees, by the size of each tree.

        Without ``pads``, the engine does not pad trees to the largest, and a size is one less than the total number of
        rows of all trees.
        """
        self.log, self._pads = log, pads
        self._expected: dict[SharedBudget, tuple[int, Probs]] = {}
        """Maps each sequence's budget to the step of its latest draft and the probabilities of this draft's nodes."""
        self._outside = StepOverhead(log)
        self._step = 0
        """Number of the current step."""
        self._costs: dict[int, MeasuredCosts] = {}
        for slots in sorted(curves):
            fewer = max(self._costs, default=0)
            # Where trees are padded, passes over far fewer trees are faster at any tree size, so they do not correct
            # these costs.
            these = range(max(fewer, slots // 2 if pads else 0) + 1, slots + 1)
            self._costs[slots] = MeasuredCosts(log, curves[slots], these, only_timed_sizes=only_timed_sizes)

    def costs(self, slots: int) -> MeasuredCosts:
        """Return the costs for the smallest measured number of slots not below ``slots``, or else for the largest."""
        return self._costs[min((known for known in self._costs if known >= slots), default=max(self._costs))]

    def learn(self) -> None:
        """Learn from the last pass; further calls before the next pass change nothing."""
        for costs in self._costs.values():
            costs.update()

    def choose_sizes(self, budgets: Sequence[SharedBudget], probs: Sequence[Probs]) -> list[int]:
        """Return how many nodes of each budget's tree to verify, and adapt the budgets to this choice.

        The other sequences of the batch count with the probabilities of their latest trees.
        """
        drafting = sum(budget.pause.draft_seconds for budget in budgets) / len(budgets)
        self._step += self._outside.begin_step(drafting * max(len(budgets), len(self._expected)))
        for budget, tree_probs in zip(budgets, probs, strict=True):
            self._expected[budget] = self._step, tree_probs
        others = [
            budget_key
            for budget_key, (step, _) in self._expected.items()
            if step >= self._step - 1 and budget_key not in budgets
        ]
        self._expected = {budget_key: self._expected[budget_key] for budget_key in (*budgets, *others)}
        rows = np.zeros((len(self._expected), MAX_CHOSEN_NODES))
        for row, (_, tree_probs) in zip(rows, self._expected.values(), strict=True):
            row[: len(tree_probs)] = tree_probs[:MAX_CHOSEN_NODES]
        slots = max(self.log.slots, len(rows))
        costs, overhead = self.costs(slots), budgets[0].overhead * slots
        if self._outside.mean > 0:
            overhead = min(overhead, self._outside.mean)
        first = 0 if self._pads else min(slots - 1, MAX_CHOSEN_NODES)
        sizes, saved, pays, tries, plain = choose_nodes(rows, slots, first, self._pads, overhead, costs.address)
        chosen = []
        for budget, tree_probs, size, seconds in zip(budgets, probs, sizes.tolist(), saved.tolist(), strict=False):
            # In a batch, few nodes of a tree pay, so a fast drafter is retried often.
            max_pause = budget.pause.retry_steps(plain / slots) if budget.pause.draft_seconds > 0 else MAX_PAUSE_STEPS
            budget.apply_choice(size, pays and size > 0, tries, seconds, max_pause)
            if budget.pause.until:
                del self._expected[budget]
            chosen.append(min(len(tree_probs), size))
        return chosen


class SharedBudget(AdaptiveBudget):
    """The budget of one sequence in a batch; the budgets of a batch choose together.

    If the engine pads trees, all trees get the same size, chosen by the sum of their expected tokens. Otherwise the
    most probable nodes of all trees are verified.
    """

    def __init__(self, shared_costs: SharedCosts, overhead: float = STEP_OVERHEAD) -> None:
        super().__init__(overhead, lambda: shared_costs.log.passes, shared_costs.costs(1))
        self.shared_costs = shared_costs

    def end_step(self) -> None:
        self.shared_costs.learn()

    def choose_size(self, probs: Probs) -> int:
        return self.shared_costs.choose_sizes([self], [probs])[0]


def choose_all_nodes(budgets: Sequence[Budget], probs: Sequence[Probs]) -> list[int]:
    """Return how many nodes of each tree to verify; the budgets of one batch choose together."""
    shared = [budget for budget in budgets if isinstance(budget, SharedBudget)]
    if shared and len(shared) == len(budgets):
        return shared[0].shared_costs.choose_sizes(shared, probs)
    return [budget.choose_size(tree_probs) for budget, tree_probs in zip(budgets, probs, strict=True)]


@compiled
def choose_nodes(
    probs: Probs, slots: int, first: int, pads: bool, overhead: float, of_costs: int
) -> tuple[Ints, Probs, bool, bool, float]:
    """Choose the sizes of the trees with these ``probs``, one row each, using the ``COSTS`` at address ``of_costs``.

    A pass over ``slots`` sequences without nodes has ``first`` rows besides the first root.

    Return ``(sizes, saved, pays, tries, plain)``: the sizes; the seconds that each tree saves, not counting the time of
    the drafter; ``pays`` and ``tries`` as ``best_size`` does; and the seconds of a plain step.
    """
    costs = array_at(of_costs, 1, COSTS)[0]
    (trees, columns), max_nodes = probs.shape, MAX_CHOSEN_NODES - first
    columns = min(columns, MAX_CHOSEN_NODES)
    gain, owner, used = np.full(max_nodes + 1, float(slots)), np.zeros(max_nodes, np.int64), np.zeros(trees, np.int64)
    for nodes in range(max_nodes):
        added, best = 0.0, 0
        for tree in range(trees):
            if pads:
                added += probs[tree, nodes] if nodes < columns else 0.0
            elif used[tree] < columns and probs[tree, used[tree]] > added:
                added, best = probs[tree, used[tree]], tree
        if added == 0:
            gain = gain[: nodes + 1]
            break
        owner[nodes], gain[nodes + 1] = best, gain[nodes] + added
        used[best] += 1
    size, pays, tries, cost, plain = best_size(gain, first, overhead, costs)
    used[:] = size if pads else 0
    if not pads:
        for node in range(size):
            used[owner[node]] += 1
    verified = max(1, used.sum())
    saved = np.zeros(trees)
    for tree in range(trees):
        saved[tree] = probs[tree, : used[tree]].sum() * (plain + overhead) / slots
        saved[tree] -= (cost - plain) * used[tree] / verified
    return used, saved, pays, tries, plain + overhead
