"""Budgets: how many nodes of a draft tree to verify, fixed or chosen to maximize tokens per second."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from hdtool.runtime.budget.cost_curve import (
    COSTS,
    MAX_CHOSEN_NODES,
    PASS_SIZES,
    MeasuredCosts,
    PassCosts,
    confirming_passes,
    estimated_cost,
)
from hdtool.runtime.config import FIXED_BUDGET, LARGEST_BUDGET
from hdtool.runtime.kernels.compiled import Ints, Uncopyable, array_at, compiled

if TYPE_CHECKING:
    from hdtool.runtime.budget.cost_curve import CostCurve
    from hdtool.runtime.engine import PassLog

STEP_OVERHEAD = 2e-4
"""Assumed overhead of a step outside its forward pass, in seconds, until it is measured."""
OVERHEAD_LEARNING_RATE, MAX_OVERHEAD_RATIO = 0.1, 3.0
"""Learning rate of the seconds outside of passes, and how many times their average a single step may count."""
MAX_PAUSE_STEPS = 64
"""Upper bound on the steps without drafts after drafting did not pay."""
SAVED_LEARNING_RATE = 0.1
"""Learning rate of the seconds that drafts save, for drafters with a time that counts."""
RETRY_SHARE = 0.01
"""Share of the time that may be spent on trying drafts again."""

CONFIRMED_PASSES = 3.0
"""Passes that must confirm a cost before it decides for or against drafts for good."""
WORTH_TRYING, CLEARLY_FASTER = 1.2, 1.5
"""Expected tokens of a step, against one without a draft, from which on a larger pass of unconfirmed cost is tried, and
how many times as fast drafts must seem for a plain pass of unconfirmed cost not to be."""
MIN_DRAFTED_NODES = PASS_SIZES[3]
"""Nodes that are drafted at least, if any are."""
Probs = npt.NDArray[np.floating[Any]]


class Budget(Protocol):
    """Decides how many nodes of a tree are verified; nodes are sorted by their probability of acceptance."""

    @property
    def max_nodes(self) -> int:
        """The largest useful tree; 0 means that this step should not draft."""
        ...

    def nodes(self, probs: Probs) -> int:
        """How many of the best nodes to verify."""
        ...

    def set_draft_seconds(self, seconds: float) -> None:
        """Set the seconds of the current draft, for drafters with a time that counts."""
        ...


@dataclass(frozen=True)
class FixedBudget:
    """All nodes, up to a fixed number."""

    max_nodes: int = FIXED_BUDGET

    def nodes(self, probs: Probs) -> int:
        return min(len(probs), self.max_nodes)

    def set_draft_seconds(self, seconds: float) -> None:
        pass


BUDGET_RECORD = np.dtype(
    [
        ("overhead", np.float64),  # seconds of a step outside its pass
        ("costs", np.int64),  # the address of a record of costs
        ("drafting", np.float64),  # seconds of the last draft; 0 if they do not count
        ("saved", np.float64),  # moving average of the seconds that a draft saves; NaN after a pause
        ("pause", np.int64),
    ],
    align=True,
)


class SmoothedSeconds:
    """The moving average of a time, on which a single interruption has little influence."""

    def __init__(self, expected: float = 0.0) -> None:
        """An ``expected`` time counts as one that was observed."""
        self.mean = expected
        self._observed = int(expected > 0)

    def observe(self, seconds: float) -> None:
        if self.mean:  # not once it is 0, where it would stay
            seconds = min(seconds, MAX_OVERHEAD_RATIO * self.mean)
        self._observed += 1
        self.mean += max(OVERHEAD_LEARNING_RATE, 1 / self._observed) * (seconds - self.mean)


class ChosenSize(Uncopyable):
    """A budget that chooses the number of nodes with the most expected tokens per second.

    While drafting does not pay, steps without any draft are inserted, in pauses that double each time.
    """

    def __init__(self, overhead: float, step: Callable[[], int], costs: PassCosts) -> None:
        """``overhead`` is the seconds of a step outside its pass; ``step`` returns the number of the current step."""
        self._step = step
        self._choice = np.zeros(1, BUDGET_RECORD)
        self._at = self._choice.ctypes.data
        self._own: Any = self._choice[0]
        self._own["overhead"], self._own["saved"] = overhead, np.nan
        self._use(costs)
        self._max_nodes = MAX_CHOSEN_NODES
        self._paused_until = 0
        # Compiled, or loaded, before the first step.
        choose_nodes(self._at, np.empty(0), 0, self._max_nodes)
        self._own["pause"] = 0

    def _use(self, costs: PassCosts) -> None:
        self._costs = costs
        self._own["costs"] = costs.address

    @property
    def max_nodes(self) -> int:
        return 0 if self._step() < self._paused_until else self._max_nodes

    def set_draft_seconds(self, seconds: float) -> None:
        self._own["drafting"] = seconds

    def nodes(self, probs: Probs) -> int:
        best, self._max_nodes, self._paused_until = choose_nodes(self._at, probs, self._step(), self._max_nodes)
        return best


class CostBudget(ChosenSize):
    """The number of nodes with the most expected tokens per second, by a given cost curve.

    The caller sets the length of the context before each step.
    """

    def __init__(self, curve: CostCurve, overhead: float = STEP_OVERHEAD) -> None:
        super().__init__(overhead, lambda: self._steps, PassCosts())
        self._curve = curve
        self._steps = 0
        self.start_step(0)

    def set_draft_seconds(self, seconds: float) -> None:
        """Ignored: what a cost curve decides must not depend on how busy the machine is."""

    def start_step(self, context: int) -> None:
        """Set the length of the context of the next step."""
        self._steps += 1
        if self._steps == 1 or len(self._curve.contexts) > 1:
            self._costs.set(self._curve.seconds_by_size(LARGEST_BUDGET, context))


class MeasuredBudget(ChosenSize):
    """Like CostBudget, with costs that measured passes correct, and the measured time between passes."""

    _costs: MeasuredCosts

    def __init__(self, log: PassLog, costs: MeasuredCosts, overhead: float = STEP_OVERHEAD) -> None:
        super().__init__(overhead, lambda: log.passes, costs)
        self._log = log
        self._passes, self._called = log.passes, time.perf_counter()
        """Passes at the last call, and its time."""
        self._outside = SmoothedSeconds(overhead)

    def nodes(self, probs: Probs) -> int:
        self._costs.update()
        self._measure_overhead()
        return super().nodes(probs)

    def _measure_overhead(self) -> None:
        """Measure the time around the last pass, if it was the only one since the last call."""
        log, now = self._log, time.perf_counter()
        if log.passes == self._passes + 1 and self.max_nodes and log.nodes >= 0:
            around = now - self._called - log.last_seconds - self._own["drafting"]
            self._outside.observe(max(0.0, around))
            self._own["overhead"] = self._outside.mean
        self._passes, self._called = log.passes, now


@compiled
def expected_tokens(probs: Probs) -> Probs:
    """Expected tokens per step of trees of the first 0, 1, 2 … nodes: the bonus token plus the probabilities."""
    gain = np.ones(min(len(probs), MAX_CHOSEN_NODES) + 1)
    total = 0.0
    for node in range(len(gain) - 1):
        total += probs[node]
        gain[node + 1] = 1.0 + total
    return gain


@compiled
def choose_nodes(at: int, probs: Probs, step: int, max_nodes: int) -> tuple[int, int, int]:
    """How many nodes with these probabilities to verify by the record at an address, in this step.

    Returns it with the largest useful tree of the next steps, and the step up to which none drafts.
    """
    choice = array_at(at, 1, BUDGET_RECORD)[0]
    costs = array_at(choice.costs, 1, COSTS)[0]
    gain = expected_tokens(probs)
    chosen, pays, tries, cost, plain = best_size(gain, 0, choice.overhead, costs)
    max_nodes = useful_tree(chosen, max_nodes)
    if tries:
        return chosen, max_nodes, 0
    saved = gain[chosen] * (plain + choice.overhead) - (cost if pays else plain) - choice.overhead
    longest = max(MAX_PAUSE_STEPS, retry_steps(choice, plain + choice.overhead))
    return chosen, max_nodes, decide_pause(choice, pays, saved, longest, step)


@compiled
def retry_steps(choice: Any, plain: float) -> int:
    """The number of plain steps of ``plain`` seconds after which drafting may be retried."""
    return int(choice.drafting / (RETRY_SHARE * plain))


@compiled
def useful_tree(chosen: int, max_nodes: int) -> int:
    """The largest useful tree of the next steps: nodes that will not be verified need not be drafted."""
    return min(MAX_CHOSEN_NODES, max(2 * chosen, max_nodes - 1, MIN_DRAFTED_NODES))


@compiled
def best_size(gain: Probs, first: int, overhead: float, costs: Any) -> tuple[int, bool, bool, float, float]:
    """The number of nodes with the most expected tokens per second, by the expected tokens with 0, 1, 2 … of them.

    Also whether drafts pay; whether the choice was turned round, as it rests on a cost that no pass has confirmed; and
    the seconds of a pass with the nodes that seem best, and of one without any, which has ``first`` further rows.
    """
    plain = estimated_cost(costs, first)
    best, highest, cost = 0, 0.0, plain
    for nodes in range(1, len(gain)):
        taken = estimated_cost(costs, first + nodes)
        # A plain pass takes no longer than larger ones, which may have been measured later.
        plain = min(plain, taken)
        rate = gain[nodes] / (taken + overhead)
        if rate > highest:
            best, highest, cost = nodes, rate, taken
    # In a batch a plain pass, too, yields a token for each sequence.
    faster = highest * (plain + overhead) / gain[0]
    pays = faster > 1.0
    if pays:
        # In a batch drafts gain little, and one plain pass says it for all.
        tries = (faster < CLEARLY_FASTER or gain[0] > 1) and confirming_passes(costs, first) < CONFIRMED_PASSES
    else:
        tries = gain[best] >= WORTH_TRYING * gain[0] and confirming_passes(costs, first + best) < CONFIRMED_PASSES
    return best if pays != tries else 0, pays, tries, cost, plain


@compiled
def decide_pause(choice: Any, paid: bool, saved: float, longest: int, step: int) -> int:
    """Decide whether to pause drafting, which ``saved`` so many seconds but for its own.

    Returns the step up to which it pauses, or 0.
    """
    if choice.drafting > 0:
        saved -= choice.drafting
        choice.saved = saved if np.isnan(choice.saved) else choice.saved + SAVED_LEARNING_RATE * (saved - choice.saved)
        paid = choice.saved > 0
    choice.pause = 0 if paid else min(max(1, 2 * choice.pause), longest)
    if choice.pause <= 2:
        return 0
    choice.saved = np.nan
    return int(step + 1 + choice.pause)


class SharedCosts:
    """Shared by the budgets of a batch: the costs of passes, and the last expected gain of each tree."""

    def __init__(
        self, log: PassLog, curves: Mapping[int, CostCurve], *, only_timed_sizes: bool = False, pads: bool = True
    ) -> None:
        """``curves`` hold the passes of batches by the number of slots, with such a tree in each.

        Unless the engine ``pads`` trees to the largest, they are by the rows of all trees but one.
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
            # Where trees are padded, passes of far fewer trees take less, whatever their size.
            these = range(max(fewer, slots // 2 if pads else 0) + 1, slots + 1)
            self._costs[slots] = MeasuredCosts(log, curves[slots], these, only_timed_sizes=only_timed_sizes)

    def costs(self, slots: int) -> MeasuredCosts:
        """The costs of passes with so many trees."""
        return self._costs[min((known for known in self._costs if known >= slots), default=max(self._costs))]

    def nodes(self, budgets: Sequence[SharedBudget], probs: Sequence[Probs]) -> list[int]:
        """How many nodes of these trees to verify; other trees count with their last expected gain."""
        drafting = sum(budget.drafting for budget in budgets) / len(budgets)
        self._begin_step(drafting * max(len(budgets), len(self._expected)))
        for budget, own in zip(budgets, probs, strict=True):
            self._expected[budget] = self._step, own
        others = [
            budget_key
            for budget_key, (step, _) in self._expected.items()
            if step >= self._step - 1 and budget_key not in budgets
        ]
        self._expected = {budget_key: self._expected[budget_key] for budget_key in (*budgets, *others)}
        rows = np.zeros((len(self._expected), MAX_CHOSEN_NODES))
        for row, (_, own) in zip(rows, self._expected.values(), strict=True):
            row[: len(own)] = own[:MAX_CHOSEN_NODES]
        slots = max(self.log.slots, len(rows))
        costs, overhead = self.costs(slots), budgets[0].overhead * slots
        costs.update()
        if self._outside.mean > 0:
            overhead = min(overhead, self._outside.mean)
        chosen = np.array([(budget.address, budget.largest, 0) for budget in budgets])
        first = 0 if self._pads else min(slots - 1, MAX_CHOSEN_NODES)
        choose_batch_nodes(chosen, rows, slots, first, self._pads, overhead, costs.address, self.log.passes)
        sizes = []
        for budget, own, (size, largest, paused_until) in zip(budgets, probs, chosen.tolist(), strict=True):
            budget.take(largest, paused_until)
            if paused_until:
                del self._expected[budget]
            sizes.append(min(len(own), size))
        return sizes

    def _begin_step(self, drafting: float) -> None:
        """Start a step, and measure the overhead of the last one: its time outside the pass and ``drafting``."""
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

    def __init__(self, together: SharedCosts, overhead: float = STEP_OVERHEAD) -> None:
        super().__init__(overhead, lambda: together.log.passes, together.costs(1))
        self.together, self.overhead = together, overhead
        # Compiled, or loaded, before the first step.
        given = np.array([(self._at, MAX_CHOSEN_NODES, 0)]), np.zeros((1, MAX_CHOSEN_NODES))
        choose_batch_nodes(*given, 1, 0, True, overhead, together.costs(1).address, 0)
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
        return self._max_nodes

    @property
    def drafting(self) -> float:
        """Seconds of its last draft."""
        return float(self._own["drafting"])

    def take(self, largest: int, paused_until: int) -> None:
        """Take what was chosen for its next steps."""
        self._max_nodes, self._paused_until = largest, paused_until


def choose_all_nodes(budgets: Sequence[Budget], probs: Sequence[Probs]) -> list[int]:
    """How many nodes of each tree to verify; budgets of one batch choose together."""
    shared = [budget for budget in budgets if isinstance(budget, SharedBudget)]
    if shared and len(shared) == len(budgets):
        return shared[0].together.nodes(shared, probs)
    return [budget.nodes(own) for budget, own in zip(budgets, probs, strict=True)]


@compiled
def choose_batch_nodes(
    chosen: Ints, probs: Probs, slots: int, first: int, pads: bool, overhead: float, of_costs: int, step: int
) -> None:
    """Choose for the first trees, whose records and largest useful trees are in rows of ``chosen``.

    They become the number of nodes, the largest useful tree, and the step up to which the sequence does not draft.
    ``slots`` sequences have ``first`` rows of a plain pass that nodes come after.
    """
    costs = array_at(of_costs, 1, COSTS)[0]
    trees, max_nodes = probs.shape[0], MAX_CHOSEN_NODES - first
    gain, owner, used = np.full(max_nodes + 1, float(slots)), np.zeros(max_nodes, np.int64), np.zeros(trees, np.int64)
    for nodes in range(max_nodes):
        added, best = 0.0, 0
        for tree in range(trees):
            if pads:
                added += probs[tree, nodes]
            elif used[tree] < MAX_CHOSEN_NODES and probs[tree, used[tree]] > added:
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
        choice, nodes = array_at(chosen[tree, 0], 1, BUDGET_RECORD)[0], used[tree]
        paused_until = 0
        if not tries:
            saved = probs[tree, :nodes].sum() * (plain + overhead) / slots - (cost - plain) * nodes / verified
            # A tree has few nodes that pay in a batch: it is often tried again where this takes little of the time.
            longest = retry_steps(choice, (plain + overhead) / slots) if choice.drafting > 0 else MAX_PAUSE_STEPS
            paused_until = decide_pause(choice, pays and nodes > 0, saved, longest, step)
        chosen[tree, 0], chosen[tree, 1], chosen[tree, 2] = nodes, useful_tree(nodes, chosen[tree, 1]), paused_until
