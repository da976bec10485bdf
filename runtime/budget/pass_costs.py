"""Estimated costs of passes by number of draft nodes, which later passes correct."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hdtool.runtime.kernels.compiled import Uncopyable, array_at, compiled
from hdtool.runtime.settings.draft_token_limits import LARGEST_BUDGET

if TYPE_CHECKING:
    from hdtool.runtime.budget.cost_curve import CostCurve
    from hdtool.runtime.core.engine_interface import PassLog

PASS_SIZES = (1, 2, 4, 8, 12, 16, 20, 24, 32, 48, 64)
"""Numbers of rows (the nodes and the root) for which forward passes are timed. Steps are captured for a few sizes only,
so a captured step costs as much as the next larger size; the cost of any other pass is interpolated."""
MAX_CHOSEN_NODES = PASS_SIZES[-1] - 1
"""Maximum number of nodes that a budget chooses by cost: with the root, they fill a tile of 64 rows."""
COST_LEARNING_RATE, OTHER_SIZES_LEARNING_RATE = 0.05, 0.01
"""Learning rates: how far one measured pass moves the cost of its own size, and the costs of all other sizes."""
MAX_COST_RATIO, MIN_COST_RATIO = 2.0, 0.5
"""The ratio of measured to estimated seconds is clipped to these bounds before a pass corrects the costs."""
ESTIMATE_WEIGHT = 4
"""Number of measured passes that weigh as much as the initial estimate."""
UNEXPECTED_DEVIATION, UNEXPECTED_WEIGHT = 0.3, 0.25
"""Relative error beyond which a pass confirms a cost only in part, and the weight of such a pass."""
FASTER_DEVIATION, FASTER_LEARNING_RATE = 0.15, 0.5
"""Relative error beyond which a fast pass corrects its cost at a higher rate, and this rate: other processes can slow a
pass down, but not speed it up."""
FADING, OUTDATED_FADING = 1 / 512, 1 / 64
"""Share of its confirming passes that the cost of each smaller size loses with each pass: usually, and if that cost is
outdated (see ``OUTDATED_RATIO``)."""
MAX_CONFIRMING_PASSES = 16.0
"""Maximum number of confirming passes that count, so that they fade within a hundred passes once a cost is outdated."""
OUTDATED_RATIO = 1.15
"""A cost is outdated if it is at least this many times the cost of a larger pass."""
CONTEXT_STEP = 64
"""Number of tokens by which the context length must change before the costs are computed again."""

OWN_SIZE_INDEX = np.arange(LARGEST_BUDGET + 1)
"""Index of the cost for each number of nodes, if every number of nodes has a cost of its own."""
NEXT_SIZE_INDEX = np.minimum(np.searchsorted(PASS_SIZES, OWN_SIZE_INDEX + 1), len(PASS_SIZES) - 1)
"""For each number of nodes, the index in ``PASS_SIZES`` of the smallest size that fits, or else of the largest size."""
WHOLE_SHARES = np.ones(LARGEST_BUDGET + 1)
"""Interpolation weights for costs that are not interpolated: a pass costs as much as one of the next larger size."""
INTERPOLATED_SHARES = np.interp(OWN_SIZE_INDEX + 1, PASS_SIZES, np.arange(len(PASS_SIZES))) - NEXT_SIZE_INDEX + 1
"""Interpolation weights of the next larger size; the next smaller size gets the remaining weight."""

Seconds = npt.NDArray[np.float64]
Sizes = npt.NDArray[np.int64]
Shares = npt.NDArray[np.float64]

COSTS = np.dtype(
    [
        # With s = sizes[n] and f = shares[n], a pass over n nodes is estimated to take
        # f * seconds[s] * corrections[s] + (1 - f) * seconds[s - 1] * corrections[s - 1].
        ("seconds", np.float64, LARGEST_BUDGET + 1),
        ("corrections", np.float64, LARGEST_BUDGET + 1),
        ("passes", np.float64, LARGEST_BUDGET + 1),  # number of passes that confirmed each cost
        ("sizes", np.int64, LARGEST_BUDGET + 1),
        ("shares", np.float64, LARGEST_BUDGET + 1),
    ],
    align=True,
)


class PassCosts(Uncopyable):
    """Known costs of passes over 0, 1, 2 … nodes, in a record that compiled code reads at ``address``."""

    def __init__(self, sizes: Sizes = OWN_SIZE_INDEX, shares: Shares = WHOLE_SHARES, passes: float = np.inf) -> None:
        """``sizes`` and ``shares`` determine how the cost of each number of nodes is interpolated; see ``COSTS``.

        ``passes`` is the number of passes that count as having confirmed each cost.
        """
        self._memory = np.zeros(1, COSTS)
        self._record: Any = self._memory[0]
        self._record["seconds"] = self._record["corrections"] = 1.0
        self._record["passes"], self._record["sizes"], self._record["shares"] = passes, sizes, shares
        self.address = self._memory.ctypes.data

    def set(self, seconds: Seconds) -> None:
        self._record["seconds"][: len(seconds)] = seconds


class MeasuredCosts(PassCosts):
    """Costs from a measured curve, corrected by later passes; the budgets of an engine may share one instance."""

    def __init__(
        self, log: PassLog, curve: CostCurve, slots: range = range(1, 2), *, only_timed_sizes: bool = False
    ) -> None:
        """Only passes whose number of trees is in ``slots`` correct the costs.

        With ``only_timed_sizes``, as for captured steps, a pass costs as much as the next larger timed size.
        """
        super().__init__(NEXT_SIZE_INDEX, WHOLE_SHARES if only_timed_sizes else INTERPOLATED_SHARES, 0.0)
        self._log, self._curve, self._slots = log, curve, slots
        self._passes = log.passes
        learn_cost(self.address, 0, 1.0)  # compiles the function; all costs are still 1, so nothing is learned
        self._record["passes"] = 0.0
        self._set_context(0)

    def update(self) -> None:
        """Learn from the last pass; recompute the costs if the context length changed by at least ``CONTEXT_STEP``."""
        log = self._log
        if log.passes != self._passes:
            self._passes, nodes = log.passes, log.nodes
            if 0 <= nodes <= MAX_CHOSEN_NODES and log.slots in self._slots:
                learn_cost(self.address, nodes, log.last_seconds)
        if len(self._curve.contexts) > 1 and abs(log.context - self._context) >= CONTEXT_STEP:
            self._set_context(log.context)

    def _set_context(self, context: int) -> None:
        self._context = context
        self.set(self._curve.seconds_of_passes(np.array(PASS_SIZES) - 1, np.full(len(PASS_SIZES), context)))


@compiled
def estimated_cost(costs: Any, nodes: int) -> float:
    """Return the estimated duration in seconds of a forward pass over ``nodes`` draft nodes."""
    size, share = costs.sizes[nodes], costs.shares[nodes]
    smaller = max(0, size - 1)
    cost = share * costs.seconds[size] * costs.corrections[size]
    return cost + (1 - share) * costs.seconds[smaller] * costs.corrections[smaller]  # type: ignore[no-any-return]


@compiled
def confirming_passes(costs: Any, nodes: int) -> float:
    """Return how many passes have confirmed the cost of ``nodes`` nodes; the number is interpolated as the cost is."""
    size, share = costs.sizes[nodes], costs.shares[nodes]
    return share * costs.passes[size] + (1 - share) * costs.passes[max(0, size - 1)]  # type: ignore[no-any-return]


@compiled
def learn_cost(at: int, nodes: int, seconds: float) -> None:
    """Correct the costs at address ``at``, and count confirmations, for a pass over ``nodes`` that took ``seconds``."""
    costs = array_at(at, 1, COSTS)[0]
    size, share = costs.sizes[nodes], costs.shares[nodes]
    smaller, expected = max(0, size - 1), estimated_cost(costs, nodes)
    change = min(MAX_COST_RATIO, max(MIN_COST_RATIO, seconds / expected)) - 1 if expected > 0 else 0.0
    # A longer context slows passes of all sizes, but most of an error is specific to one size.
    for size_nodes in range(LARGEST_BUDGET + 1):
        costs.corrections[size_nodes] *= 1 + OTHER_SIZES_LEARNING_RATE * change
    confirmed = 1.0 if abs(change) <= UNEXPECTED_DEVIATION else UNEXPECTED_WEIGHT
    for size_index, part in ((size, share), (smaller, 1 - share)):
        rate = max(COST_LEARNING_RATE, 1 / (ESTIMATE_WEIGHT + costs.passes[size_index] + 1))
        if change < -FASTER_DEVIATION:
            rate = max(rate, FASTER_LEARNING_RATE)
        costs.corrections[size_index] *= 1 + rate * part * change
        costs.passes[size_index] = min(MAX_CONFIRMING_PASSES, costs.passes[size_index] + part * confirmed)
    limit = OUTDATED_RATIO * estimated_cost(costs, nodes)
    for size_index in range(size if share == 1 else smaller):
        is_outdated = costs.seconds[size_index] * costs.corrections[size_index] > limit
        costs.passes[size_index] *= 1 - (OUTDATED_FADING if is_outdated else FADING)
