"""Decide whether drafting pays: drafts must add more tokens than steps yield in the time that the drafts take.

``Pause`` decides from estimates of each draft; ``Gate`` from measured steps with and without a trained drafter.
"""

from __future__ import annotations

from math import isnan, nan
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hdtool.runtime.core.engine_interface import PassLog
    from hdtool.runtime.kernels.compiled import Array

MAX_PAUSE_STEPS = 64
"""Longest pause in steps while drafting does not pay, for drafters whose own time is not counted as a cost."""
SAVED_LEARNING_RATE = 0.1
"""Learning rate of the average seconds that a draft saves, for drafters whose own time is counted as a cost."""
RETRY_SHARE = 0.01
"""Largest share of the time that may be spent on retrying drafts."""


class Pause:
    """Pauses drafting while it does not pay; each pause lasts twice as many steps as the one before."""

    def __init__(self) -> None:
        self.steps = 0
        """Length of the last pause, if drafting did not pay since; the first two are too short to skip a step."""
        self.saved = nan
        """Average seconds that a draft saves; NaN after a pause."""

    def next(self, pays: bool, saved: float, draft_seconds: float, max_steps: int) -> int:
        """Return for how many steps to pause now.

        ``pays`` and ``saved`` say whether the nodes of a draft pay, and how many seconds they save. The drafter's own
        time is counted if ``draft_seconds`` is not 0.
        """
        if draft_seconds > 0:
            saved -= draft_seconds
            self.saved = saved if isnan(self.saved) else self.saved + SAVED_LEARNING_RATE * (saved - self.saved)
            pays = self.saved > 0
        self.steps = 0 if pays else min(max(1, 2 * self.steps), max_steps)
        if self.steps <= 2:
            return 0
        self.saved = nan
        return self.steps


LEARNING_RATE = 0.01
"""Learning rate of the moving averages of tokens and seconds per step, with and without the drafter."""
PASS_LEARNING_RATE = 1 / 64
"""Learning rate of the cost of passes."""
MAX_RATIO = 3.0
"""Multiple of the expected value to which the seconds of a pass or step are clipped: it may have been interrupted."""
PRIOR_STEPS = 8
"""Weight, in steps, of the assumption that the drafter adds no tokens, so that a costly drafter needs more evidence."""
TRIAL_STEPS = 4
"""Number of steps for which the slower kind of step is tried."""
MAX_TRIAL_LOSS = 0.01
"""Largest share of the time that trials may lose."""
HOPELESS_LOSS = 16
"""Loss of a trial of the drafter after which the trial ends early, in steps without the drafter."""
MIN_TRIAL_STEPS = 2
"""Number of steps of a trial that ends early, because the first one may read a whole prompt."""
MAX_EXPECTED_LOSS = 0.02
"""Largest share of the time since the last trial of the drafter that the next one is expected to lose."""
EXPECTED_GAIN = 0.5
"""Number of tokens that a drafter is expected to add to a step before it was tried."""
MAX_PAUSE = 512
"""Longest pause before the slower kind of step is tried again, in steps. Each trial that the drafter loses in a row
doubles it, so that an interrupted trial is soon repeated, and a drafter as slow as many steps is tried rarely."""
MAX_EXTENDED_ROWS = 16
"""Maximum number of rows in a pass whose cost is learned; larger ones, such as prefills, say nothing about drafting."""


class LinearCost:
    """Estimates the duration of a pass as a constant plus a time per row, by linear regression with forgetting."""

    def __init__(self, prior_rows: float = 0.0) -> None:
        """If ``prior_rows`` is not 0, it is the expected number of rows at which a pass takes twice as long."""
        self.observed = 0
        """Number of observed passes."""
        self.seconds = 0.0
        """Mean duration of a pass."""
        self.per_row = 0.0
        """Seconds that each row adds to a pass, never negative."""
        self._prior_rows = prior_rows
        self._rows = self._variance = self._covariance = 0.0

    def observe(self, rows: int, seconds: float) -> float:
        """Learn from a pass; return the learning rate."""
        if self.observed:
            seconds = min(seconds, MAX_RATIO * self.of(rows))
        self.observed += 1
        share = max(PASS_LEARNING_RATE, 1 / self.observed)
        off_rows, off_seconds = rows - self._rows, seconds - self.seconds
        self._rows += share * off_rows
        self.seconds += share * off_seconds
        self._variance += share * ((1 - share) * off_rows**2 - self._variance)
        self._covariance += share * ((1 - share) * off_rows * off_seconds - self._covariance)
        weight = float(self._prior_rows > 0)  # the prior weighs as much as a variance of 1
        prior = self.seconds / (self._prior_rows + self._rows) if weight else 0.0
        slope = max(0.0, (self._covariance + prior) / max(self._variance + weight, 1e-12))
        self.per_row = min(slope, self.seconds / self._rows) if self._rows > 0 else slope
        return share

    def of(self, rows: int) -> float:
        """Return the expected seconds of a pass over ``rows`` rows: never negative, and never less for more rows."""
        return self.seconds + self.per_row * (rows - self._rows)


