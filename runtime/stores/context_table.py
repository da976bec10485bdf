"""The tokens of one conversation: a ring with chains through it, from each place back to the one before after the same
last tokens. It takes a few hundred kilobytes, however long the conversation becomes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hdtool.runtime.kernels.compiled import Ints, compiled
from hdtool.runtime.stores.model_store import mixed

WINDOW = 1 << 15
"""Tokens of the conversation that are remembered; a power of two."""
HEADS = 1 << 15
CHAINS = (1, 3)
"""How many last tokens the places of each chain of the conversation share."""
SHORT, LONG = range(2)
VISITS = 4
"""Places that are visited for the latest one of a token, which other tokens of the same hash may precede."""
STRETCH = 256
"""Tokens that are compared at once; a power of two."""

TABLE = np.dtype(
    [
        ("end", np.int64),  # tokens ever added: the place of the next one
        ("ring", np.int32, WINDOW),
        ("before", np.int32, (2, WINDOW)),  # by chain and place
        ("heads", np.int32, (2, HEADS)),  # by chain and hash: the latest place
    ],
    align=True,
)


class ContextTable:
    """A table in memory. Adding a token takes nanoseconds; the ring runs over what is too old."""

    def __init__(self) -> None:
        self.memory = np.zeros(1, TABLE)
        self.reset()

    def __len__(self) -> int:
        return int(self.memory["end"][0])

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def reset(self) -> None:
        clear(self.memory[0])

    def read(self, prompt: Sequence[int] | Ints) -> int:
        """Make ``prompt`` the content of the table; returns how many of its tokens were added.

        The next turn of a conversation starts with the earlier ones, so that only its rest is new.
        """
        tokens = np.asarray(prompt, np.int64)
        known = len(self)
        if not holds(self.memory[0], tokens):
            self.reset()
            known = 0
        self.add(tokens[known:])
        return len(tokens) - known

    def add(self, tokens: Sequence[int] | Ints) -> None:
        _add_all(self.memory, np.asarray(tokens, np.int64))


@compiled
def holds(table: Any, tokens: Ints) -> bool:
    """Whether ``tokens`` start with what the table holds."""
    if table.end > len(tokens):
        return False
    place = max(np.int64(0), table.end - WINDOW)
    while place < table.end:
        # Stretches without a branch or a turn of the ring are compared many tokens at a time.
        stop = min(table.end, (place | (STRETCH - 1)) + 1)
        start, differ = place & (WINDOW - 1), np.int64(0)
        for offset in range(stop - place):
            differ |= np.int64(table.ring[start + offset]) ^ np.int64(tokens[place + offset])
        if differ != 0:
            return False
        place = stop
    return True


@compiled
def clear(table: Any) -> None:
    table.end = 0
    table.heads[:] = -1


@compiled
def _add_all(memory: Ints, tokens: Ints) -> None:
    for token in tokens:
        add(memory[0], token)


@compiled
def add(table: Any, token: Any) -> None:
    """Add the token that follows the tokens so far."""
    place = table.end
    mark = np.uint64(0)
    for length in range(1, min(CHAINS[LONG], place) + 1):
        mark = mixed(mark, table.ring[(place - length) & (WINDOW - 1)])
        if length == CHAINS[SHORT] or length == CHAINS[LONG]:
            chain = SHORT if length == CHAINS[SHORT] else LONG
            head = head_of(mark)
            table.before[chain, place & (WINDOW - 1)] = table.heads[chain, head]
            table.heads[chain, head] = place
    table.ring[place & (WINDOW - 1)] = token
    table.end = place + 1


@compiled
def latest_place(table: Any, token: Any) -> int:
    """The latest place of a token, but for that of the last token; -1 if there is none."""
    oldest = max(np.int64(0), table.end - WINDOW)
    after = np.int64(table.heads[SHORT, head_of(mixed(np.uint64(0), token))])
    for _ in range(VISITS):
        if after <= oldest:
            break
        if table.ring[(after - 1) & (WINDOW - 1)] == token:
            return int(after - 1)
        after = np.int64(table.before[SHORT, after & (WINDOW - 1)])
    return -1


@compiled
def head_of(mark: np.uint64) -> np.int64:
    """Where the chain of a hash begins; the high bits are the well mixed ones."""
    return np.int64((mark >> np.uint64(40)) & np.uint64(HEADS - 1))
