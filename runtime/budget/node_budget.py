"""How many nodes of a draft tree are worth their share of the forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from hdtool.runtime.config import FIXED_BUDGET, LARGEST_BUDGET

if TYPE_CHECKING:
    from hdtool.runtime.budget.cost_curve import CostCurve
    from hdtool.runtime.model.target import Target

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
SAVED_LEARNING = 0.1
"""How far one draft moves what drafts are thought to save, where they take time themselves."""
TRYING = 0.01
"""Share of the time that may go into drafts which have not paid."""

SIZE_OF = np.searchsorted(ROWS, np.arange(ROWS[-1]) + 1)
"""For each number of nodes, which of these sizes it costs."""

Probs = npt.NDArray[np.floating[Any]]
Costs = npt.NDArray[np.float64]


class Budget(Protocol):
    """Cuts a tree whose nodes are sorted by the odds that the target will take them."""

    @property
    def most(self) -> int:
        """Nodes that no tree needs to exceed; 0 means that drafting is not worth its time now."""
        ...

    def nodes(self, probs: Probs) -> int:
        """How many of the best nodes to send."""
        ...

    def hear_of_draft(self, seconds: float) -> None:
        """What the draft took that is asked about next, where it is worth speaking of."""
        ...


@dataclass(frozen=True)
class FixedBudget:
    """As many nodes as there are, up to a number that somebody chose."""

    most: int = FIXED_BUDGET

    def nodes(self, probs: Probs) -> int:
        return min(len(probs), self.most)

    def hear_of_draft(self, seconds: float) -> None:
        pass


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

    def nodes(self, probs: Probs) -> int:
        return self._choice.nodes(gains(probs), self._costs, self._steps)

    def hear_of_draft(self, seconds: float) -> None:
        self._choice.drafting = seconds


class MeasuredBudget:
    """The same on a target, whose passes correct what they were measured to cost."""

    def __init__(self, target: Target, curve: CostCurve, around: float = AROUND) -> None:
        self._target = target
        self._curve = curve
        self._choice = _Choice(around)
        self._off = np.ones(len(ROWS))
        """How far off the curve passes of each size are."""
        self._sent = 0
        self._seen = (target.passes, target.seconds_in_model)
        self._stand_at(0)

    @property
    def most(self) -> int:
        return self._choice.most(self._target.passes)

    def nodes(self, probs: Probs) -> int:
        self._learn()
        if len(self._curve.contexts) > 1 and abs(self._target.length - self._context) >= MOVED:
            self._stand_at(self._target.length)
        self._sent = self._choice.nodes(gains(probs), (self._costs * self._off)[SIZE_OF], self._target.passes)
        return self._sent

    def _stand_at(self, context: int) -> None:
        self._context = context
        self._costs = self._curve.of_passes(np.array(ROWS) - 1, np.full(len(ROWS), context))

    def hear_of_draft(self, seconds: float) -> None:
        self._choice.drafting = seconds

    def _learn(self) -> None:
        """Correct what a pass is thought to cost by the last one, if it was the only one since then."""
        passes, seconds = self._target.passes, self._target.seconds_in_model
        if passes == self._seen[0] + 1 and self._choice.most(passes):
            size = SIZE_OF[self._sent]
            off = np.clip((seconds - self._seen[1]) / (self._costs[size] * self._off[size]), FASTEST, SLOWEST)
            # A longer context slows passes of all sizes, but most of an error is this size's own.
            self._off *= 1 + LEARNING_OF_OTHERS * (off - 1)
            self._off[size] *= 1 + LEARNING * (off - 1)
        self._seen = (passes, seconds)


class SharedBudget:
    """The same in a batch, where one pass checks the trees of all and costs what the largest of them takes.

    So there is one size for all: the one that pays by what the trees bring together, each as it was last known.
    """

    def __init__(
        self, target: Target, curve: CostCurve, together: dict[int, Probs], batch: int, around: float = AROUND
    ) -> None:
        """``together`` is shared by the budgets of a batch; ``curve`` is of passes with such a tree in every seat."""
        self._target = target
        self._together = together
        self._choice = _Choice(batch * around)
        self._costs = curve.of_passes(np.array(ROWS) - 1, np.zeros(len(ROWS)))[SIZE_OF]

    @property
    def most(self) -> int:
        return self._choice.most(self._target.passes)

    def nodes(self, probs: Probs) -> int:
        mine = gains(probs)
        self._together[id(self)] = np.concatenate([mine, np.full(LARGEST_BUDGET + 1 - len(mine), mine[-1])])
        in_all = np.sum(list(self._together.values()), axis=0)
        return min(len(probs), self._choice.nodes(in_all, self._costs, self._target.passes))

    def hear_of_draft(self, seconds: float) -> None:
        # All conversations draft before the pass that they share.
        self._choice.drafting = seconds * max(1, len(self._together))


def gains(probs: Probs) -> Probs:
    """The tokens that trees of 0, 1, 2 … of these nodes bring on average: one, and the sum of their odds."""
    return np.concatenate([[1.0], 1.0 + np.cumsum(probs[:LARGEST_BUDGET])])


class _Choice:
    """How many nodes pay, given what passes cost.

    ``around`` is what a step
    takes besides its forward pass. Where drafting does not pay even its own time is saved, for longer each
    time; a step is known by its number.
    """

    def __init__(self, around: float) -> None:
        self._around = around
        self._most = LARGEST_BUDGET
        self._rest = 0
        self._asleep_until = 0
        self.drafting = 0.0
        """Seconds that the last draft took, where that counts."""
        self._saved: float | None = None
        """Seconds that drafts of this kind save a step, as a rule; None after a rest."""

    def most(self, step: int) -> int:
        return 0 if step < self._asleep_until else self._most

    def nodes(self, gain: Probs, costs: Costs, step: int) -> int:
        """The best number of nodes, by what 0, 1, 2 … of them bring and the seconds of such passes."""
        rate = gain / (costs[: len(gain)] + self._around)
        best = int(rate.argmax())
        # In a batch a plain pass, too, brings a token for each of its trees.
        self._decide(bool(best), gain[best] / gain[0], costs[best], costs[0], step)
        # Nodes that are never sent need not be grown.
        self._most = min(LARGEST_BUDGET, max(2 * best, self._most - 1, ROWS[3]))
        return best

    def _decide(self, paid: bool, gain: float, cost: float, plain: float, step: int) -> None:
        """Whether to rest, and for how long."""
        longest = LONGEST_REST
        if self.drafting:
            saved = gain * (plain + self._around) - (cost + self._around + self.drafting)
            self._saved = saved if self._saved is None else self._saved + SAVED_LEARNING * (saved - self._saved)
            paid = self._saved > 0
            longest = max(longest, int(self.drafting / (TRYING * (plain + self._around))))
        self._rest = 0 if paid else min(max(1, 2 * self._rest), longest)
        self._asleep_until = step + 1 + self._rest if self._rest > 2 else 0
        if self._asleep_until:
            self._saved = None
