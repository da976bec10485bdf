"""Budgets decide how many nodes of a draft tree to verify: a fixed number, or as many as maximize throughput."""

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
    OUTDATED_RATIO,
    PASS_SIZES,
    MeasuredCosts,
    PassCosts,
    confirming_passes,
    estimated_cost,
)
from hdtool.runtime.config.budgets import FIXED_BUDGET, LARGEST_BUDGET
from hdtool.runtime.kernels.compiled import Ints, Uncopyable, array_at, compiled

if TYPE_CHECKING:
    from hdtool.runtime.budget.cost_curve import CostCurve
    from hdtool.runtime.core.engine_interface import PassLog

STEP_OVERHEAD = 2e-4
"""Initial estimate of the seconds that a step spends outside its forward pass, used until they are measured."""
OVERHEAD_LEARNING_RATE, MAX_OVERHEAD_RATIO = 0.1, 3.0
"""Learning rate of the smoothed overhead, and the largest multiple of the mean that a single step may contribute."""
MAX_PAUSE_STEPS = 64
"""Longest pause in steps while drafting does not pay, for drafters whose own time is not counted as a cost."""
SAVED_LEARNING_RATE = 0.1
"""Learning rate of the average seconds that a draft saves, for drafters whose own time is counted as a cost."""
RETRY_SHARE = 0.01
"""Largest share of the time that may be spent on retrying drafts."""

CONFIRMED_PASSES = 3.0
"""Number of passes that must confirm a cost before it can rule drafting in or out without a trial."""
WORTH_TRYING, CLEARLY_FASTER = 1.2, 1.5
"""Thresholds for trying a pass whose cost is unconfirmed. Drafts that do not seem to pay are tried if they multiply the
expected tokens of a step by the first factor; a plain pass is tried unless drafts seem faster by the second factor."""
MIN_DRAFTED_NODES = PASS_SIZES[3]
"""Smallest ``max_nodes`` of a budget that chooses by cost, other than 0 while drafting is paused."""
Probs = npt.NDArray[np.floating[Any]]


class Budget(Protocol):
    """Decides how many nodes of a draft tree to verify, given their probabilities of acceptance in descending order."""

    @property
    def max_nodes(self) -> int:
        """Maximum number of nodes worth drafting in this step; 0 if the step should not draft."""
        ...

    def choose_size(self, probs: Probs) -> int:
        """Return how many of the most probable nodes to verify."""
        ...

    def set_draft_seconds(self, seconds: float) -> None:
        """Set how many seconds the current draft took, for drafters whose own time is counted as a cost."""
        ...


@dataclass(frozen=True)
class FixedBudget:
    """Verifies all nodes, up to a fixed number."""

    max_nodes: int = FIXED_BUDGET

    def choose_size(self, probs: Probs) -> int:
        return min(len(probs), self.max_nodes)

    def set_draft_seconds(self, seconds: float) -> None:
        pass


BUDGET_RECORD = np.dtype(
    [
        ("overhead", np.float64),  # seconds of a step outside its pass
        ("costs", np.int64),  # address of a ``COSTS`` record
        ("draft_seconds", np.float64),  # seconds of the last draft; 0 if the drafter's own time does not count
        ("saved_seconds", np.float64),  # moving average of the seconds that a draft saves; NaN after a pause
        ("pause", np.int64),
    ],
    align=True,
)


class SmoothedSeconds:
    """Moving average of durations, in which a single interrupted step has limited influence."""

    def __init__(self, expected: float = 0.0) -> None:
        """``expected`` counts as the first observation unless it is 0."""
        self.mean = expected
        self._observed = int(expected > 0)

    def observe(self, seconds: float) -> None:
        if self.mean:  # a mean of 0 would clip all later observations to 0
            seconds = min(seconds, MAX_OVERHEAD_RATIO * self.mean)
        self._observed += 1
        self.mean += max(OVERHEAD_LEARNING_RATE, 1 / self._observed) * (seconds - self.mean)


