"""Decide whether to run a trained drafter, for how many passes per draft, and how many paths each pass extends."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from hdtool.runtime.drafters.trained.proposal import loaded_once
from hdtool.runtime.kernels.compiled import Array

if TYPE_CHECKING:
    from hdtool.runtime.core.engine import PassLog
    from hdtool.runtime.target.target import Target

GATE_LEARNING_RATE = 0.01
"""Learning rate of the moving averages of tokens and seconds per step, with and without the drafter."""
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
MAX_GATE_PAUSE = 512
"""Longest pause before the slower kind of step is tried again, in steps. Each trial that the drafter loses in a row
doubles it, so that an interrupted trial is soon repeated, and a drafter as slow as many steps is tried rarely."""
MAX_STEP_RATIO = 3.0
"""Multiple of the average to which the seconds of a step are clipped, as the step may have been interrupted."""


class TrainedGate:
    """Compares the throughput of steps with and without the drafter, and uses the faster kind.

    The slower kind is tried again after a pause that is proportional to the expected loss of the trial. The first steps
    run without the drafter, so that its first trial can end early as well.
    """

    def __init__(self) -> None:
        self.runs_drafter = False
        """True if the next step should run the drafter."""
        self._tokens, self._seconds = [0.0, 0.0], [0.0, 0.0]
        self._observed = [0, 0]
        self._steps_left = TRIAL_STEPS
        self._trial: list[float] = []
        """Loss of each step of the drafter's current trial, in seconds."""
        self._lost_trials = 0

    def observe(self, tokens: float, seconds: float, used: bool | None = None) -> None:
        """Record the tokens and seconds of a step, and whether it ``used`` the drafter (default: ``runs_drafter``).

        Answers of a batch share a gate and must pass ``used``, as another answer may have switched ``runs_drafter``
        since the step began.
        """
        kind = int(self.runs_drafter if used is None else used)
        if self._observed[kind]:
            seconds = min(seconds, MAX_STEP_RATIO * self._seconds[kind])
        self._observed[kind] += 1
        share = max(GATE_LEARNING_RATE, 1 / self._observed[kind])
        self._tokens[kind] += share * (tokens - self._tokens[kind])
        self._seconds[kind] += share * (seconds - self._seconds[kind])
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
            self.runs_drafter, self._steps_left = not self.runs_drafter, TRIAL_STEPS
            return
        (without, drafting), seconds = self._speeds(), self._seconds
        is_faster = drafting > without
        if self.runs_drafter == is_faster:
            self.runs_drafter, self._steps_left = not is_faster, TRIAL_STEPS
            return
        if is_faster:
            pause = min(TRIAL_STEPS * (1 - without / drafting) / MAX_TRIAL_LOSS, 2 * min(self._observed))
            self._lost_trials = 0
        else:  # the drafter makes no tree worse, so a trial loses at most the time of its passes
            pause = TRIAL_STEPS * (seconds[1] / seconds[0] - 1) / MAX_TRIAL_LOSS
            self._lost_trials += 1
        longest = MAX_GATE_PAUSE << max(0, self._lost_trials - 1)
        self.runs_drafter, self._steps_left = is_faster, int(min(max(pause, TRIAL_STEPS), longest))

    def _speeds(self) -> tuple[float, float]:
        """Return the tokens per second without and with the drafter."""
        without, drafting = self._tokens
        known = self._observed[1] / (self._observed[1] + PRIOR_STEPS)
        return without / self._seconds[0], (without + known * (drafting - without)) / self._seconds[1]


PACE_LEARNING_RATE = 0.03
MAX_PASS_RATIO = 3.0
"""Multiple of the expected value to which the seconds of a pass or step are clipped."""
MAX_EXTENDED_ROWS = 16
"""Maximum number of rows in a pass whose cost is learned; larger ones, such as prefills, say nothing about drafting."""


