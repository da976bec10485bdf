"""How likely a draft must be to be worth its place in the engine's pass, learned from the passes themselves.

One more token in a pass costs some time, and brings as many tokens as it is likely to be taken. It pays if these come
faster than tokens come anyway. In a large batch tokens come fast and a pass has no room to spare: there nothing pays.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

LOWEST = 0.02
"""Less likely drafts cost more to find than they bring, even where a pass has all the room."""
HOPELESS = 0.9
"""Where a draft must be likelier than this, none is looked for."""
ROOM = 256.0
"""Tokens that a pass takes in the time of two passes of one, as long as nothing else is known."""
TRUST = 1.0
"""What is assumed weighs as much as what was seen where the tokens of passes have this variance."""
MEMORY = 64.0
"""Passes that are remembered."""
STALLED = 4.0
"""A pass that takes so many times as long as passes do was held up by something else."""

Ints = npt.NDArray[Any]
NONE = np.empty(0, np.int64)


class Pace:
    """What a draft must be worth, by the passes so far; ``fixed`` leaves it to somebody who knows."""

    def __init__(self, fixed: float | None = None) -> None:
        self._fixed = fixed
        self._passes = 0
        # Means of what passes had and took, and how tokens and seconds vary, alone and together.
        self._rows = self._tokens = self._emitted = self._seconds = 0.0
        self._spread = self._together = 0.0
        self._last: tuple[float, Ints, Ints, Ints] = 0.0, NONE, NONE, NONE

    def floor(self, rows: int) -> float:
        """The odds from which on a draft pays in a batch of so many requests."""
        if self._fixed is not None:
            return self._fixed
        if not self._passes:
            return max(LOWEST, rows / (ROOM + rows))
        slope = self.seconds_per_token
        seconds = max(self._seconds + slope * (rows - self._rows), slope * rows)
        return max(LOWEST, slope * rows * self._emitted / self._rows / seconds)

    @property
    def seconds_per_token(self) -> float:
        """What one more token in a pass costs: the slope of time over tokens, drawn to what is assumed."""
        assumed = self._seconds / (ROOM + self._tokens)
        return max(0.0, (self._together + TRUST * assumed) / (self._spread + TRUST))

    def asked(self, at: float, rows: Ints, lengths: Ints) -> None:
        """The engine asks for drafts again: learn from the pass in between, if it was over the same requests alone."""
        before, old_rows, old_lengths, sent = self._last
        if len(rows) and np.array_equal(rows, old_rows):
            grown = lengths - old_lengths
            if ((grown > 0) & (grown <= sent + 1)).all():
                self.hear(len(rows), len(rows) + int(sent.sum()), int(grown.sum()), at - before)

    def sent(self, at: float, rows: Ints, lengths: Ints, drafts: Ints) -> None:
        """What the engine was given when it asked: so many drafts for each row."""
        self._last = at, rows, lengths, drafts

    def hear(self, rows: int, tokens: int, emitted: int, seconds: float) -> None:
        """A pass for so many requests took in so many tokens, drafts included, and emitted so many in so much time."""
        if self._passes:
            seconds = min(seconds, STALLED * self._seconds)
        self._passes += 1
        step = max(1 / self._passes, 1 / MEMORY)
        off_tokens, off_seconds = tokens - self._tokens, seconds - self._seconds
        self._rows += step * (rows - self._rows)
        self._tokens += step * off_tokens
        self._emitted += step * (emitted - self._emitted)
        self._seconds += step * off_seconds
        self._spread += step * ((1 - step) * off_tokens * off_tokens - self._spread)
        self._together += step * ((1 - step) * off_tokens * off_seconds - self._together)
