"""How many nodes of a draft tree are worth their share of the forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from hdtool.runtime.config import FIXED_BUDGET, LARGEST_BUDGET

if TYPE_CHECKING:
    from hdtool.runtime.cost import CostCurve
    from hdtool.runtime.target import Target

ROWS = (1, 2, 4, 8, 12, 16, 20, 24, 32, 48, LARGEST_BUDGET + 1)
"""Sizes of forward passes that are timed: nodes and the root. What lies between costs as much as the next larger."""
LEARNING, LEARNING_OF_OTHERS = 0.05, 0.01
"""How far one step of the conversation moves what a pass of its size, and of all others, is thought to cost."""
SLOWEST, FASTEST = 2.0, 0.5
"""No single step is believed to have been further off."""
AROUND = 2e-4
"""Seconds that a step takes besides its forward pass."""
MOVED = 64
"""Tokens by which a context grows before the cost behind it is looked up again."""
LONGEST_REST = 64
"""Steps without a draft, at most, where drafting was not worth it before."""

Odds = npt.NDArray[np.floating[Any]]
Costs = npt.NDArray[np.float64]


class Budget(Protocol):
    """Cuts a tree whose nodes are sorted by the odds that the target will take them."""

    @property
    def most(self) -> int:
        """Nodes that no tree needs to exceed; 0 means that drafting is not worth its time now."""
        ...

    def nodes(self, odds: Odds) -> int:
        """How many of the best nodes to send."""
        ...


@dataclass(frozen=True)
class FixedBudget:
    """As many nodes as there are, up to a number that somebody chose."""

    most: int = FIXED_BUDGET

    def nodes(self, odds: Odds) -> int:
        return min(len(odds), self.most)


class CostBudget:
    """The number of nodes that brings the most tokens for the time, by what passes are known to cost.

    Whoever decodes says before each step how long the context is.
    """

    def __init__(self, curve: CostCurve, around: float = AROUND) -> None:
        self._curve = curve
        self._choice = _Choice(around)
        self._steps = 0
        self.hear(0)

    def hear(self, context: int) -> None:
        """The next step is drafted behind a context of so many tokens."""
        self._steps += 1
        if self._steps == 1 or len(self._curve.contexts) > 1:
            self._costs = self._curve.of_all_sizes(LARGEST_BUDGET, context)

    @property
    def most(self) -> int:
        return self._choice.most(self._steps)

    def nodes(self, odds: Odds) -> int:
        return self._choice.nodes(odds, self._costs, self._steps)


class MeasuredBudget:
    """The same on a target, whose passes correct what they were measured to cost.

    In a batch all trees go into one pass, which costs what the largest takes. Each answer weighs its own gain
    against that, as if the others sent as much; what the pass then took says nothing of one tree alone, so that
    nothing is corrected.
    """

    def __init__(self, target: Target, curve: CostCurve, around: float = AROUND, *, batch: int = 1) -> None:
        """``curve`` holds the cost of passes with a tree of each size in every seat of the batch."""
        self._target = target
        self._curve = curve
        self._choice = _Choice(batch * around)
        self._learns = batch == 1
        self._off = np.ones(len(ROWS))
        """How far off the curve passes of each size are."""
        self._bin = np.searchsorted(ROWS, np.arange(ROWS[-1]) + 1)
        """For each number of nodes, which of the sizes it costs."""
        self._sent = 0
        self._seen = (target.passes, target.seconds_in_model)
        self._stand_at(0)

    @property
    def most(self) -> int:
        return self._choice.most(self._target.passes)

    def nodes(self, odds: Odds) -> int:
        if self._learns:
            self._learn()
            if len(self._curve.contexts) > 1 and abs(self._target.length - self._context) >= MOVED:
                self._stand_at(self._target.length)
        self._sent = self._choice.nodes(odds, (self._costs * self._off)[self._bin], self._target.passes)
        return self._sent

    def _stand_at(self, context: int) -> None:
        self._context = context
        self._costs = self._curve.of_passes(np.array(ROWS) - 1, np.full(len(ROWS), context))

    def _learn(self) -> None:
        """Correct what a pass is thought to cost by the last one, if it was the only one since then."""
        passes, seconds = self._target.passes, self._target.seconds_in_model
        if passes == self._seen[0] + 1 and self._choice.most(passes):
            size = self._bin[self._sent]
            off = np.clip((seconds - self._seen[1]) / (self._costs[size] * self._off[size]), FASTEST, SLOWEST)
            # A longer context slows passes of all sizes, but most of an error is this size's own.
            self._off *= 1 + LEARNING_OF_OTHERS * (off - 1)
            self._off[size] *= 1 + LEARNING * (off - 1)
        self._seen = (passes, seconds)


class _Choice:
    """How many nodes pay, given what passes cost.

    A tree of k nodes brings one token and, on average, the sum of their odds; ``around`` is what a step
    takes besides its forward pass. Where drafting does not pay even its own time is saved, for longer each
    time; a step is known by its number.
    """

    def __init__(self, around: float) -> None:
        self._around = around
        self._most = LARGEST_BUDGET
        self._rest = 0
        self._asleep_until = 0

    def most(self, step: int) -> int:
        return 0 if step < self._asleep_until else self._most

    def nodes(self, odds: Odds, costs: Costs, step: int) -> int:
        """The best number of nodes; ``costs`` are the seconds of a pass with 0, 1, 2 … of them."""
        gain = np.concatenate([[1.0], 1.0 + np.cumsum(odds[:LARGEST_BUDGET])])
        rate = gain / (costs[: len(gain)] + self._around)
        best = int(rate.argmax())
        self._rest = 0 if best else min(max(1, 2 * self._rest), LONGEST_REST)
        self._asleep_until = step + 1 + self._rest if self._rest > 2 else 0
        # Nodes that are never sent need not be grown.
        self._most = min(LARGEST_BUDGET, max(2 * best, self._most - 1, ROWS[3]))
        return best
