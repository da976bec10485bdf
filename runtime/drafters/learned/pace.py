"""Decides how many passes a sequential drafter makes in a step, and over how many tokens each."""

from __future__ import annotations

import time
from typing import Protocol

from hdtool.runtime.kernels.compiled import Array

LEARNING_RATE = 0.03
MOST_ABOVE = 3.0
"""How many times the expected seconds a single pass or step may count."""
FEWEST_STEPS = 4
"""Steps before speed decides."""


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
    """As many as are allowed, in every pass."""

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

    def __init__(self) -> None:
        self._costs = LinearCost()
        self._tokens, self._seconds, self._steps = 0.0, 0.0, 0
        self._last: float | None = None

    def rows(self, path_probs: Array, certainty: float) -> int:
        if self._steps < FEWEST_STEPS:
            return len(path_probs)
        speed, best, found, gain = self._tokens / self._seconds, 0.0, 0, 0.0
        for number, prob in enumerate(path_probs.tolist(), start=1):
            gain += prob * certainty
            if (won := gain - speed * self._costs.of(number)) > best:
                best, found = won, number
        return found

    def note_pass(self, rows: int, seconds: float) -> None:
        self._costs.observe(rows, seconds)

    def note_step(self, tokens: int) -> None:
        """Update the tokens per second of steps, their drafts included."""
        now, before = time.perf_counter(), self._last
        self._last = now
        if before is None:
            return
        self._steps += 1
        share = max(LEARNING_RATE, 1 / self._steps)
        seconds = now - before
        if self._steps > 1:
            seconds = min(seconds, MOST_ABOVE * self._seconds)
        self._tokens += share * (tokens - self._tokens)
        self._seconds += share * (seconds - self._seconds)

    def restart(self) -> None:
        """Another answer begins: the time until its first step is not that of a step."""
        self._last = None


class LinearCost:
    """The seconds of a pass as a base and seconds for each row: a regression that forgets."""

    def __init__(self) -> None:
        self._observed = 0
        self._rows = self._seconds = self._variance = self._covariance = 0.0

    def observe(self, rows: int, seconds: float) -> None:
        if self._observed:
            seconds = min(seconds, MOST_ABOVE * self.of(rows))
        self._observed += 1
        share = max(LEARNING_RATE, 1 / self._observed)
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
