"""Decides whether a trained drafter's passes pay, how many to make in a step, and over how many tokens each."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from hdtool.runtime.drafters.trained.proposal import loaded_once
from hdtool.runtime.kernels.compiled import Array

if TYPE_CHECKING:
    from hdtool.runtime.engine import PassLog
    from hdtool.runtime.model.target import Target

GATE_LEARNING_RATE = 0.01
"""Learning rate of the averages of steps with, or without, the drafter."""
PRIOR_STEPS = 8
"""Steps by which it is assumed that the drafter adds no tokens, so that a costly one needs more evidence."""
TRIAL_STEPS = 4
"""Steps of a trial of the slower kind."""
MAX_TRIAL_LOSS = 0.01
"""The share of the time that trials may lose."""
MAX_GATE_PAUSE = 512
"""The longest pause, in steps, before the slower kind is tried again."""
MAX_STEP_RATIO = 3.0
"""How many times the average seconds a single step may count: it may have been interrupted."""


class TrainedGate:
    """Compares tokens per second of steps with the drafter and steps without it, and uses the faster kind.

    The slower kind is tried again after a pause in proportion to what the trial is expected to lose.
    """

    def __init__(self) -> None:
        self.now = True
        """True if to run the drafter in the next step."""
        self._tokens, self._seconds = [0.0, 0.0], [0.0, 0.0]
        self._observed = [0, 0]
        self._steps_left = TRIAL_STEPS

    def observe(self, tokens: float, seconds: float, used: bool | None = None) -> None:
        """Update with the tokens and the seconds of a step, which ``used`` the drafter or not: by default as ``now``.

        Answers of a batch share a gate, which another one may have switched since the step began.
        """
        kind = int(self.now if used is None else used)
        if self._observed[kind]:
            seconds = min(seconds, MAX_STEP_RATIO * self._seconds[kind])
        self._observed[kind] += 1
        share = max(GATE_LEARNING_RATE, 1 / self._observed[kind])
        self._tokens[kind] += share * (tokens - self._tokens[kind])
        self._seconds[kind] += share * (seconds - self._seconds[kind])
        self._steps_left -= 1
        if self._steps_left <= 0:
            self._next()

    def _next(self) -> None:
        if not all(self._observed):
            self.now, self._steps_left = not self.now, TRIAL_STEPS
            return
        (without, drafting), seconds = self._speeds(), self._seconds
        is_faster = drafting > without
        if self.now == is_faster:
            self.now, self._steps_left = not is_faster, TRIAL_STEPS
            return
        if is_faster:
            pause = min(TRIAL_STEPS * (1 - without / drafting) / MAX_TRIAL_LOSS, 2 * min(self._observed))
        else:  # with a drafter, a tree is no worse: what a trial may lose is the time of its passes
            pause = TRIAL_STEPS * (seconds[1] / seconds[0] - 1) / MAX_TRIAL_LOSS
        self.now, self._steps_left = is_faster, int(min(max(pause, TRIAL_STEPS), MAX_GATE_PAUSE))

    def _speeds(self) -> tuple[float, float]:
        """Tokens per second without and with the drafter."""
        without, drafting = self._tokens
        known = self._observed[1] / (self._observed[1] + PRIOR_STEPS)
        return without / self._seconds[0], (without + known * (drafting - without)) / self._seconds[1]


PACE_LEARNING_RATE = 0.03
MAX_PASS_RATIO = 3.0
"""How many times the expected seconds a single pass or step may count."""
MAX_EXTENDED_ROWS = 16
"""Passes over more rows, such as those over prompts, tell nothing of those that extend a draft."""


class Pace(Protocol):
    """How many tokens the next pass of a drafter extends the draft by."""

    def rows(self, path_probs: Array, certainty: float) -> int:
        """``path_probs`` are those of the tokens that may be extended, in descending order, and ``certainty`` that of
        the best token that is expected after one of them; 0 ends the draft."""
        ...

    def note_pass(self, rows: int, seconds: float) -> None: ...

    def note_step(self, tokens: int) -> None: ...

    def restart(self) -> None: ...


class FixedPace:
    """Extends all allowed paths in every pass."""

    def rows(self, path_probs: Array, certainty: float) -> int:
        return len(path_probs)

    def note_pass(self, rows: int, seconds: float) -> None:
        pass

    def note_step(self, tokens: int) -> None:
        pass

    def restart(self) -> None:
        pass


class MeasuredPace:
    """As many as bring more expected tokens for the time of the pass than steps bring in the same time."""

    def __init__(self, costs: LinearCost, log: PassLog) -> None:
        """``costs`` are those of the drafter's passes, and ``log`` tells of the passes of its target."""
        self._costs, self._log = costs, log
        self._tokens, self._seconds, self._steps = 0.0, 0.0, 0
        self._last: float | None = None

    def rows(self, path_probs: Array, certainty: float) -> int:
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
        """Tokens per second: those of the steps so far, and at least one for the time of the last pass."""
        passes = 1 / self._log.last_seconds if self._log.last_seconds else 0.0
        return max(passes, self._tokens / self._seconds) if self._steps else passes

    def note_pass(self, rows: int, seconds: float) -> None:
        if rows <= MAX_EXTENDED_ROWS:
            self._costs.observe(rows, seconds)

    def note_step(self, tokens: int) -> None:
        """Update the tokens per second of steps, their drafts included."""
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
        """Another answer begins: the time until its first step is not that of a step."""
        self._last = None


def pace_for(target: Target, name: str, *, is_measured: bool) -> Pace:
    """The pace of a drafter; measured, it begins with the costs that other drafters of this name have seen."""
    if not is_measured:
        return FixedPace()
    return MeasuredPace(loaded_once(target, f"{name}: costs of passes", LinearCost), target.log)


class LinearCost:
    """The seconds of a pass as a base and seconds for each row: a regression that forgets."""

    def __init__(self) -> None:
        self.observed = 0
        """Passes that were observed."""
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
        """The expected seconds; a pass over fewer rows never costs more, nor one over no rows less than nothing."""
        slope = max(0.0, self._covariance / self._variance) if self._variance > 0 else 0.0
        if self._rows > 0:
            slope = min(slope, self._seconds / self._rows)
        return self._seconds + slope * (rows - self._rows)
