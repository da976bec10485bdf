"""Decides in each step whether the heads' pass pays in the hierarchy, where other sources draft without it.

The tree of a step is built twice, without and with the heads, and both are compared by the expected tokens and the
measured seconds of their passes. Heads save most where the other sources expect little, so steps are told apart by
the expected tokens of the tree without them.
"""

from __future__ import annotations

import numpy as np

from hdtool.runtime.budget.node_budget import ChosenSize, Probs

EXPECTED = np.array([1.15, 1.35, 1.6, 2.0, 3.0])
"""Steps are grouped at these numbers of expected tokens."""
LEARNING_RATE = 0.05
"""Learning rate of a group's mean saving, once it has enough steps."""
MIN_STEPS = 4
"""Steps of a group before it may close."""
LONGEST_PAUSE = 128
"""The longest pause, in steps of a group, before the heads are tried again; slow passes pause longer."""
TRIAL_SHARE = 0.01
"""Share of the time that trials may take."""


class HeadsGate:
    """Runs the heads in the groups of steps where they save time on average.

    In other groups they are tried again in intervals that double each time they do not pay.
    """

    def __init__(self, budget: ChosenSize) -> None:
        self._budget = budget
        groups = len(EXPECTED) + 1
        self._saved = np.zeros(groups)
        self._observed, self._pause, self._skip = np.zeros((3, groups), np.int64)

    def opens(self, without: Probs) -> bool:
        """Whether to run the heads in this step; ``without`` are the probabilities of the tree without them."""
        group = self._group(without)
        if self._skip[group] > 0:
            self._skip[group] -= 1
            return False
        return True

    def observe(self, without: Probs, tree: Probs, seconds: float, *, is_typical: bool = True) -> None:
        """Update with the probabilities of both trees, and the seconds of the heads' pass.

        A pass that also reads a prompt or the tokens of a pause is not typical, but its time counts in the next pause.
        """
        group = self._group(without)
        saved, step = self._budget.saving(without, tree)
        if is_typical:
            self._observed[group] += 1
            share = max(LEARNING_RATE, 1 / self._observed[group])
            self._saved[group] += share * (saved - seconds - self._saved[group])
        if self._saved[group] > 0 or self._observed[group] < MIN_STEPS:
            self._pause[group] = 0
            return
        self._pause[group] = min(max(1, 2 * self._pause[group]), LONGEST_PAUSE)
        # The first trials come soon, because few steps may mislead.
        slow = int(seconds / (TRIAL_SHARE * step)) if self._pause[group] > MIN_STEPS else 0
        self._skip[group] = max(self._pause[group], slow)

    def _group(self, probs: Probs) -> int:
        return int(np.searchsorted(EXPECTED, self._budget.expected(probs)))
