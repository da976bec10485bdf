"""What forward passes cost by their number of draft nodes: estimates, which measured passes correct."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hdtool.runtime.config import LARGEST_BUDGET
from hdtool.runtime.kernels.compiled import compiled
from hdtool.runtime.kernels.memory.no_copy import Pinned
from hdtool.runtime.kernels.memory.raw_memory import array_at

if TYPE_CHECKING:
    from hdtool.runtime.budget.cost_curve import CostCurve
    from hdtool.runtime.model.pass_log import PassLog

PASS_SIZES = (1, 2, 4, 8, 12, 16, 20, 24, 32, 48, 64)
"""Sizes of forward passes that are timed, the root included. Captured steps have few sizes, so others cost as much as
the next larger one; otherwise they cost what lies between."""
LARGEST_CHOSEN = PASS_SIZES[-1] - 1
"""The most nodes that a budget chooses by costs: with the root they fill a tile of 64 rows; one more begins another."""
LEARNING_RATE, LEARNING_RATE_OTHERS = 0.05, 0.01
"""Learning rates of the estimated cost after a pass: for passes of its size, and for passes of other sizes."""
SLOWEST, FASTEST = 2.0, 0.5
"""Bounds on the ratio of measured to estimated seconds that one pass may contribute."""
ESTIMATED_BY = 4
"""Passes as which an estimate counts that no pass has confirmed yet."""
UNEXPECTED, LITTLE = 0.3, 0.25
"""The part of an estimate by which a pass differs that confirms it only a little, and how much that is."""
CONTEXT_STEP = 64
"""Tokens by which the context grows before its cost is computed again."""

EACH = np.arange(LARGEST_BUDGET + 1)
"""Where each number of nodes has a cost of its own, that number."""
ABOVE = np.minimum(np.searchsorted(PASS_SIZES, EACH + 1), len(PASS_SIZES) - 1)
"""For each number of nodes, the index of the next larger timed size, or its own; at the end, of the largest."""
ALL = np.ones(LARGEST_BUDGET + 1)
"""The share of the next larger size in the cost where that is the whole."""
PART = np.interp(EACH + 1, PASS_SIZES, np.arange(len(PASS_SIZES))) - ABOVE + 1
"""The same where costs lie between those of the sizes."""

Seconds = npt.NDArray[np.float64]
Sizes = npt.NDArray[np.int64]
Shares = npt.NDArray[np.float64]

COSTS = np.dtype(
    [
        # A pass with some number of nodes costs the seconds at its place in ``sizes``, times their correction, by its
        # share, and those before them for the rest.
        ("seconds", np.float64, LARGEST_BUDGET + 1),
        ("corrections", np.float64, LARGEST_BUDGET + 1),
        ("passes", np.float64, LARGEST_BUDGET + 1),  # those that confirmed the cost
        ("sizes", np.int64, LARGEST_BUDGET + 1),
        ("shares", np.float64, LARGEST_BUDGET + 1),
    ],
    align=True,
)


class PassCosts(Pinned):
    """Seconds of passes with 0, 1, 2 … nodes, which are known."""

    def __init__(self, sizes: Sizes = EACH, shares: Shares = ALL, passes: float = np.inf) -> None:
        """``sizes`` and ``shares`` are the places of numbers of nodes among the costs that will be set."""
        self._record = np.zeros(1, COSTS)
        self._own: Any = self._record[0]
        self._own["seconds"] = self._own["corrections"] = 1.0
        self._own["passes"], self._own["sizes"], self._own["shares"] = passes, sizes, shares
        self.address = self._record.ctypes.data

    def set(self, seconds: Seconds) -> None:
        self._own["seconds"][: len(seconds)] = seconds


class MeasuredCosts(PassCosts):
    """Seconds by a measured curve, corrected by the passes since; the budgets of an engine may share them."""

    def __init__(
        self, log: PassLog, curve: CostCurve, slots: range = range(1, 2), *, only_timed_sizes: bool = False
    ) -> None:
        """``slots`` are the numbers of trees in a pass whose costs these are.

        With ``only_timed_sizes``, as where steps are captured, a pass costs as much as one of the next timed size.
        """
        super().__init__(ABOVE, ALL if only_timed_sizes else PART, 0.0)
        self._log, self._curve, self._slots = log, curve, slots
        self._passes = log.passes
        learn_cost(self.address, 0, 1.0)  # compiles it; the costs are still 1, so nothing is learned
        self._own["passes"] = 0.0
        self._set_context(0)

    def update(self) -> None:
        """Learn from the last pass, and follow the length of its context."""
        log = self._log
        if log.passes != self._passes:
            self._passes, nodes = log.passes, log.nodes
            if 0 <= nodes <= LARGEST_CHOSEN and log.slots in self._slots:
                learn_cost(self.address, nodes, log.last_seconds)
        if len(self._curve.contexts) > 1 and abs(log.context - self._context) >= CONTEXT_STEP:
            self._set_context(log.context)

    def _set_context(self, context: int) -> None:
        self._context = context
        self.set(self._curve.of_passes(np.array(PASS_SIZES) - 1, np.full(len(PASS_SIZES), context)))


@compiled
def cost_of(costs: Any, nodes: int) -> float:
    """The estimated seconds of a pass with so many nodes."""
    size, share = costs.sizes[nodes], costs.shares[nodes]
    below = max(0, size - 1)
    cost = share * costs.seconds[size] * costs.corrections[size]
    return cost + (1 - share) * costs.seconds[below] * costs.corrections[below]  # type: ignore[no-any-return]


@compiled
def passes_of(costs: Any, nodes: int) -> float:
    """How many passes have confirmed the seconds of one with so many nodes."""
    size, share = costs.sizes[nodes], costs.shares[nodes]
    return share * costs.passes[size] + (1 - share) * costs.passes[max(0, size - 1)]  # type: ignore[no-any-return]


@compiled
def learn_cost(at: int, nodes: int, seconds: float) -> None:
    """Correct the costs at an address by those of a pass with so many nodes."""
    costs = array_at(at, 1, COSTS)[0]
    size, share = costs.sizes[nodes], costs.shares[nodes]
    below, expected = max(0, size - 1), cost_of(costs, nodes)
    change = min(SLOWEST, max(FASTEST, seconds / expected)) - 1 if expected > 0 else 0.0
    # A longer context slows passes of all sizes, but most of an error is specific to one size.
    for other in range(LARGEST_BUDGET + 1):
        costs.corrections[other] *= 1 + LEARNING_RATE_OTHERS * change
    confirmed = 1.0 if abs(change) <= UNEXPECTED else LITTLE
    for place, part in ((size, share), (below, 1 - share)):
        rate = max(LEARNING_RATE, 1 / (ESTIMATED_BY + costs.passes[place] + 1))
        costs.corrections[place] *= 1 + rate * part * change
        costs.passes[place] += part * confirmed
