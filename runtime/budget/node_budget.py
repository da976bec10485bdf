"""Budgets: how many nodes of a draft tree to verify, fixed or chosen to maximize tokens per second."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from hdtool.runtime.budget.pass_costs import (
    COSTS,
    LARGEST_CHOSEN,
    PASS_SIZES,
    MeasuredCosts,
    PassCosts,
    cost_of,
    passes_of,
)
from hdtool.runtime.config import FIXED_BUDGET, LARGEST_BUDGET
from hdtool.runtime.kernels.compiled import compiled
from hdtool.runtime.kernels.memory.no_copy import Pinned
from hdtool.runtime.kernels.memory.raw_memory import array_at

if TYPE_CHECKING:
    from hdtool.runtime.budget.cost_curve import CostCurve
    from hdtool.runtime.model.pass_log import PassLog

STEP_OVERHEAD = 2e-4
"""Seconds of a step without a draft outside its forward pass, until they are measured."""
SMOOTHING, MOST_ABOVE = 0.1, 3.0
"""Learning rate of the seconds outside of passes, and how many times their average a single step may count."""
LONGEST_PAUSE = 64
"""Upper bound on the steps without drafts after drafting did not pay."""
SAVED_LEARNING_RATE = 0.1
"""Learning rate of the seconds that drafts save, for drafters with a time that counts."""
RETRY_SHARE = 0.01
"""Share of the time that may be spent on trying drafts again."""

ENOUGH = 3.0
"""Passes that must confirm a cost before it decides for or against drafts for good."""
WORTH_TRYING, CLEARLY_FASTER = 1.2, 1.5
"""Expected tokens of a step, against one without a draft, from which on a larger pass of unconfirmed cost is tried, and
how many times as fast drafts must seem for a plain pass of unconfirmed cost not to be."""
LEAST_OF_BATCH = 1.15
"""How many times as fast drafts must seem in a batch: all trees grow to the size that pays for most of them, and what
they are expected to bring is too high there."""
FEWEST_DRAFTED = PASS_SIZES[3]
"""Nodes that are drafted at least, if any are."""
Probs = npt.NDArray[np.floating[Any]]


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
        ("costs", np.int64),  # the address of a record of costs
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

    def __init__(self, overhead: float, step: Callable[[], int], costs: PassCosts) -> None:
        """``overhead`` is the seconds of a step outside its pass; ``step`` returns the number of the current step."""
        self._step = step
        self._choice = np.zeros(1, CHOICE)
        self._at = self._choice.ctypes.data
        self._own: Any = self._choice[0]
        self._own["overhead"], self._own["saved"] = overhead, np.nan
        self._use(costs)
        self._most = LARGEST_CHOSEN
        self._paused_until = 0
        # Compiled, or loaded, before the first step.
        choose(self._at, np.empty(0), 0, self._most)
        choose_for_all(self._at, np.ones(1), 0, self._most)
        self._own["pause"] = 0

    def _use(self, costs: PassCosts) -> None:
        self._costs = costs
        self._own["costs"] = costs.address

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
        super().__init__(overhead, lambda: self._steps, PassCosts())
        self._curve = curve
        self._steps = 0
        self.start_step(0)

    def set_draft_seconds(self, seconds: float) -> None:
        """Ignored: what a cost curve decides must not depend on how busy the machine is."""

    def start_step(self, context: int) -> None:
        """Set the length of the context of the next step."""
        self._steps += 1
        if self._steps == 1 or len(self._curve.contexts) > 1:
            self._costs.set(self._curve.of_all_sizes(LARGEST_BUDGET, context))


class MeasuredBudget(_ChosenSize):
    """Like CostBudget, with costs that measured passes correct, and the measured time between passes."""

    _costs: MeasuredCosts

    def __init__(self, log: PassLog, costs: MeasuredCosts, overhead: float = STEP_OVERHEAD) -> None:
        super().__init__(overhead, lambda: log.passes, costs)
        self._log = log
        self._passes, self._called = log.passes, time.perf_counter()
        """Passes at the last call, and its time."""
        self._outside = SmoothedSeconds(overhead)

    def nodes(self, probs: Probs) -> int:
        self._costs.update()
        self._measure_overhead()
        return super().nodes(probs)

    def _measure_overhead(self) -> None:
        """Measure the time around the last pass, if it was the only one since the last call."""
        log, now = self._log, time.perf_counter()
        if log.passes == self._passes + 1 and self.most and log.nodes >= 0:
            around = now - self._called - log.last_seconds - self._own["drafting"]
            self._outside.observe(max(0.0, around))
            self._own["overhead"] = self._outside.mean
        self._passes, self._called = log.passes, now


class Together:
    """What the budgets of a batch share: the costs of passes, and what each tree was last expected to bring."""

    def __init__(self, log: PassLog, curves: Mapping[int, CostCurve], *, only_timed_sizes: bool = False) -> None:
        """``curves`` hold the passes of batches with such a tree in each slot, by the number of slots."""
        self.log = log
        self.expected: dict[int, Probs] = {}
        self._outside = SmoothedSeconds()
        self._passes, self._called = -1, 0.0
        """Passes at the first choice of the last step, and its time."""
        self._costs: dict[int, MeasuredCosts] = {}
        for slots in sorted(curves):
            fewer = max(self._costs, default=0)
            # Passes of far fewer trees take less, whatever their size.
            these = range(max(fewer, slots // 2) + 1, slots + 1)
            self._costs[slots] = MeasuredCosts(log, curves[slots], these, only_timed_sizes=only_timed_sizes)

    def seconds_outside(self, expected: float, drafting: float) -> float:
        """Those of a step outside its pass without ``drafting``, as measured; ``expected`` ones before that."""
        log, now = self.log, time.perf_counter()
        if log.passes != self._passes:
            if log.passes == self._passes + 1 and log.nodes >= 0:
                self._outside.observe(max(0.0, now - self._called - log.last_seconds - drafting))
            self._passes, self._called = log.passes, now
        return min(expected, self._outside.mean) if self._outside.mean > 0 else expected

    def costs(self, rows: int) -> MeasuredCosts:
        """The costs of passes with so many trees."""
        return self._costs[min((slots for slots in self._costs if slots >= rows), default=max(self._costs))]


class SharedBudget(_ChosenSize):
    """Like MeasuredBudget for a batch, where one pass verifies all trees and costs as much as the largest of them.

    So all trees get the same size, chosen by the sum of their expected tokens; each budget shares its latest ones.
    """

    def __init__(self, together: Together, rows: Callable[[], int], overhead: float = STEP_OVERHEAD) -> None:
        """``rows`` returns how many slots of the batch are in use."""
        super().__init__(overhead, lambda: together.log.passes, together.costs(1))
        self._together, self._rows, self._each = together, rows, overhead

    def nodes(self, probs: Probs) -> int:
        rows, mine, expected = self._rows(), gains(probs), self._together.expected
        expected.pop(id(self), None)  # the latest are at the end
        expected[id(self)] = np.concatenate([mine, np.full(LARGEST_CHOSEN + 1 - len(mine), mine[-1])])
        in_all = np.sum(list(expected.values())[-rows:], axis=0)
        costs = self._together.costs(rows)
        costs.update()
        self._use(costs)
        self._own["overhead"] = self._together.seconds_outside(rows * self._each, float(self._own["drafting"]))
        best, self._most, self._paused_until = choose_for_all(self._at, in_all, self._step(), self._most)
        return min(len(probs), best)

    def set_draft_seconds(self, seconds: float) -> None:
        # All slots draft before the shared pass.
        super().set_draft_seconds(seconds * max(1, min(self._rows(), len(self._together.expected))))


@compiled
def gains(probs: Probs) -> Probs:
    """Expected tokens per step of trees of the first 0, 1, 2 … nodes: the bonus token plus the probabilities."""
    gain = np.ones(min(len(probs), LARGEST_CHOSEN) + 1)
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
    costs = array_at(own.costs, 1, COSTS)[0]
    best, cost, plain = _best_size(gain, own, costs)
    # In a batch a plain pass, too, yields a token for each slot.
    faster = 0.0 if best == 0 else gain[best] / gain[0] * (plain + own.overhead) / (cost + own.overhead)
    pays = faster > (1.0 if gain[0] <= 1 else LEAST_OF_BATCH)
    if pays:
        # In a batch drafts gain little, and one plain pass says it for all.
        tries = (faster < CLEARLY_FASTER or gain[0] > 1) and passes_of(costs, 0) < ENOUGH
    else:
        tries = gain[best] >= WORTH_TRYING * gain[0] and passes_of(costs, best) < ENOUGH
    # A choice that rests on an unconfirmed cost is turned round.
    chosen = best if pays != tries else 0
    # Nodes that will not be verified need not be drafted.
    most = min(LARGEST_CHOSEN, max(2 * chosen, most - 1, FEWEST_DRAFTED))
    if tries:
        return chosen, most, 0
    return chosen, most, _decide(own, pays, gain[chosen] / gain[0], cost if pays else plain, plain, step)


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
def _best_size(gain: Probs, own: Any, costs: Any) -> tuple[int, float, float]:
    """The number of nodes but 0 with the most expected tokens per second, its seconds and those of a plain pass.

    0 where there are no nodes.
    """
    plain = cost_of(costs, 0)
    best, highest, paid = 0, 0.0, plain
    for nodes in range(1, len(gain)):
        cost = cost_of(costs, nodes)
        # A plain pass takes no longer than larger ones, which may have been measured later.
        plain = min(plain, cost)
        rate = gain[nodes] / (cost + own.overhead)
        if rate > highest:
            best, highest, paid = nodes, rate, cost
    return best, paid, plain
