"""The queue of accepted tokens, with the target's hidden states, that a trained drafter reads when it next runs."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hdtool.runtime.caches.accepted_path_moves import select_rows
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.engine_interface import Verified

NO_HIDDEN = torch.empty((0, 0))
"""Placeholder for hidden states that the drafter does not read."""
LONG_PAUSE = 32
"""Number of steps without a pass after which a drafter reads only the last tokens."""
READ_AFTER_PAUSE = 128
"""Number of last tokens that a drafter reads after a long pause."""


class QueuedTokens(NamedTuple):
    """Accepted tokens, and the hidden states ``[tokens, width]`` from which they were chosen."""

    hidden: torch.Tensor
    tokens: list[int]
    skipped: int
    """Number of tokens that were skipped before ``tokens`` after a long pause; otherwise 0."""


class AcceptedTokens:
    """Queues accepted tokens and their hidden states until the drafter runs.

    Each token is paired with the hidden state that it was chosen from, which is that of the token before it.
    """

    def __init__(self, columns: slice | None = None) -> None:
        """``columns`` selects the hidden states to queue (see ``Target.watch_hidden``); by default, none are queued."""
        self._columns = columns
        self._queued: list[tuple[torch.Tensor, list[int]]] = []
        self._tokens = 0
        """Number of queued tokens."""
        self.begin([0])

    def begin(self, prompt: list[int]) -> None:
        """Begin another answer; the first hidden states added must be those of its prompt."""
        self._queued.clear()
        self._tokens = 0
        self._prompt, self._is_prompt = list(prompt), True

    def add(self, accepted: Accepted, verified: Verified) -> None:
        """Queue the accepted tokens of a step."""
        hidden = NO_HIDDEN if verified.hidden is None or self._columns is None else verified.hidden[:, self._columns]
        if self._is_prompt:
            self._is_prompt = False
            return self._queue(hidden, [*self._prompt[1:], accepted.tokens[-1]])
        self._queue(hidden if hidden is NO_HIDDEN else select_rows(hidden, accepted.rows), accepted.tokens)

    def _queue(self, hidden: torch.Tensor, tokens: list[int]) -> None:
        self._queued.append((hidden, tokens))
        self._tokens += len(tokens)

    @property
    def unread(self) -> int:
        """Number of tokens that ``take`` would return."""
        return self._tokens if len(self._queued) <= LONG_PAUSE else min(self._tokens, READ_AFTER_PAUSE)

    def take(self) -> QueuedTokens:
        """Empty the queue and return its contents; after a long pause, only the last ``READ_AFTER_PAUSE`` tokens."""
        steps = len(self._queued)
        hidden = torch.cat([rows for rows, _ in self._queued]) if steps > 1 else self._queued[0][0]
        tokens = [token for _, chosen in self._queued for token in chosen]
        self._queued.clear()
        self._tokens = 0
        if steps <= LONG_PAUSE or len(tokens) <= READ_AFTER_PAUSE:
            return QueuedTokens(hidden, tokens, 0)
        return QueuedTokens(hidden[-READ_AFTER_PAUSE:], tokens[-READ_AFTER_PAUSE:], len(tokens) - READ_AFTER_PAUSE)
