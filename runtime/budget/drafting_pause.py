"""Pauses drafting while drafts cost more time than they save."""

from __future__ import annotations

from collections.abc import Callable
from math import isnan, nan

MAX_PAUSE_STEPS = 64
"""Longest pause in steps while drafting does not pay, for drafters whose own time is not counted as a cost."""
SAVED_LEARNING_RATE = 0.1
"""Learning rate of the average seconds that a draft saves, for drafters whose own time is counted as a cost."""
RETRY_SHARE = 0.01
"""Largest share of the time that may be spent on retrying drafts."""


class DraftingPause:
    """Pauses drafting while it does not pay; each pause lasts twice as many steps as the one before, up to a limit."""

    def __init__(self, step: Callable[[], int]) -> None:
        """``step`` returns the number of the current step."""
        self.draft_seconds = 0.0
        """Seconds that the last draft took; 0 if the drafter's own time does not count."""
        self.until = 0
        """Number of the first step after the current pause; 0 if the last choice began no pause."""
        self._step = step
        self._length = 0
        """Length of the last pause in steps, 0 once drafting pays; pauses of 1 and 2 steps are not carried out."""
        self._saved = nan
        """Average seconds that a draft saves; NaN if unknown, as at first and after a pause."""

    @property
    def lasts(self) -> bool:
        return self._step() < self.until

    def retry_steps(self, plain: float) -> int:
        """Return how many steps of ``plain`` seconds to pause, so that a draft takes ``RETRY_SHARE`` of the time."""
        return int(self.draft_seconds / (RETRY_SHARE * plain))

    def learn(self, pays: bool, saved: float, max_steps: int) -> None:
        """Begin a pause of at most ``max_steps`` if drafts do not pay.

        Neither ``pays``, whether they do, nor ``saved``, the seconds that this draft saves, counts the drafting time.
        """
        if self.draft_seconds > 0:
            saved -= self.draft_seconds
            self._saved = saved if isnan(self._saved) else self._saved + SAVED_LEARNING_RATE * (saved - self._saved)
            pays = self._saved > 0
        self._length = 0 if pays else min(max(1, 2 * self._length), max_steps)
        if self._length > 2:
            self._saved = nan
            self.until = self._step() + 1 + self._length
