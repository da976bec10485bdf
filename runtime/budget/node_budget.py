"""Budgets: how many nodes of a draft tree to verify, fixed or chosen to maximize tokens per second."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from hdtool.runtime.config import FIXED_BUDGET, LARGEST_BUDGET
from hdtool.runtime.kernels.compiled import compiled

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
"""Seconds of a step outside its forward pass."""
CONTEXT_STEP = 64
"""Tokens by which the context grows before its cost is computed again."""
LONGEST_PAUSE = 64
"""Upper bound on the steps without drafts after drafting did not pay."""
SAVED_LEARNING_RATE = 0.1
"""Learning rate of the seconds that drafts save, for drafters with a time that counts."""
RETRY_SHARE = 0.01
"""Share of the time that may be spent on trying drafts again."""

EACH = np.arange(LARGEST_BUDGET + 1)
"""Where each number of nodes has a cost of its own, that number."""
ABOVE = np.searchsorted(PASS_SIZES, EACH + 1)
"""For each number of nodes, the index of the next larger timed size, or its own."""
ALL = np.ones(LARGEST_BUDGET + 1)
"""The share of the next larger size in the cost where that is the whole."""
PART = np.interp(EACH + 1, PASS_SIZES, np.arange(len(PASS_SIZES))) - ABOVE + 1
"""The same where costs lie between those of the sizes."""
EXACT = np.ones(LARGEST_BUDGET + 1)
"""The correction of costs that are not corrected."""

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


class _ChosenSize:
    """The number of nodes with the most expected tokens per second.

    While drafting does not pay, steps without any draft are inserted, in pauses that double each time.
    """

    def __init__(self, overhead: float, step: Callable[[], int]) -> None:
        """``overhead`` is the seconds of a step outside its pass; ``step`` returns the number of the current step."""
        self._overhead, self._step = overhead, step
        # Compiled, or loaded, before the first step.
        best_size(gains(np.empty(0)), EXACT, EXACT, EACH, ALL, overhead)
        self._most = LARGEST_BUDGET
        self._pause = 0
        self._paused_until = 0
        self._drafting = 0.0
        """Seconds of the last draft; 0 if they do not count."""
        self._saved: float | None = None
        """Moving average of the seconds that a draft saves; None after a pause."""

    @property
    def most(self) -> int:
        return 0 if self._step() < self._paused_until else self._most

    def set_draft_seconds(self, seconds: float) -> None:
        self._drafting = seconds

    def _best(self, gain: Probs, costs: Costs, correction: Costs, sizes: Sizes, shares: Shares) -> int:
        """The best number of nodes, by the expected tokens of trees with 0, 1, 2 … of them.

        A pass with so many nodes costs the seconds at its place in ``sizes``, times their correction, by its share, and
        those before them for the rest.
        """
        best, cost, plain = best_size(gain, costs, correction, sizes, shares, self._overhead)
        # In a batch a plain pass, too, yields a token for each slot.
        self._decide(best > 0, float(gain[best]) / float(gain[0]), cost, plain)
        # Nodes that will not be verified need not be drafted.
        self._most = min(LARGEST_BUDGET, max(2 * best, self._most - 1, PASS_SIZES[3]))
        return best

    def _decide(self, paid: bool, gain: float, cost: float, plain: float) -> None:
        """Decide whether to pause drafting, and for how long."""
        longest = LONGEST_PAUSE
        if self._drafting:
            saved = gain * (plain + self._overhead) - (cost + self._overhead + self._drafting)
            self._saved = saved if self._saved is None else self._saved + SAVED_LEARNING_RATE * (saved - self._saved)
            paid = self._saved > 0
            longest = max(longest, int(self._drafting / (RETRY_SHARE * (plain + self._overhead))))
        self._pause = 0 if paid else min(max(1, 2 * self._pause), longest)
        self._paused_until = self._step() + 1 + self._pause if self._pause > 2 else 0
        if self._paused_until:
            self._saved = None


class CostBudget(_ChosenSize):
    """The number of nodes with the most expected tokens per second, by a given cost curve.

    The caller sets the length of the context before each step.
    """

    def __init__(self, curve: CostCurve, overhead: float = STEP_OVERHEAD) -> None:
        super().__init__(overhead, lambda: self._steps)
        self._curve = curve
        self._steps = 0
        self.start_step(0)

    def start_step(self, context: int) -> None:
        """Set the length of the context of the next step."""
        self._steps += 1
        if self._steps == 1 or len(self._curve.contexts) > 1:
            self._costs = self._curve.of_all_sizes(LARGEST_BUDGET, context)

    def nodes(self, probs: Probs) -> int:
        return self._best(gains(probs), self._costs, EXACT, EACH, ALL)


class MeasuredBudget(_ChosenSize):
    """Like CostBudget, with costs corrected by the measured time of the target's passes."""

    def __init__(self, target: Target, curve: CostCurve, overhead: float = STEP_OVERHEAD) -> None:
        super().__init__(overhead, lambda: target.passes)
        self._target = target
        self._curve = curve
        self._correction = np.ones(len(PASS_SIZES))
        """Measured seconds of each pass size, relative to the curve."""
        self._shares = shares_of(target)
        self._seen = (target.passes, target.seconds_in_model)
        self._set_context(0)

    def nodes(self, probs: Probs) -> int:
        self._learn()
        if len(self._curve.contexts) > 1 and abs(self._target.length - self._context) >= CONTEXT_STEP:
            self._set_context(self._target.length)
        return self._best(gains(probs), self._costs, self._correction, ABOVE, self._shares)

    def _set_context(self, context: int) -> None:
        self._context = context
        self._costs = self._curve.of_passes(np.array(PASS_SIZES) - 1, np.full(len(PASS_SIZES), context))

    def _learn(self) -> None:
        """Correct the estimated costs by the last pass, if it was the only one since the last call."""
        passes, seconds, nodes = self._target.passes, self._target.seconds_in_model, self._target.nodes_of_last_pass
        if passes == self._seen[0] + 1 and self.most and 0 <= nodes <= LARGEST_BUDGET:
            size, share = ABOVE[nodes], self._shares[nodes]
            expected = self._costs * self._correction
            below = max(0, size - 1)
            ratio = (seconds - self._seen[1]) / float(share * expected[size] + (1 - share) * expected[below])
            change = min(SLOWEST, max(FASTEST, ratio)) - 1
            # A longer context slows passes of all sizes, but most of an error is specific to one size.
            self._correction *= 1 + LEARNING_RATE_OTHERS * change
            self._correction[size] *= 1 + LEARNING_RATE * share * change
            self._correction[below] *= 1 + LEARNING_RATE * (1 - share) * change
        self._seen = (passes, seconds)


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
        super().__init__(overhead, lambda: target.passes)
        self._shared, self._rows, self._each = shared, rows, overhead
        self._shares = shares_of(target)
        sizes = np.array(PASS_SIZES) - 1
        self._costs = {size: curve.of_passes(sizes, np.zeros(len(PASS_SIZES))) for size, curve in curves.items()}

    def nodes(self, probs: Probs) -> int:
        rows, mine = self._rows(), gains(probs)
        self._shared.pop(id(self), None)  # the latest are at the end
        self._shared[id(self)] = np.concatenate([mine, np.full(LARGEST_BUDGET + 1 - len(mine), mine[-1])])
        in_all = np.sum(list(self._shared.values())[-rows:], axis=0)
        self._overhead = rows * self._each
        measured = min((size for size in self._costs if size >= rows), default=max(self._costs))
        return min(len(probs), self._best(in_all, self._costs[measured], EXACT, ABOVE, self._shares))

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
def best_size(
    gain: Probs, costs: Costs, correction: Costs, sizes: Sizes, shares: Shares, overhead: float
) -> tuple[int, float, float]:
    """The number of nodes with the most expected tokens per second, and the seconds of passes with and without them."""
    plain = costs[sizes[0]] * correction[sizes[0]]
    best, highest, paid = 0, gain[0] / (plain + overhead), plain
    for nodes in range(1, len(gain)):
        above, share = sizes[nodes], shares[nodes]
        cost = share * costs[above] * correction[above] + (1 - share) * costs[above - 1] * correction[above - 1]
        rate = gain[nodes] / (cost + overhead)
        if rate > highest:
            best, highest, paid = nodes, rate, cost
    return best, paid, plain
