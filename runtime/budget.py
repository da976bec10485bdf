"""How many nodes of a draft tree are worth their share of the forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from hdtool.runtime.target import Target

ROWS = (1, 2, 4, 8, 12, 16, 20, 24, 32, 48, 65)
"""Sizes of forward passes that are timed: nodes and the root. What lies between costs as much as the next larger."""
TIMES, PATIENCE = 4, 1.0
"""Each is timed so often, for about a second; the fastest counts, the others tell how busy the machine was."""
LEARNING, LEARNING_OF_OTHERS = 0.05, 0.01
"""How far one step of the conversation moves what a pass of its size, and of all others, is thought to cost."""
SLOWEST, FASTEST = 2.0, 0.5
"""No single step is believed to have been further off."""
LONGEST_REST = 64
"""Steps without a draft, at most, where drafting was not worth it before."""

Odds = npt.NDArray[np.floating[Any]]


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

    most: int = 32

    def nodes(self, odds: Odds) -> int:
        return min(len(odds), self.most)


class MeasuredBudget:
    """The number of nodes that brings the most tokens for the time, on this machine and this model.

    A tree of k nodes brings one token and, on average, the sum of their odds. Its forward pass takes
    what passes of that size were seen to take; ``around`` is what a step takes besides.
    """

    def __init__(self, target: Target, around: float = 2e-4) -> None:
        self._target = target
        self._around = around
        self._costs = target.seconds_of_trees([rows - 1 for rows in ROWS], TIMES, PATIENCE)
        self._bin = np.searchsorted(ROWS, np.arange(ROWS[-1]) + 1)
        """For each number of nodes, which of the sizes it costs."""
        self._most = ROWS[-1] - 1
        self._sent = 0
        self._seen = (target.passes, target.seconds_in_model)
        self._rest = 0
        self._asleep_until = 0

    @property
    def most(self) -> int:
        return 0 if self._target.passes < self._asleep_until else self._most

    def nodes(self, odds: Odds) -> int:
        self._learn()
        gain = np.concatenate([[1.0], 1.0 + np.cumsum(odds[: ROWS[-1] - 1])])
        rate = gain / (self._costs[self._bin[: len(gain)]] + self._around)
        best = int(rate.argmax())
        self._sleep_unless(best > 0)
        # Nodes that are never sent need not be grown.
        self._most = min(ROWS[-1] - 1, max(2 * best, self._most - 1, ROWS[3]))
        self._sent = best
        return best

    def _learn(self) -> None:
        """Correct what a pass is thought to cost by the last one, if it was the only one since then."""
        passes, seconds = self._target.passes, self._target.seconds_in_model
        if passes == self._seen[0] + 1 and self._asleep_until <= passes:
            size = self._bin[self._sent]
            off = np.clip((seconds - self._seen[1]) / self._costs[size], FASTEST, SLOWEST)
            # A longer context slows passes of all sizes, but most of an error is this size's own.
            self._costs *= 1 + LEARNING_OF_OTHERS * (off - 1)
            self._costs[size] *= 1 + LEARNING * (off - 1)
        self._seen = (passes, seconds)

    def _sleep_unless(self, worth_it: bool) -> None:
        """Where drafting does not pay even its own time is saved, for longer each time."""
        self._rest = 0 if worth_it else min(max(1, 2 * self._rest), LONGEST_REST)
        self._asleep_until = self._target.passes + 1 + self._rest if self._rest > 2 else 0
