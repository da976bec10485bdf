"""Budgets: how many nodes of a draft tree to verify, fixed or chosen to maximize tokens per second."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from hdtool.runtime.config import FIXED_BUDGET, LARGEST_BUDGET
from hdtool.runtime.kernels.compiled import compiled
from hdtool.runtime.kernels.memory.no_copy import Pinned
from hdtool.runtime.kernels.memory.raw_memory import array_at

if TYPE_CHECKING:
    from hdtool.runtime.budget.cost_curve import CostCurve
    from hdtool.runtime.model.target import Target

PASS_SIZES = (1, 2, 4, 8, 12, 16, 20, 24, 32, 48, LARGEST_BUDGET + 1)
"""Sizes of forward passes that are timed, the root included. Captured steps have these sizes, so others cost as much as
the next larger one; otherwise they cost what lies between."""
LEARNING_RATE, LEARNING_RATE_OTHERS = 0.05, 0.01
"""Learning rates of the estimated cost after a step: for passes of its size, and for passes of other sizes."""
SLOWEST, FASTEST = 2.0, 0.5
"""Bounds on the ratio of measured to estimated seconds that one step may contribute."""
STEP_OVERHEAD = 2e-4
"""Seconds of a step without a draft outside its forward pass, until they are measured."""
SMOOTHING, MOST_ABOVE = 0.1, 3.0
"""Learning rate of the seconds outside of passes, and how many times their average a single step may count."""
CONTEXT_STEP = 64
"""Tokens by which the context grows before its cost is computed again."""
LONGEST_PAUSE = 64
"""Upper bound on the steps without drafts after drafting did not pay."""
SAVED_LEARNING_RATE = 0.1
"""Learning rate of the seconds that drafts save, for drafters with a time that counts."""
RETRY_SHARE = 0.01
"""Share of the time that may be spent on trying drafts again."""

FEWEST_DRAFTED = PASS_SIZES[3]
"""Nodes that are drafted at least, if any are."""
EACH = np.arange(LARGEST_BUDGET + 1)
"""Where each number of nodes has a cost of its own, that number."""
ABOVE = np.searchsorted(PASS_SIZES, EACH + 1)
"""For each number of nodes, the index of the next larger timed size, or its own."""
ALL = np.ones(LARGEST_BUDGET + 1)
"""The share of the next larger size in the cost where that is the whole."""
PART = np.interp(EACH + 1, PASS_SIZES, np.arange(len(PASS_SIZES))) - ABOVE + 1
"""The same where costs lie between those of the sizes."""

Probs = npt.NDArray[np.floating[Any]]
Costs = npt.NDArray[np.float64]
Sizes = npt.NDArray[np.int64]
Shares = npt.NDArray[np.float64]


class Budget(Protocol):
    """Decides how many nodes of a tree are verified; nodes are sorted by their probability of acceptance."""

    @property
    def most(self) -> int:
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

    most: int = FIXED_BUDGET

    def nodes(self, probs: Probs) -> int:
        return min(len(probs), self.most)

    def set_draft_seconds(self, seconds: float) -> None:
        pass


CHOICE = np.dtype(
    [
        ("overhead", np.float64),  # seconds of a step outside its pass
        # A pass with some number of nodes costs the seconds at its place in ``sizes``, times their correction, by its
        # share, and those before them for the rest.
        ("costs", np.float64, LARGEST_BUDGET + 1),
        ("corrections", np.float64, LARGEST_BUDGET + 1),
        ("sizes", np.int64, LARGEST_BUDGET + 1),
        ("shares", np.float64, LARGEST_BUDGET + 1),
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
        if self._observed:
            seconds = min(seconds, MOST_ABOVE * self.mean)
        self._observed += 1
        self.mean += max(SMOOTHING, 1 / self._observed) * (seconds - self.mean)


class _ChosenSize(Pinned):
    """The number of nodes with the most expected tokens per second.

    While drafting does not pay, steps without any draft are inserted, in pauses that double each time.
    """

    def __init__(self, overhead: float, step: Callable[[], int], sizes: Sizes, shares: Shares) -> None:
        """``overhead`` is the seconds of a step outside its pass; ``step`` returns the number of the current step.

        ``sizes`` and ``shares`` are the places of numbers of nodes among the costs.
        """
        self._step = step
        self._choice = np.zeros(1, CHOICE)
        self._at = self._choice.ctypes.data
        self._own: Any = self._choice[0]
        self._own["overhead"], self._own["corrections"], self._own["saved"] = overhead, 1.0, np.nan
        self._own["costs"], self._own["sizes"], self._own["shares"] = 1.0, sizes, shares
        self._most = LARGEST_BUDGET
        self._paused_until = 0
        # Compiled, or loaded, before the first step.
        choose(self._at, np.empty(0), 0, self._most)
        choose_for_all(self._at, np.ones(1), 0, self._most)
        self._own["pause"] = 0

    @property
    def most(self) -> int:
        return 0 if self._step() < self._paused_until else self._most

    def set_draft_seconds(self, seconds: float) -> None:
        self._own["drafting"] = seconds

    def nodes(self, probs: Probs) -> int:
        best, self._most, self._paused_until = choose(self._at, probs, self._step(), self._most)
        return best


class CostBudget(_ChosenSize):
    """The number of nodes with the most expected tokens per second, by a given cost curve.

    The caller sets the length of the context before each step.
    """

    def __init__(self, curve: CostCurve, overhead: float = STEP_OVERHEAD) -> None:
        super().__init__(overhead, lambda: self._steps, EACH, ALL)
        self._curve = curve
        self._steps = 0
        self.start_step(0)

    def set_draft_seconds(self, seconds: float) -> None:
        """Ignored: what a cost curve decides must not depend on how busy the machine is."""

    def start_step(self, context: int) -> None:
        """Set the length of the context of the next step."""
        self._steps += 1
        if self._steps == 1 or len(self._curve.contexts) > 1:
            self._own["costs"] = self._curve.of_all_sizes(LARGEST_BUDGET, context)


class MeasuredBudget(_ChosenSize):
    """Like CostBudget, with costs corrected by the measured time of the target's passes and of what is between them."""

    def __init__(self, target: Target, curve: CostCurve, overhead: float = STEP_OVERHEAD) -> None:
        super().__init__(overhead, lambda: target.passes, ABOVE, shares_of(target))
        self._target = target
        self._curve = curve
        self._passes, self._seconds = target.passes, target.seconds_in_model
        """Those of the target at the last call."""
        self._called = time.perf_counter()
        self._outside = SmoothedSeconds(overhead)
        learn_cost(self._at, 0, 1.0)  # compiles it; costs are still 1, so nothing is learned
        self._set_context(0)

    def nodes(self, probs: Probs) -> int:
        self._learn()
        if len(self._curve.contexts) > 1 and abs(self._target.length - self._context) >= CONTEXT_STEP:
            self._set_context(self._target.length)
        return super().nodes(probs)

    def _set_context(self, context: int) -> None:
        self._context = context
        costs = self._curve.of_passes(np.array(PASS_SIZES) - 1, np.full(len(PASS_SIZES), context))
        self._own["costs"][: len(costs)] = costs

    def _learn(self) -> None:
        """Correct the estimated costs by the last step, if it was the only one since the last call."""
        passes, seconds, nodes = self._target.passes, self._target.seconds_in_model, self._target.nodes_of_last_pass
        now = time.perf_counter()
        if passes == self._passes + 1 and self.most and 0 <= nodes <= LARGEST_BUDGET:
            in_pass = seconds - self._seconds
            learn_cost(self._at, nodes, in_pass)
            self._outside.observe(max(0.0, now - self._called - in_pass - self._own["drafting"]))
            self._own["overhead"] = self._outside.mean
        self._passes, self._seconds, self._called = passes, seconds, now


