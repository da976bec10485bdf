"""Whether heads are worth asking where other sources draft without them."""

from __future__ import annotations

FADING = 0.03
"""How far one step moves what steps with, or without, the heads are known to bring."""
FIRST = 8
"""Steps of either kind before they are compared."""
LONGEST = 128
"""Steps after which the worse kind is tried again, at most."""
TRIED = 2
"""Steps of the worse kind in a row: the first one after a pause also reads what waited."""


class HeadsGate:
    """Compares what steps with the heads and steps without them bring for their time, and takes the better kind.

    The worse kind is tried again now and then, less often each time it proves worse.
    """

    def __init__(self) -> None:
        self.now = True
        """Whether to ask them in the step to come."""
        self._tokens, self._seconds = [0.0, 0.0], [0.0, 0.0]
        self._heard = [0, 0]
        self._pause, self._left = FIRST, FIRST
        self._better = True

    def hear(self, tokens: float, seconds: float) -> None:
        """What the step that ``now`` decided on is expected to have brought, and its time."""
        kind = int(self.now)
        share = max(FADING, 1 / (1 + self._heard[kind]))
        self._tokens[kind] += share * (tokens - self._tokens[kind])
        self._seconds[kind] += share * (seconds - self._seconds[kind])
        self._heard[kind] += 1
        self._left -= 1
        if self._left <= 0:
            self._next()

    def _next(self) -> None:
        if min(self._heard) < FIRST:
            self.now, self._left = not self.now, FIRST
            return
        with_heads, without = (self._tokens[kind] / self._seconds[kind] for kind in (1, 0))
        better = with_heads > without
        if self.now != self._better:  # the worse kind was tried
            self._pause = min(2 * self._pause, LONGEST) if better == self._better else FIRST
            self.now, self._left = better, self._pause
        else:
            self.now, self._left = (not better, TRIED) if better == self._better else (better, FIRST)
        self._better = better
