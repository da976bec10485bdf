"""The minimum probability at which a draft token pays off, where vLLM or SGLang runs the passes.

A draft token adds seconds to a pass, and its probability is the expected number of tokens that it adds to the answer.
The draft pays off if this number per added second exceeds the throughput of the pass. In a large batch a pass is
compute-bound, so no draft pays off.
"""

from __future__ import annotations

import numpy as np

from hdtool.runtime.budget.averages import PASS_LEARNING_RATE, LinearCost, MovingAverage
from hdtool.runtime.kernels.compiled import Ints

MIN_FLOOR = 0.02
"""Lower bound on the minimum probability: less probable drafts cost more to find than they save."""
NO_DRAFT_ABOVE = 0.9
"""Minimum probability from which on nothing is drafted."""
PRIOR_TOKENS, PRIOR_TOKENS_ON_CPU = 256.0, 32.0
"""Prior number of tokens at which a pass takes twice as long as with one token, on a GPU and on a CPU.

A CPU computes more slowly, compared with how fast it reads weights.
"""

NO_TOKENS = np.empty(0, np.int64)


class MinProbability:
    """Estimates from past passes the minimum probability at which a draft pays off; ``fixed`` replaces the estimate."""

    def __init__(self, fixed: float | None = None, *, on_cpu: bool = False) -> None:
        self._fixed = fixed
        self._prior_tokens = PRIOR_TOKENS_ON_CPU if on_cpu else PRIOR_TOKENS
        self._cost = LinearCost(self._prior_tokens)
        self._rows, self._emitted = MovingAverage(PASS_LEARNING_RATE), MovingAverage(PASS_LEARNING_RATE)
        """Mean numbers of requests and of emitted tokens per pass."""
        self._last: tuple[float, Ints, Ints, Ints] = 0.0, NO_TOKENS, NO_TOKENS, NO_TOKENS

    def floor(self, rows: int) -> float:
        """Return the minimum draft probability in a batch of ``rows`` requests."""
        if self._fixed is not None:
            return self._fixed
        if not self._cost.observed:
            return max(MIN_FLOOR, rows / (self._prior_tokens + rows))
        slope = self._cost.per_row
        seconds = max(self._cost.seconds + slope * (rows - self._rows.mean), slope * rows)
        return max(MIN_FLOOR, slope * rows * self._emitted.mean / self._rows.mean / seconds)

    def begin_step(self, at: float, rows: Ints, lengths: Ints) -> None:
        """Update the averages with the pass since the last ``record_drafts``, if it ran exactly the recorded requests.

        ``at`` is the current time in seconds, and ``lengths`` are the context lengths of the ``rows``.
        """
        before, old_rows, old_lengths, sent = self._last
        if len(rows) and np.array_equal(rows, old_rows):
            grown = lengths - old_lengths
            if ((grown > 0) & (grown <= sent + 1)).all():
                self.observe(len(rows), len(rows) + int(sent.sum()), int(grown.sum()), at - before)

    def record_drafts(self, at: float, rows: Ints, lengths: Ints, drafts: Ints) -> None:
        """Record the number of draft tokens of each row for the next call of ``begin_step``."""
        self._last = at, rows, lengths, drafts

    def observe(self, rows: int, tokens: int, emitted: int, seconds: float) -> None:
        """Update the averages with a pass: its numbers of requests, computed and emitted tokens, and its duration."""
        self._cost.observe(tokens, seconds)
        self._rows.observe(rows)
        self._emitted.observe(emitted)