class SharedBudget(_ChosenSize):
    """Like CostBudget for a batch, where one pass verifies all trees and costs as much as the largest of them.

    So all trees get the same size, chosen by the sum of their expected tokens; each budget shares its latest ones.
    """

    def __init__(
        self,
        target: Target,
        curves: Mapping[int, CostCurve],
        shared: dict[int, Probs],
        rows: Callable[[], int],
        overhead: float = STEP_OVERHEAD,
    ) -> None:
        """``shared`` is common to the budgets of a batch.

        ``curves`` hold the passes of batches with such a tree in each slot, by the number of slots; ``rows`` returns
        how many of them are in use.
        """
        super().__init__(overhead, lambda: target.passes, ABOVE, shares_of(target))
        self._shared, self._rows, self._each = shared, rows, overhead
        sizes = np.array(PASS_SIZES) - 1
        self._costs = {size: curve.of_passes(sizes, np.zeros(len(PASS_SIZES))) for size, curve in curves.items()}

    def nodes(self, probs: Probs) -> int:
        rows, mine = self._rows(), gains(probs)
        self._shared.pop(id(self), None)  # the latest are at the end
        self._shared[id(self)] = np.concatenate([mine, np.full(LARGEST_BUDGET + 1 - len(mine), mine[-1])])
        in_all = np.sum(list(self._shared.values())[-rows:], axis=0)
        self._own["overhead"] = rows * self._each
        costs = self._costs[min((size for size in self._costs if size >= rows), default=max(self._costs))]
        self._own["costs"][: len(costs)] = costs
        best, self._most, self._paused_until = choose_for_all(self._at, in_all, self._step(), self._most)
        return min(len(probs), best)

    def set_draft_seconds(self, seconds: float) -> None:
        # All slots draft before the shared pass.
        super().set_draft_seconds(seconds * max(1, min(self._rows(), len(self._shared))))