class Gate:
    """Compares the throughput of steps with and without a drafter, and decides when and how far to draft.

    The faster kind of step is used. The slower kind is tried again after a pause that is proportional to the expected
    loss of the trial. The first steps run without the drafter, so that its first trial can end early as well. While the
    drafter runs, it extends only those paths that pay. The drafters of an engine may share a gate.
    """

    def __init__(self, log: PassLog) -> None:
        """``log`` records the passes of the target."""
        self.runs_drafter = False
        """True if the next step should run the drafter, once its trial ``may_run``."""
        self.pass_cost = LinearCost()
        """Cost of the drafter's passes."""
        self._log = log
        self._tokens, self._seconds = [0.0, 0.0], [0.0, 0.0]
        self._observed = [0, 0]
        self._steps_left = TRIAL_STEPS
        self._trial: list[float] = []
        """Loss of each step of the drafter's current trial, in seconds."""
        self._lost_trials = 0
        self._waits = False
        """True if a trial of the drafter is due and has not begun."""
        self._earned = 0.0
        """Seconds that the next trial of the drafter may lose: a share of the time since the last one."""

    def may_run(self, cost: float) -> bool:
        """Return whether the next step should run the drafter, whose first steps take ``cost`` plain steps' time.

        A trial that must lose time waits until this loss is a small share of the time spent without the drafter.
        """
        if not self.runs_drafter or not self._waits:
            return self.runs_drafter
        return (cost - MIN_TRIAL_STEPS * EXPECTED_GAIN) * self._seconds[0] <= self._earned

    def observe(self, tokens: float, seconds: float, used: bool | None = None) -> None:
        """Record the tokens and seconds of a step, and whether it ``used`` the drafter (default: ``runs_drafter``).

        Answers of a batch share a gate and must pass ``used``, as another answer may have switched ``runs_drafter``
        since the step began.
        """
        kind = int(self.runs_drafter if used is None else used)
        if self._observed[kind]:
            seconds = min(seconds, MAX_RATIO * self._seconds[kind])
        self._observed[kind] += 1
        share = max(LEARNING_RATE, 1 / self._observed[kind])
        self._tokens[kind] += share * (tokens - self._tokens[kind])
        self._seconds[kind] += share * (seconds - self._seconds[kind])
        if kind:
            self._waits, self._earned = False, 0.0
        else:
            self._earned += MAX_EXPECTED_LOSS * seconds
        if self._waits:
            return
        self._steps_left -= 1
        if self._steps_left <= 0 or (kind and self._is_hopeless(tokens, seconds)):
            self._trial.clear()
            self._next()

    def _is_hopeless(self, tokens: float, seconds: float) -> bool:
        """Note a step of the drafter's trial, and return True if the trial has lost too much time to go on."""
        if not self._observed[0]:
            return False
        self._trial.append(seconds - tokens * self._seconds[0] / self._tokens[0])
        return len(self._trial) >= MIN_TRIAL_STEPS and sum(self._trial) > HOPELESS_LOSS * self._seconds[0]

    def _next(self) -> None:
        if not all(self._observed):
            self._try(not self.runs_drafter)
            return
        (without, drafting), seconds = self._speeds(), self._seconds
        is_faster = drafting > without
        if self.runs_drafter == is_faster:
            self._try(not is_faster)
            return
        if is_faster:
            pause = min(TRIAL_STEPS * (1 - without / drafting) / MAX_TRIAL_LOSS, 2 * min(self._observed))
            self._lost_trials = 0
        else:  # the drafter makes no tree worse, so a trial loses at most the time of its passes
            pause = TRIAL_STEPS * (seconds[1] / seconds[0] - 1) / MAX_TRIAL_LOSS
            self._lost_trials += 1
        longest = MAX_PAUSE << max(0, self._lost_trials - 1)
        self.runs_drafter, self._steps_left = is_faster, int(min(max(pause, TRIAL_STEPS), longest))

    def _try(self, drafter: bool) -> None:
        """Begin a trial of steps with or without the drafter."""
        self.runs_drafter = self._waits = drafter
        self._steps_left = TRIAL_STEPS

    def _speeds(self) -> tuple[float, float]:
        """Return the tokens per second without and with the drafter."""
        without, drafting = self._tokens
        known = self._observed[1] / (self._observed[1] + PRIOR_STEPS)
        return without / self._seconds[0], (without + known * (drafting - without)) / self._seconds[1]

    def note_pass(self, rows: int, seconds: float) -> None:
        """Learn the cost of the drafter's passes from one over ``rows`` rows."""
        if rows <= MAX_EXTENDED_ROWS:
            self.pass_cost.observe(rows, seconds)

    def paths_to_extend(self, path_probs: Array, certainty: float) -> int:
        """Return how many of the candidate paths the drafter's next pass should extend; 0 ends the draft.

        ``path_probs`` are the probabilities of the candidates in descending order; ``certainty`` is the expected
        probability of the best token after a candidate.
        """
        if not self.pass_cost.observed:
            return len(path_probs)
        speed, best, best_rows, gain = self._speed, 0.0, 0, 0.0
        for number, prob in enumerate(path_probs.tolist(), start=1):
            gain += prob * certainty
            if (won := gain - speed * self.pass_cost.of(number)) > best:
                best, best_rows = won, number
        return best_rows

    @property
    def _speed(self) -> float:
        """Tokens per second of the faster kind of step, but at least one in the time of the target's last pass."""
        last = self._log.last_seconds
        known = zip(self._tokens, self._seconds, strict=True)
        return max(1 / last if last else 0.0, *(tokens / seconds if seconds else 0.0 for tokens, seconds in known))