class AdaptiveBudget(Uncopyable):
    """A budget that chooses the number of nodes with the most expected tokens per second.

    While drafting does not pay, it is paused; each pause lasts twice as many steps as the one before.
    """

    def __init__(self, overhead: float, step: Callable[[], int], costs: PassCosts) -> None:
        """Choose based on ``costs`` and ``overhead``, the seconds that a step spends outside its pass.

        ``step`` returns the number of the current step.
        """
        self._step = step
        self._memory = np.zeros(1, BUDGET_RECORD)
        self._at = self._memory.ctypes.data
        self._record: Any = self._memory[0]
        self._record["overhead"], self._record["saved_seconds"] = overhead, np.nan
        self._use(costs)
        self._max_nodes = MAX_CHOSEN_NODES
        self._paused_until = 0
        # Compile ``choose_nodes``, or load it from the cache, before the first step.
        choose_nodes(self._at, np.empty(0), 0, self._max_nodes)
        self._record["pause"] = 0

    def _use(self, costs: PassCosts) -> None:
        self._costs = costs
        self._record["costs"] = costs.address

    @property
    def max_nodes(self) -> int:
        if self._step() < self._paused_until:
            self._learn()  # in a pause, no size is chosen and nothing else learns from the plain passes
            return 0
        return self._max_nodes

    def _learn(self) -> None:
        """Correct the costs by the last pass, if they are measured."""

    def set_draft_seconds(self, seconds: float) -> None:
        self._record["draft_seconds"] = seconds

    def choose_size(self, probs: Probs) -> int:
        best, self._max_nodes, self._paused_until = choose_nodes(self._at, probs, self._step(), self._max_nodes)
        return best


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
        self._log = log
        self._passes, self._call_time = log.passes, time.perf_counter()
        """Number of passes at the last call of ``choose_size``, and the time of that call."""
        self._outside = SmoothedSeconds(overhead)

    def _learn(self) -> None:
        self._costs.update()

    def choose_size(self, probs: Probs) -> int:
        self._learn()
        self._measure_overhead()
        return super().choose_size(probs)

    def _measure_overhead(self) -> None:
        """Measure the last step's time outside its forward pass, if only one pass has run since the last call."""
        log, now = self._log, time.perf_counter()
        if log.passes == self._passes + 1 and self.max_nodes and log.nodes >= 0:
            around = now - self._call_time - log.last_seconds - self._record["draft_seconds"]
            self._outside.observe(max(0.0, around))
            self._record["overhead"] = self._outside.mean
        self._passes, self._call_time = log.passes, now


@compiled
def expected_tokens(probs: Probs) -> Probs:
    """Return the expected tokens of a step that verifies the first 0, 1, 2 … nodes, including the bonus token."""
    gain = np.ones(min(len(probs), MAX_CHOSEN_NODES) + 1)
    total = 0.0
    for node in range(len(gain) - 1):
        total += probs[node]
        gain[node + 1] = 1.0 + total
    return gain


@compiled
def choose_nodes(at: int, probs: Probs, step: int, max_nodes: int) -> tuple[int, int, int]:
    """Choose how many nodes with these probabilities to verify in this step, using the budget record at ``at``.

    Return this number, the new ``max_nodes`` for the next steps, and the step in which drafting resumes (0: no pause).
    """
    choice = array_at(at, 1, BUDGET_RECORD)[0]
    costs = array_at(choice.costs, 1, COSTS)[0]
    gain = expected_tokens(probs)
    chosen, pays, tries, cost, plain = best_size(gain, 0, choice.overhead, costs)
    max_nodes = next_max_nodes(chosen, max_nodes)
    if tries:
        return chosen, max_nodes, 0
    saved = gain[chosen] * (plain + choice.overhead) - (cost if pays else plain) - choice.overhead
    max_pause = max(MAX_PAUSE_STEPS, retry_steps(choice, plain + choice.overhead))
    return chosen, max_nodes, decide_pause(choice, pays, saved, max_pause, step)


@compiled
def retry_steps(choice: Any, plain: float) -> int:
    """Return after how many steps of ``plain`` seconds each a retry of drafts takes ``RETRY_SHARE`` of the time."""
    return int(choice.draft_seconds / (RETRY_SHARE * plain))


@compiled
def next_max_nodes(chosen: int, max_nodes: int) -> int:
    """Return the maximum number of nodes for the next drafts: drafting nodes that are never verified wastes time."""
    return min(MAX_CHOSEN_NODES, max(2 * chosen, max_nodes - 1, MIN_DRAFTED_NODES))


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


@compiled
def decide_pause(choice: Any, paid: bool, saved: float, max_pause: int, step: int) -> int:
    """Decide whether to pause drafting, given the seconds that a draft saves before the drafter's own time is deducted.

    Return the step in which drafting resumes, or 0 if drafting is not paused.
    """
    if choice.draft_seconds > 0:
        saved -= choice.draft_seconds
        choice.saved_seconds = (
            saved
            if np.isnan(choice.saved_seconds)
            else choice.saved_seconds + SAVED_LEARNING_RATE * (saved - choice.saved_seconds)
        )
        paid = choice.saved_seconds > 0
    choice.pause = 0 if paid else min(max(1, 2 * choice.pause), max_pause)
    if choice.pause <= 2:
        return 0
    choice.saved_seconds = np.nan
    return int(step + 1 + choice.pause)


