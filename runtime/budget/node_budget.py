"""Budgets: how many nodes of a draft tree to verify, fixed or chosen to maximize tokens per second."""

from __future__ import annotations

import time
from collections.abc import Callable
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
        if self.mean:  # not once it is 0, where it would stay
            seconds = min(seconds, MOST_ABOVE * self.mean)
        self._observed += 1
        self.mean += max(SMOOTHING, 1 / self._observed) * (seconds - self.mean)


class ChosenSize(Pinned):
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


class CostBudget(ChosenSize):
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


class MeasuredBudget(ChosenSize):
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
    own = array_at(at, 1, CHOICE)[0]
    costs = array_at(own.costs, 1, COSTS)[0]
    gain = gains(probs)
    chosen, pays, tries, cost, plain = best_size(gain, 0, own.overhead, costs)
    most = useful_tree(chosen, most)
    if tries:
        return chosen, most, 0
    saved = gain[chosen] * (plain + own.overhead) - (cost if pays else plain) - own.overhead
    longest = max(LONGEST_PAUSE, retry_steps(own, plain + own.overhead))
    return chosen, most, decide(own, pays, saved, longest, step)


@compiled
def retry_steps(own: Any, plain: float) -> int:
    """The steps of so many seconds after which a draft may be tried again."""
    return int(own.drafting / (RETRY_SHARE * plain))


@compiled
def useful_tree(chosen: int, most: int) -> int:
    """The largest useful tree of the next steps: nodes that will not be verified need not be drafted."""
    return min(LARGEST_CHOSEN, max(2 * chosen, most - 1, FEWEST_DRAFTED))


@compiled
def best_size(gain: Probs, first: int, overhead: float, costs: Any) -> tuple[int, bool, bool, float, float]:
    """The number of nodes with the most expected tokens per second, by the expected tokens with 0, 1, 2 … of them.

    Also whether drafts pay; whether the choice was turned round, as it rests on a cost that no pass has confirmed; and
    the seconds of a pass with the nodes that seem best, and of one without any, which has ``first`` further rows.
    """
    plain = cost_of(costs, first)
    best, highest, cost = 0, 0.0, plain
    for nodes in range(1, len(gain)):
        taken = cost_of(costs, first + nodes)
        # A plain pass takes no longer than larger ones, which may have been measured later.
        plain = min(plain, taken)
        rate = gain[nodes] / (taken + overhead)
        if rate > highest:
            best, highest, cost = nodes, rate, taken
    # In a batch a plain pass, too, yields a token for each sequence.
    faster = highest * (plain + overhead) / gain[0]
    pays = faster > 1.0
    if pays:
        # In a batch drafts gain little, and one plain pass says it for all.
        tries = (faster < CLEARLY_FASTER or gain[0] > 1) and passes_of(costs, first) < ENOUGH
    else:
        tries = gain[best] >= WORTH_TRYING * gain[0] and passes_of(costs, first + best) < ENOUGH
    return best if pays != tries else 0, pays, tries, cost, plain


@compiled
def decide(own: Any, paid: bool, saved: float, longest: int, step: int) -> int:
    """Decide whether to pause drafting, which ``saved`` so many seconds but for its own.

    Returns the step up to which it pauses, or 0.
    """
    if own.drafting > 0:
        saved -= own.drafting
        own.saved = saved if np.isnan(own.saved) else own.saved + SAVED_LEARNING_RATE * (saved - own.saved)
        paid = own.saved > 0
    own.pause = 0 if paid else min(max(1, 2 * own.pause), longest)
    if own.pause <= 2:
        return 0
    own.saved = np.nan
    return int(step + 1 + own.pause)