def shares_of(target: Target) -> Shares:
    """How much of the cost of a pass is that of the next larger timed size, by its number of nodes."""
    return ALL if target.captures else PART


@compiled
def gains(probs: Probs) -> Probs:
    """Expected tokens per step of trees of the first 0, 1, 2 … nodes: the bonus token plus the probabilities."""
    gain = np.ones(min(len(probs), LARGEST_BUDGET) + 1)
    total = 0.0
    for node in range(len(gain) - 1):
        total += probs[node]
        gain[node + 1] = 1.0 + total
    return gain


@compiled
def choose(at: int, probs: Probs, step: int, most: int) -> tuple[int, int, int]:
    """How many nodes with these probabilities to verify by the record at an address, in this step.

    Returns it with the largest useful tree of the next steps, and the step up to which none drafts.
    """
    return choose_for_all(at, gains(probs), step, most)


@compiled
def choose_for_all(at: int, gain: Probs, step: int, most: int) -> tuple[int, int, int]:
    """The same by the expected tokens of trees with 0, 1, 2 … nodes."""
    own = array_at(at, 1, CHOICE)[0]
    best, cost, plain = _best_size(gain, own)
    # In a batch a plain pass, too, yields a token for each slot.
    paused_until = _decide(own, best > 0, gain[best] / gain[0], cost, plain, step)
    # Nodes that will not be verified need not be drafted.
    return best, min(LARGEST_BUDGET, max(2 * best, most - 1, FEWEST_DRAFTED)), paused_until


@compiled
def _decide(own: Any, paid: bool, gain: float, cost: float, plain: float, step: int) -> int:
    """Decide whether to pause drafting; the step until which to pause, or 0."""
    longest = LONGEST_PAUSE
    if own.drafting > 0:
        saved = gain * (plain + own.overhead) - (cost + own.overhead + own.drafting)
        own.saved = saved if np.isnan(own.saved) else own.saved + SAVED_LEARNING_RATE * (saved - own.saved)
        paid = own.saved > 0
        longest = max(longest, int(own.drafting / (RETRY_SHARE * (plain + own.overhead))))
    own.pause = 0 if paid else min(max(1, 2 * own.pause), longest)
    if own.pause <= 2:
        return 0
    own.saved = np.nan
    return int(step + 1 + own.pause)


@compiled
def _best_size(gain: Probs, own: Any) -> tuple[int, float, float]:
    """The number of nodes with the most expected tokens per second, and the seconds of passes with and without them."""
    plain = _cost_of(own, 0)
    for nodes in range(1, len(gain)):
        # While drafts pay, no pass without them corrects its cost. It takes no longer than those that are measured.
        plain = min(plain, _cost_of(own, nodes))
    best, highest, paid = 0, gain[0] / (plain + own.overhead), plain
    for nodes in range(1, len(gain)):
        cost = _cost_of(own, nodes)
        rate = gain[nodes] / (cost + own.overhead)
        if rate > highest:
            best, highest, paid = nodes, rate, cost
    return best, paid, plain


@compiled
def _cost_of(own: Any, nodes: int) -> float:
    """The estimated seconds of a pass with so many nodes."""
    size, share = own.sizes[nodes], own.shares[nodes]
    below = max(0, size - 1)
    cost = share * own.costs[size] * own.corrections[size]
    return cost + (1 - share) * own.costs[below] * own.corrections[below]  # type: ignore[no-any-return]


@compiled
def learn_cost(at: int, nodes: int, seconds: float) -> None:
    """Correct the costs by those of a pass with so many nodes."""
    own = array_at(at, 1, CHOICE)[0]
    size, share = own.sizes[nodes], own.shares[nodes]
    below, expected = max(0, size - 1), _cost_of(own, nodes)
    change = min(SLOWEST, max(FASTEST, seconds / expected)) - 1 if expected > 0 else 0.0
    # A longer context slows passes of all sizes, but most of an error is specific to one size.
    for other in range(LARGEST_BUDGET + 1):
        own.corrections[other] *= 1 + LEARNING_RATE_OTHERS * change
    own.corrections[size] *= 1 + LEARNING_RATE * share * change
    own.corrections[below] *= 1 + LEARNING_RATE * (1 - share) * change