class SharedCosts:
    """Costs of batched passes, and the latest probabilities of each tree, shared by the budgets of a batch."""

    def __init__(
        self, log: PassLog, curves: Mapping[int, CostCurve], *, only_timed_sizes: bool = False, pads: bool = True
    ) -> None:
        """``curves`` maps a number of slots to the cost curve of passes over so many trees, by the size of each tree.

        Without ``pads``, the engine does not pad trees to the largest, and a size is one less than the total number of
        rows of all trees.
        """
        self.log, self._pads = log, pads
        self._expected: dict[SharedBudget, tuple[int, Probs]] = {}
        """Maps each sequence's budget to the step of its latest draft and the probabilities of this draft's nodes."""
        self._outside = SmoothedSeconds()
        self._step, self._passes, self._call_time = 0, -1, 0.0
        """Number of the current step, and the number of passes and the time when this step began."""
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

    def choose_sizes(self, budgets: Sequence[SharedBudget], probs: Sequence[Probs]) -> list[int]:
        """Return how many nodes of each budget's tree to verify.

        The other sequences of the batch count with the probabilities of their latest trees.
        """
        drafting = sum(budget.draft_seconds for budget in budgets) / len(budgets)
        self._begin_step(drafting * max(len(budgets), len(self._expected)))
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
        costs.update()
        if self._outside.mean > 0:
            overhead = min(overhead, self._outside.mean)
        chosen = np.array([(budget.address, budget.unpaused_max_nodes, 0) for budget in budgets])
        first = 0 if self._pads else min(slots - 1, MAX_CHOSEN_NODES)
        choose_batch_nodes(chosen, rows, slots, first, self._pads, overhead, costs.address, self.log.passes)
        sizes = []
        for budget, tree_probs, (size, max_nodes, paused_until) in zip(budgets, probs, chosen.tolist(), strict=True):
            budget.apply_choice(max_nodes, paused_until)
            if paused_until:
                del self._expected[budget]
            sizes.append(min(len(tree_probs), size))
        return sizes

    def _begin_step(self, drafting: float) -> None:
        """Begin a step if a pass has run; measure what the last step took besides its pass and its drafts."""
        log, now = self.log, time.perf_counter()
        if log.passes == self._passes:
            return
        if log.passes == self._passes + 1 and log.nodes >= 0:
            self._outside.observe(max(0.0, now - self._call_time - log.last_seconds - drafting))
        self._passes, self._call_time = log.passes, now
        self._step += 1


class SharedBudget(AdaptiveBudget):
    """The budget of one sequence in a batch; the budgets of a batch choose together.

    If the engine pads trees, all trees get the same size, chosen by the sum of their expected tokens. Otherwise the
    most probable nodes of all trees are verified.
    """

    def __init__(self, shared_costs: SharedCosts, overhead: float = STEP_OVERHEAD) -> None:
        super().__init__(overhead, lambda: shared_costs.log.passes, shared_costs.costs(1))
        self.shared_costs, self.overhead = shared_costs, overhead
        # Compile ``choose_batch_nodes``, or load it from the cache, before the first step.
        given = np.array([(self._at, MAX_CHOSEN_NODES, 0)]), np.zeros((1, MAX_CHOSEN_NODES))
        choose_batch_nodes(*given, 1, 0, True, overhead, shared_costs.costs(1).address, 0)
        self._record["pause"] = 0

    def _learn(self) -> None:
        log = self.shared_costs.log
        self.shared_costs.costs(max(1, log.slots)).update()

    def choose_size(self, probs: Probs) -> int:
        return self.shared_costs.choose_sizes([self], [probs])[0]

    @property
    def address(self) -> int:
        """Address of the budget's record."""
        return self._at

    @property
    def unpaused_max_nodes(self) -> int:
        """Maximum number of nodes worth drafting in a step, ignoring pauses."""
        return self._max_nodes

    @property
    def draft_seconds(self) -> float:
        """Seconds that the last draft took."""
        return float(self._record["draft_seconds"])

    def apply_choice(self, max_nodes: int, paused_until: int) -> None:
        """Use these values, chosen by ``choose_batch_nodes``, from the next step on."""
        self._max_nodes, self._paused_until = max_nodes, paused_until


def choose_all_nodes(budgets: Sequence[Budget], probs: Sequence[Probs]) -> list[int]:
    """Return how many nodes of each tree to verify; the budgets of one batch choose together."""
    shared = [budget for budget in budgets if isinstance(budget, SharedBudget)]
    if shared and len(shared) == len(budgets):
        return shared[0].shared_costs.choose_sizes(shared, probs)
    return [budget.choose_size(tree_probs) for budget, tree_probs in zip(budgets, probs, strict=True)]


@compiled
def choose_batch_nodes(
    chosen: Ints, probs: Probs, slots: int, first: int, pads: bool, overhead: float, of_costs: int, step: int
) -> None:
    """Choose the sizes of the first ``len(chosen)`` trees in a batch, using the ``COSTS`` record at ``of_costs``.

    ``probs`` has a row for each tree. Each row of ``chosen`` holds the address of a budget record and its
    ``max_nodes``, and is overwritten with the number of nodes, the new ``max_nodes`` and the step in which drafting
    resumes (0: no pause). A pass over ``slots`` sequences without nodes has ``first`` rows besides the first root.
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
            # In a batch, few nodes of a tree pay, so a fast drafter is retried often.
            max_pause = retry_steps(choice, (plain + overhead) / slots) if choice.draft_seconds > 0 else MAX_PAUSE_STEPS
            paused_until = decide_pause(choice, pays and nodes > 0, saved, max_pause, step)
        chosen[tree, 0], chosen[tree, 1], chosen[tree, 2] = nodes, next_max_nodes(nodes, chosen[tree, 1]), paused_until
