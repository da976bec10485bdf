"""Decides whether the passes of a trained drafter pay, where there are drafts, or plain steps, without them."""

from __future__ import annotations

LEARNING_RATE = 0.01
"""Learning rate of the averages of steps with, or without, the drafter."""
PRIOR_STEPS = 8
"""Steps by which it is assumed that the drafter adds no tokens, so that a costly one needs more evidence."""
TRIAL_STEPS = 4
"""Steps of a trial of the slower kind."""
LOSS = 0.01
"""The share of the time that trials may lose."""
LONGEST_PAUSE = 512
"""The longest pause, in steps, before the slower kind is tried again."""
MOST_ABOVE = 3.0
"""How many times the average seconds a single step may count: it may have been interrupted."""


class TrainedGate:
    """Compares tokens per second of steps with the drafter and steps without it, and uses the faster kind.

    The slower kind is tried again after a pause in proportion to what the trial is expected to lose.
    """

    def __init__(self) -> None:
        self.now = True
        """Whether to run the drafter in the next step."""
        self._tokens, self._seconds = [0.0, 0.0], [0.0, 0.0]
        self._observed = [0, 0]
        self._steps_left = TRIAL_STEPS

    def observe(self, tokens: float, seconds: float, used: bool | None = None) -> None:
        """Update with the tokens and the seconds of a step, which ``used`` the drafter or not: by default as ``now``.

        Answers of a batch share a gate, which another one may have switched since the step began.
        """
        kind = int(self.now if used is None else used)
        if self._observed[kind]:
            seconds = min(seconds, MOST_ABOVE * self._seconds[kind])
        self._observed[kind] += 1
        share = max(LEARNING_RATE, 1 / self._observed[kind])
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
            pause = min(TRIAL_STEPS * (1 - without / drafting) / LOSS, 2 * min(self._observed))
        else:  # with a drafter, a tree is no worse: what a trial may lose is the time of its passes
            pause = TRIAL_STEPS * (seconds[1] / seconds[0] - 1) / LOSS
        self.now, self._steps_left = is_faster, int(min(max(pause, TRIAL_STEPS), LONGEST_PAUSE))

    def _speeds(self) -> tuple[float, float]:
        """Tokens per second without and with the drafter."""
        without, drafting = self._tokens
        known = self._observed[1] / (self._observed[1] + PRIOR_STEPS)
        return without / self._seconds[0], (without + known * (drafting - without)) / self._seconds[1]
