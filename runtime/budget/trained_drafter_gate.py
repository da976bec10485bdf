"""Decide whether a trained drafter pays, from measured steps with and without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hdtool.runtime.budget.averages import LinearCost, MovingAverage, SmoothedSeconds

if TYPE_CHECKING:
    from hdtool.runtime.core.engine_interface import PassLog
    from hdtool.runtime.kernels.compiled import Array

LEARNING_RATE = 0.01
"""Learning rate of the moving averages of tokens and seconds per step, with and without the drafter."""
PRIOR_STEPS = 8
"""Weight, in steps, of the assumption that the drafter adds no tokens, so that a costly drafter needs more evidence."""
TRIAL_STEPS = 4
"""Number of steps for which the slower kind of step is tried."""
MAX_TRIAL_LOSS = 0.01
"""Largest share of the time that trials may lose."""
HOPELESS_LOSS = 16
"""Lost time after which a trial of the drafter ends early, in durations of a step without the drafter."""
MIN_TRIAL_STEPS = 2
"""Minimum number of steps of a trial that ends early; one is too few, as a first step may read a whole prompt."""
MAX_EXPECTED_LOSS = 0.02
"""Largest share of the time since the last trial of the drafter that the next one is expected to lose."""
EXPECTED_GAIN = 0.5
"""Number of tokens that the drafter is expected to add to each step of a trial."""
MAX_PAUSE = 512
"""Longest pause before the slower kind of step is tried again, in steps. Each further trial that the drafter loses in a
row doubles the limit: an interrupted trial is soon repeated, but a very slow drafter is rarely tried."""
MAX_EXTENDED_ROWS = 16
"""Maximum number of rows in a pass whose cost is learned; larger ones, such as prefills, say nothing about drafting."""


class TrainedDrafterGate:
    """Compares the throughput of steps with and without a drafter, and decides when and how far to draft.

    The faster kind of step is used. The slower kind is tried again after a pause that is proportional to the expected
    loss of the trial. The first steps run without the drafter, so that its first trial can end early as well. While the
    drafter runs, it extends only those paths that pay. The drafters of an engine may share a gate.
    """

    def __init__(self, log: PassLog) -> None:
        """``log`` records the passes of the target."""
        self.runs_drafter = False
        """True if the next step should run the drafter; before a trial begins, ``may_run`` must allow it, too."""
        self.pass_cost = LinearCost()
        """Cost of the drafter's passes."""
        self._log = log
        self._tokens = MovingAverage(LEARNING_RATE), MovingAverage(LEARNING_RATE)
        self._seconds = SmoothedSeconds(LEARNING_RATE), SmoothedSeconds(LEARNING_RATE)
        self._steps_left = TRIAL_STEPS
        self._trial: list[float] = []
        """Loss of each step of the drafter's current trial, in seconds."""
        self._lost_trials = 0
        self._waits = False
        """True if a trial of the drafter is due and has not begun."""
        self._earned = 0.0
        """Seconds that the next trial of the drafter may lose: a share of the time since the last one."""

    def may_run(self, cost: float) -> bool:
        """Return whether the next step should run the drafter, whose first steps take as long as ``cost`` plain ones.

        A trial that is expected to lose time waits until the loss is a small share of the time since the last trial.
        """
        if not self.runs_drafter or not self._waits:
            return self.runs_drafter
        return (cost - MIN_TRIAL_STEPS * EXPECTED_GAIN) * self._seconds[0].mean <= self._earned

    def observe(self, tokens: float, seconds: float, used: bool | None = None) -> None:
        """Record the tokens and seconds of a step, and whether it ``used`` the drafter (default: ``runs_drafter``).

        Answers of a batch share a gate and must pass ``used``, as another answer may have switched ``runs_drafter``
        since the step began.
        """
        kind = int(self.runs_drafter if used is None else used)
        self._tokens[kind].observe(tokens)
        seconds = self._seconds[kind].observe(seconds)
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
        plain = self._seconds[0].mean
        if not plain:
            return False
        self._trial.append(seconds - tokens * plain / self._tokens[0].mean)
        return len(self._trial) >= MIN_TRIAL_STEPS and sum(self._trial) > HOPELESS_LOSS * plain

    def _next(self) -> None:
        plain, drafted = self._seconds
        if not (plain.observed and drafted.observed):
            self._try(not self.runs_drafter)
            return
        without, drafting = self._speeds()
        is_faster = drafting > without
        if self.runs_drafter == is_faster:
            self._try(not is_faster)
            return
        if is_faster:
            pause = min(
                TRIAL_STEPS * (1 - without / drafting) / MAX_TRIAL_LOSS, 2 * min(plain.observed, drafted.observed)
            )
            self._lost_trials = 0
        else:  # the drafter makes no tree worse, so a trial loses at most the time of its passes
            pause = TRIAL_STEPS * (drafted.mean / plain.mean - 1) / MAX_TRIAL_LOSS
            self._lost_trials += 1
        longest = MAX_PAUSE << max(0, self._lost_trials - 1)
        self.runs_drafter, self._steps_left = is_faster, int(min(max(pause, TRIAL_STEPS), longest))

    def _try(self, drafter: bool) -> None:
        """Begin a trial of steps without the drafter, or make one with the drafter wait for ``may_run``."""
        self.runs_drafter = self._waits = drafter
        self._steps_left = TRIAL_STEPS

    def _speeds(self) -> tuple[float, float]:
        """Return the tokens per second without and with the drafter."""
        without, drafting = (tokens.mean for tokens in self._tokens)
        plain, drafted = self._seconds
        known = drafted.observed / (drafted.observed + PRIOR_STEPS)
        return without / plain.mean, (without + known * (drafting - without)) / drafted.mean

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
        """Tokens per second of the faster kind of step, at least one per duration of the target's last pass."""
        last = self._log.last_seconds
        known = zip(self._tokens, self._seconds, strict=True)
        speeds = (tokens.mean / seconds.mean if seconds.mean else 0.0 for tokens, seconds in known)
        return max(1 / last if last else 0.0, *speeds)
