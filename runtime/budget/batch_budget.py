"""Budgets of the sequences of a batch, which choose together: one pass verifies all their trees."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hdtool.runtime.budget.node_budget import (
    CHOICE,
    LONGEST_PAUSE,
    STEP_OVERHEAD,
    Budget,
    ChosenSize,
    Probs,
    SmoothedSeconds,
    best_size,
    decide,
    retry_steps,
    useful_tree,
)
from hdtool.runtime.budget.pass_costs import COSTS, LARGEST_CHOSEN, MeasuredCosts
from hdtool.runtime.kernels.compiled import Ints, compiled
from hdtool.runtime.kernels.memory.raw_memory import array_at

if TYPE_CHECKING:
    from hdtool.runtime.budget.cost_curve import CostCurve
    from hdtool.runtime.model.pass_log import PassLog


class Together:
    """What the budgets of a batch share: the costs of passes, and what each tree was last expected to bring."""

    def __init__(
        self, log: PassLog, curves: Mapping[int, CostCurve], *, only_timed_sizes: bool = False, pads: bool = True
    ) -> None:
        """``curves`` hold the passes of batches by the number of slots, with such a tree in each.

        Unless the engine ``pads`` trees to the largest, there is one curve, by the rows of all trees but one.
        """
        self.log, self._pads = log, pads
        self._expected: dict[SharedBudget, tuple[int, Probs]] = {}
        """The probabilities of each tree, and the step in which it was drafted."""
        self._outside = SmoothedSeconds()
        self._step, self._passes, self._called = 0, -1, 0.0
        """The last step in which sizes were chosen, the passes before it, and its time."""
        self._costs: dict[int, MeasuredCosts] = {}
        for slots in sorted(curves):
            fewer = max(self._costs, default=0)
            # Passes of far fewer trees take less, whatever their size.
            these = range(max(fewer, slots // 2) + 1 if pads else 1, slots + 1)
            self._costs[slots] = MeasuredCosts(log, curves[slots], these, only_timed_sizes=only_timed_sizes)

    def costs(self, slots: int) -> MeasuredCosts:
        """The costs of passes with so many trees."""
        return self._costs[min((known for known in self._costs if known >= slots), default=max(self._costs))]

    def nodes(self, budgets: Sequence[SharedBudget], probs: Sequence[Probs]) -> list[int]:
        """How many nodes of these trees to verify; others count as they were in this step or in the last one."""
        drafting = sum(budget.drafting for budget in budgets) / len(budgets)
        self._begin_step(drafting * max(len(budgets), len(self._expected)))
        for budget, own in zip(budgets, probs, strict=True):
            self._expected[budget] = self._step, own
        others = [one for one, (step, _) in self._expected.items() if step >= self._step - 1 and one not in budgets]
        self._expected = {one: self._expected[one] for one in (*budgets, *others)}
        rows = np.zeros((len(self._expected), LARGEST_CHOSEN))
        for row, (_, own) in zip(rows, self._expected.values(), strict=True):
            row[: len(own)] = own[:LARGEST_CHOSEN]
        slots = max(self.log.slots, len(rows))
        costs, overhead = self.costs(slots), budgets[0].overhead * slots
        costs.update()
        if self._outside.mean > 0:
            overhead = min(overhead, self._outside.mean)
        chosen = np.array([(budget.address, budget.largest, 0) for budget in budgets])
        first = 0 if self._pads else min(slots - 1, LARGEST_CHOSEN)
        choose_together(chosen, rows, slots, first, self._pads, overhead, costs.address, self.log.passes)
        sizes = []
        for budget, own, (size, largest, paused_until) in zip(budgets, probs, chosen.tolist(), strict=True):
            budget.take(largest, paused_until)
            if paused_until:
                del self._expected[budget]
            sizes.append(min(len(own), size))
        return sizes

    def _begin_step(self, drafting: float) -> None:
        """Note a new step, and measure the time of the last one outside its pass and without ``drafting``."""
        log, now = self.log, time.perf_counter()
        if log.passes == self._passes:
            return
        if log.passes == self._passes + 1 and log.nodes >= 0:
            self._outside.observe(max(0.0, now - self._called - log.last_seconds - drafting))
        self._passes, self._called = log.passes, now
        self._step += 1


class SharedBudget(ChosenSize):
    """The budget of one sequence of a batch.

    An engine that computes the rows of each tree verifies the most probable nodes of all trees. Where it pads them,
    all trees get the same size, chosen by the sum of their expected tokens.
    """

    def __init__(self, together: Together, overhead: float = STEP_OVERHEAD) -> None:
        super().__init__(overhead, lambda: together.log.passes, together.costs(1))
        self.together, self.overhead = together, overhead
        # Compiled, or loaded, before the first step.
        given = np.array([(self._at, LARGEST_CHOSEN, 0)]), np.zeros((1, LARGEST_CHOSEN))
        choose_together(*given, 1, 0, True, overhead, together.costs(1).address, 0)
        self._own["pause"] = 0

    def nodes(self, probs: Probs) -> int:
        return self.together.nodes([self], [probs])[0]

    @property
    def address(self) -> int:
        """Where its record is."""
        return self._at

    @property
    def largest(self) -> int:
        """The largest useful tree while it is not paused."""
        return self._most

    @property
    def drafting(self) -> float:
        """Seconds of its last draft."""
        return float(self._own["drafting"])

    def take(self, largest: int, paused_until: int) -> None:
        """Take what was chosen for its next steps."""
        self._most, self._paused_until = largest, paused_until


def nodes_of_all(budgets: Sequence[Budget], probs: Sequence[Probs]) -> list[int]:
    """How many nodes of each tree to verify; budgets of one batch choose together."""
    shared = [budget for budget in budgets if isinstance(budget, SharedBudget)]
    if shared and len(shared) == len(budgets):
        return shared[0].together.nodes(shared, probs)
    return [budget.nodes(own) for budget, own in zip(budgets, probs, strict=True)]


@compiled
def choose_together(
    chosen: Ints, probs: Probs, slots: int, first: int, pads: bool, overhead: float, of_costs: int, step: int
) -> None:
    """Choose for the first trees, whose records and largest useful trees are in rows of ``chosen``.

    They become the number of nodes, the largest useful tree, and the step up to which the sequence does not draft.
    ``slots`` sequences have ``first`` rows of a plain pass that nodes come after.
    """
    costs = array_at(of_costs, 1, COSTS)[0]
    trees, most = probs.shape[0], LARGEST_CHOSEN - first
    gain, owner, used = np.full(most + 1, float(slots)), np.zeros(most, np.int64), np.zeros(trees, np.int64)
    for nodes in range(most):
        added, best = 0.0, 0
        for tree in range(trees):
            if pads:
                added += probs[tree, nodes]
            elif used[tree] < LARGEST_CHOSEN and probs[tree, used[tree]] > added:
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
    for tree in range(len(chosen)):
        own, nodes = array_at(chosen[tree, 0], 1, CHOICE)[0], used[tree]
        paused_until = 0
        if not tries:
            saved = probs[tree, :nodes].sum() * (plain + overhead) / slots - (cost - plain) * nodes / verified
            # A tree has few nodes that pay in a batch: it is often tried again where this takes little of the time.
            longest = retry_steps(own, (plain + overhead) / slots) if own.drafting > 0 else LONGEST_PAUSE
            paused_until = decide(own, pays and nodes > 0, saved, longest, step)
        chosen[tree, 0], chosen[tree, 1], chosen[tree, 2] = nodes, useful_tree(nodes, chosen[tree, 1]), paused_until
