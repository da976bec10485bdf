"""Estimates from observed steps and passes: moving averages, and the cost of a pass by its number of rows."""

from __future__ import annotations

LEARNING_RATE = 0.1
"""Default learning rate of a moving average."""
PASS_LEARNING_RATE = 1 / 64
"""Learning rate of averages over passes, and of the estimate of their cost."""
MAX_RATIO = 3.0
"""The seconds of a pass or step are clipped to this multiple of the expected ones, in case it was interrupted."""


class MovingAverage:
    """Mean of the first observations, which becomes an exponential moving average with the learning rate ``rate``."""

    def __init__(self, rate: float = LEARNING_RATE, expected: float = 0.0) -> None:
        """``expected`` counts as the first observation unless it is 0."""
        self.mean, self.observed = expected, int(expected > 0)
        self._rate = rate

    def observe(self, value: float) -> float:
        """Add an observation; return the value that entered the average, which subclasses may clip."""
        self.observed += 1
        self.mean += max(self._rate, 1 / self.observed) * (value - self.mean)
        return value


class SmoothedSeconds(MovingAverage):
    """Moving average of durations, in which a single interrupted step has limited influence."""

    def observe(self, value: float) -> float:
        # A mean of 0 would clip all later observations to 0.
        return super().observe(min(value, MAX_RATIO * self.mean) if self.mean else value)


class LinearCost:
    """Estimates the duration of a pass as a constant plus a time per row, by linear regression with forgetting."""

    def __init__(self, prior_rows: float = 0.0) -> None:
        """``prior_rows`` is a prior for the number of rows whose time equals the constant; 0 for no prior."""
        self.observed = 0
        """Number of observed passes."""
        self.seconds = 0.0
        """Mean duration of a pass."""
        self.per_row = 0.0
        """Seconds that each row adds to a pass, never negative."""
        self._prior_rows = prior_rows
        self._rows = self._variance = self._covariance = 0.0

    def observe(self, rows: int, seconds: float) -> None:
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

    def of(self, rows: int) -> float:
        """Return the expected seconds of a pass over ``rows`` rows: never negative, and never less for more rows."""
        return self.seconds + self.per_row * (rows - self._rows)