class Pace(Protocol):
    """Decides how many paths of a draft the drafter's next pass extends."""

    def paths_to_extend(self, path_probs: Array, certainty: float) -> int:
        """Return how many of the candidate paths to extend; 0 ends the draft.

        ``path_probs`` are the probabilities of the candidates in descending order; ``certainty`` is the expected
        probability of the best token after a candidate.
        """
        ...

    def note_pass(self, rows: int, seconds: float) -> None: ...

    def note_step(self, tokens: int) -> None: ...

    def restart(self) -> None: ...


class FixedPace:
    """Extends all candidate paths in every pass."""

    def paths_to_extend(self, path_probs: Array, certainty: float) -> int:
        return len(path_probs)

    def note_pass(self, rows: int, seconds: float) -> None:
        pass

    def note_step(self, tokens: int) -> None:
        pass

    def restart(self) -> None:
        pass


class MeasuredPace:
    """Extends as many paths as pay off: a pass must add more expected tokens than steps yield in the same time."""

    def __init__(self, costs: LinearCost, log: PassLog) -> None:
        """``costs`` estimates the cost of the drafter's passes; ``log`` records the target's passes."""
        self._costs, self._log = costs, log
        self._tokens, self._seconds, self._steps = 0.0, 0.0, 0
        self._last: float | None = None

    def paths_to_extend(self, path_probs: Array, certainty: float) -> int:
        if not self._costs.observed:
            return len(path_probs)
        speed, best, best_rows, gain = self._speed, 0.0, 0, 0.0
        for number, prob in enumerate(path_probs.tolist(), start=1):
            gain += prob * certainty
            if (won := gain - speed * self._costs.of(number)) > best:
                best, best_rows = won, number
        return best_rows

    @property
    def _speed(self) -> float:
        """Tokens per second so far, but at least one token per duration of the target's last pass."""
        passes = 1 / self._log.last_seconds if self._log.last_seconds else 0.0
        return max(passes, self._tokens / self._seconds) if self._steps else passes

    def note_pass(self, rows: int, seconds: float) -> None:
        if rows <= MAX_EXTENDED_ROWS:
            self._costs.observe(rows, seconds)

    def note_step(self, tokens: int) -> None:
        """Update the mean number of tokens and the mean duration of a step; the duration includes drafting."""
        now, before = time.perf_counter(), self._last
        self._last = now
        if before is None:
            return
        self._steps += 1
        share = max(PACE_LEARNING_RATE, 1 / self._steps)
        seconds = now - before
        if self._steps > 1:
            seconds = min(seconds, MAX_PASS_RATIO * self._seconds)
        self._tokens += share * (tokens - self._tokens)
        self._seconds += share * (seconds - self._seconds)

    def restart(self) -> None:
        """Begin another answer; the time until its first step does not count as the duration of a step."""
        self._last = None


def pace_for(target: Target, name: str, *, is_measured: bool) -> Pace:
    """Return the pace of a drafter; measured paces with the same target and ``name`` share the costs of passes."""
    if not is_measured:
        return FixedPace()
    return MeasuredPace(loaded_once(target, f"{name}: costs of passes", LinearCost), target.log)


class LinearCost:
    """Estimates the duration of a pass as a constant plus a time per row, by linear regression with forgetting."""

    def __init__(self) -> None:
        self.observed = 0
        """Number of observed passes."""
        self._rows = self._seconds = self._variance = self._covariance = 0.0

    def observe(self, rows: int, seconds: float) -> None:
        if self.observed:
            seconds = min(seconds, MAX_PASS_RATIO * self.of(rows))
        self.observed += 1
        share = max(PACE_LEARNING_RATE, 1 / self.observed)
        off_rows, off_seconds = rows - self._rows, seconds - self._seconds
        self._rows += share * off_rows
        self._seconds += share * off_seconds
        self._variance += share * ((1 - share) * off_rows**2 - self._variance)
        self._covariance += share * ((1 - share) * off_rows * off_seconds - self._covariance)

    def of(self, rows: int) -> float:
        """Return the expected seconds of a pass over ``rows`` rows: never negative, and never less for more rows."""
        slope = max(0.0, self._covariance / self._variance) if self._variance > 0 else 0.0
        if self._rows > 0:
            slope = min(slope, self._seconds / self._rows)
        return self._seconds + slope * (rows - self._rows)
