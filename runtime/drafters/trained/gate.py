"""Decides whether the heads' pass pays in the hierarchy, where other sources draft without it."""

from __future__ import annotations

LEARNING_RATE = 0.02
"""Learning rate of the averages of steps with, or without, the heads."""
MIN_STEPS = 16
"""Steps of each kind before they are compared."""
LONGEST_PAUSE = 512
"""The longest pause, in steps, before the slower kind is tried again."""
TRIAL_STEPS = 8
"""Steps of a trial of the slower kind: single ones differ much, and the first also reads the tokens of the pause."""


class TrainedGate:
    """Compares tokens per second of steps with the heads and steps without them, and uses the faster kind.

    The slower kind is tried again in intervals that double each time it is slower.
    """

    def __init__(self) -> None:
        self.now = True
        """Whether to run the heads in the next step."""
        self._tokens, self._seconds = [0.0, 0.0], [0.0, 0.0]
        self._observed = [0, 0]
        self._pause, self._steps_left = MIN_STEPS, MIN_STEPS
        self._faster = True

    def observe(self, tokens: float, seconds: float, used: bool | None = None) -> None:
        """Update with the tokens and the seconds of a step, which ``used`` the drafter or not: by default as ``now``.

        Answers of a batch share a gate, which another one may have switched since the step began.
        """
        kind = int(self.now if used is None else used)
        share = max(LEARNING_RATE, 1 / (1 + self._observed[kind]))
        self._tokens[kind] += share * (tokens - self._tokens[kind])
        self._seconds[kind] += share * (seconds - self._seconds[kind])
        self._observed[kind] += 1
        self._steps_left -= 1
        if self._steps_left <= 0:
            self._next()

    def _next(self) -> None:
        if min(self._observed) < MIN_STEPS:
            self.now, self._steps_left = not self.now, MIN_STEPS
            return
        with_heads, without = (self._tokens[kind] / self._seconds[kind] for kind in (1, 0))
        faster = with_heads > without
        if self.now != self._faster:  # this was a trial of the slower kind
            self._pause = min(2 * self._pause, LONGEST_PAUSE) if faster == self._faster else MIN_STEPS
            self.now, self._steps_left = faster, self._pause
        else:
            self.now, self._steps_left = (not faster, TRIAL_STEPS) if faster == self._faster else (faster, MIN_STEPS)
        self._faster = faster
