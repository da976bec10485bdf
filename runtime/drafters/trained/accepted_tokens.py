"""Accepted tokens with the hidden states before them, which a trained drafter has not read yet."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hdtool.runtime.accept import Accepted
from hdtool.runtime.model.hidden_states import picked
from hdtool.runtime.verified import Verified

NO_HIDDEN = torch.empty((0, 0))
"""Where the target's hidden states are not watched."""
LONG_PAUSE = 32
"""Steps without a pass of the drafter after which it forgets what it had read."""
READ_AFTER_PAUSE = 128
"""The last tokens, which it reads then."""


class Unread(NamedTuple):
    """Accepted tokens, and the hidden states before them ``[tokens, width]``."""

    hidden: torch.Tensor
    tokens: list[int]
    skipped: int
    """Tokens before these that are not read, after a long pause."""


class AcceptedTokens:
    """Queues what was accepted until the drafter runs; while drafting pauses, nothing is computed.

    A token is paired with the hidden state that it was chosen from: that of the token before it.
    """

    def __init__(self, columns: slice | None = None) -> None:
        """``columns`` of the target's hidden states are read; see ``Target.watch_hidden``."""
        self._columns = columns
        self._queued: list[tuple[torch.Tensor, list[int]]] = []
        self.begin([0])

    def begin(self, prompt: list[int]) -> None:
        """Start another answer, whose first hidden states are those of the prompt."""
        self._queued.clear()
        self._prompt, self._is_prompt = list(prompt), True

    def add(self, accepted: Accepted, verified: Verified) -> None:
        """Queue the accepted tokens of a step."""
        hidden = NO_HIDDEN if verified.hidden is None or self._columns is None else verified.hidden[:, self._columns]
        if self._is_prompt:
            self._is_prompt = False
            self._queued.append((hidden, [*self._prompt[1:], accepted.tokens[-1]]))
            return
        rows = [0, *(node + 1 for node in accepted.path)]
        self._queued.append((hidden if hidden is NO_HIDDEN else picked(hidden, rows), accepted.tokens))

    def take(self) -> Unread:
        """What is queued, in one piece; after a long pause, the last tokens of it."""
        steps = len(self._queued)
        hidden = torch.cat([rows for rows, _ in self._queued]) if steps > 1 else self._queued[0][0]
        tokens = [token for _, chosen in self._queued for token in chosen]
        self._queued.clear()
        if steps <= LONG_PAUSE or len(tokens) <= READ_AFTER_PAUSE:
            return Unread(hidden, tokens, 0)
        return Unread(hidden[-READ_AFTER_PAUSE:], tokens[-READ_AFTER_PAUSE:], len(tokens) - READ_AFTER_PAUSE)
