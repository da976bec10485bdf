"""The minimum draft probability, estimated from the time of the engine's passes.

A draft token adds seconds to a pass, and its probability is the expected number of tokens that it adds. It pays if
its tokens per second exceed those of the pass. In a large batch a pass is compute-bound, and no draft pays.
"""

from __future__ import annotations

import numpy as np

from hdtool.runtime.kernels.compiled import Ints

LOWEST = 0.02
"""Lower bound: less probable drafts cost more to find than they save."""
NO_DRAFT_ABOVE = 0.9
"""If the minimum is higher than this, nothing is drafted."""
PRIOR_TOKENS = 256.0
"""Prior: the number of tokens at which a pass takes twice as long as with one token."""
PRIOR_WEIGHT = 1.0
"""Weight of the prior slope, as a variance of the tokens per pass."""
EMA_WINDOW = 64.0
"""Window of the moving averages, in passes."""
STALL_FACTOR = 4.0
"""Seconds of a pass are clipped to this multiple of the mean, because stalls have other causes."""

EMPTY = np.empty(0, np.int64)


class MinProbability:
    """Estimates the minimum draft probability from the passes so far; ``fixed`` replaces the estimate."""

    def __init__(self, fixed: float | None = None) -> None:
        self._fixed = fixed
        self._passes = 0
        # Moving averages over passes, the variance of their tokens, and its covariance with seconds.
        self._rows = self._tokens = self._emitted = self._seconds = 0.0
        self._variance = self._covariance = 0.0
        self._last: tuple[float, Ints, Ints, Ints] = 0.0, EMPTY, EMPTY, EMPTY

    def floor(self, rows: int) -> float:
        """The minimum probability in a batch of ``rows`` requests."""
        if self._fixed is not None:
            return self._fixed
        if not self._passes:
            return max(LOWEST, rows / (PRIOR_TOKENS + rows))
        slope = self.seconds_per_token
        seconds = max(self._seconds + slope * (rows - self._rows), slope * rows)
        return max(LOWEST, slope * rows * self._emitted / self._rows / seconds)

    @property
    def seconds_per_token(self) -> float:
        """Seconds per additional token of a pass: a regression slope, shrunk to the prior."""
        assumed = self._seconds / (PRIOR_TOKENS + self._tokens)
        return max(0.0, (self._covariance + PRIOR_WEIGHT * assumed) / (self._variance + PRIOR_WEIGHT))

    def begin_step(self, at: float, rows: Ints, lengths: Ints) -> None:
        """Update with the pass since the last call, if it computed the same requests only."""
        before, old_rows, old_lengths, sent = self._last
        if len(rows) and np.array_equal(rows, old_rows):
            grown = lengths - old_lengths
            if ((grown > 0) & (grown <= sent + 1)).all():
                self.observe(len(rows), len(rows) + int(sent.sum()), int(grown.sum()), at - before)

    def sent(self, at: float, rows: Ints, lengths: Ints, drafts: Ints) -> None:
        """Store the number of drafts of each row for the next call of ``begin_step``."""
        self._last = at, rows, lengths, drafts

    def observe(self, rows: int, tokens: int, emitted: int, seconds: float) -> None:
        """Update with a pass: its requests, its tokens with drafts, the emitted tokens and its seconds."""
        if self._passes:
            seconds = min(seconds, STALL_FACTOR * self._seconds)
        self._passes += 1
        step = max(1 / self._passes, 1 / EMA_WINDOW)
        off_tokens, off_seconds = tokens - self._tokens, seconds - self._seconds
        self._rows += step * (rows - self._rows)
        self._tokens += step * off_tokens
        self._emitted += step * (emitted - self._emitted)
        self._seconds += step * off_seconds
        self._variance += step * ((1 - step) * off_tokens * off_tokens - self._variance)
        self._covariance += step * ((1 - step) * off_tokens * off_seconds - self._covariance)
