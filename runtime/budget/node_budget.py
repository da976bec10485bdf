"""Budgets: how many nodes of a draft tree to verify, fixed or chosen to maximize tokens per second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from hdtool.runtime.config import FIXED_BUDGET, LARGEST_BUDGET

if TYPE_CHECKING:
    from hdtool.runtime.budget.cost_curve import CostCurve
    from hdtool.runtime.model.target import Target

PASS_SIZES = (1, 2, 4, 8, 12, 16, 20, 24, 32, 48, LARGEST_BUDGET + 1)
"""Sizes of forward passes that are timed, the root included. Other sizes cost as much as the next larger one."""
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

SIZE_OF = np.searchsorted(PASS_SIZES, np.arange(PASS_SIZES[-1]) + 1)
"""For each number of nodes, the index of the pass size that it costs."""

Probs = npt.NDArray[np.floating[Any]]
Costs = npt.NDArray[np.float64]


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

    def _best(self, gain: Probs, costs: Costs) -> int:
        """The best number of nodes, by the expected tokens and the seconds of passes with 0, 1, 2 … of them."""
        rate = gain / (costs[: len(gain)] + self._overhead)
        best = int(rate.argmax())
        # In a batch a plain pass, too, yields a token for each slot.
        self._decide(bool(best), gain[best] / gain[0], costs[best], costs[0])
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
        return self._best(gains(probs), self._costs)


class MeasuredBudget(_ChosenSize):
    """Like CostBudget, with costs corrected by the measured time of the target's passes."""

    def __init__(self, target: Target, curve: CostCurve, overhead: float = STEP_OVERHEAD) -> None:
        super().__init__(overhead, lambda: target.passes)
        self._target = target
        self._curve = curve
        self._correction = np.ones(len(PASS_SIZES))
        """Measured seconds of each pass size, relative to the curve."""
        self._sent = 0
        self._seen = (target.passes, target.seconds_in_model)
        self._set_context(0)

    def nodes(self, probs: Probs) -> int:
        self._learn()
        if len(self._curve.contexts) > 1 and abs(self._target.length - self._context) >= CONTEXT_STEP:
            self._set_context(self._target.length)
        self._sent = self._best(gains(probs), (self._costs * self._correction)[SIZE_OF])
        return self._sent

    def _set_context(self, context: int) -> None:
        self._context = context
        self._costs = self._curve.of_passes(np.array(PASS_SIZES) - 1, np.full(len(PASS_SIZES), context))

    def _learn(self) -> None:
        """Correct the estimated costs by the last pass, if it was the only one since the last call."""
        passes, seconds = self._target.passes, self._target.seconds_in_model
        if passes == self._seen[0] + 1 and self.most:
            size = SIZE_OF[self._sent]
            ratio = np.clip((seconds - self._seen[1]) / (self._costs[size] * self._correction[size]), FASTEST, SLOWEST)
            # A longer context slows passes of all sizes, but most of an error is specific to one size.
            self._correction *= 1 + LEARNING_RATE_OTHERS * (ratio - 1)
            self._correction[size] *= 1 + LEARNING_RATE * (ratio - 1)
        self._seen = (passes, seconds)


class SharedBudget(_ChosenSize):
    """Like CostBudget for a batch, where one pass verifies all trees and costs as much as the largest of them.

    So all trees get the same size, chosen by the sum of their expected tokens; each budget shares its latest ones.
    """

    def __init__(
        self, target: Target, curve: CostCurve, shared: dict[int, Probs], batch: int, overhead: float = STEP_OVERHEAD
    ) -> None:
        """``shared`` is common to the budgets of a batch; ``curve`` holds passes with such a tree in each slot."""
        super().__init__(batch * overhead, lambda: target.passes)
        self._shared = shared
        self._costs = curve.of_passes(np.array(PASS_SIZES) - 1, np.zeros(len(PASS_SIZES)))[SIZE_OF]

    def nodes(self, probs: Probs) -> int:
        mine = gains(probs)
        self._shared[id(self)] = np.concatenate([mine, np.full(LARGEST_BUDGET + 1 - len(mine), mine[-1])])
        in_all = np.sum(list(self._shared.values()), axis=0)
        return min(len(probs), self._best(in_all, self._costs))

    def set_draft_seconds(self, seconds: float) -> None:
        # All slots draft before the shared pass.
        super().set_draft_seconds(seconds * max(1, len(self._shared)))


def gains(probs: Probs) -> Probs:
    """Expected tokens per step of trees of the first 0, 1, 2 … nodes: the bonus token plus the probabilities."""
    return np.concatenate([[1.0], 1.0 + np.cumsum(probs[:LARGEST_BUDGET])])
