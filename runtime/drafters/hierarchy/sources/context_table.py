"""The context table: matches of the last tokens in the conversation.

A ring of the latest tokens and two chains through it, as compressors of the LZ family keep them: from
each place back to the one before with the same last token, and to the one with the same last three.
Adding a token takes nanoseconds and nothing is ever evicted: the ring runs over what is too old.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hdtool.runtime.kernels.compiled import Ints, compiled
from hdtool.runtime.stores.history.log_search import LONGEST_MATCH
from hdtool.runtime.stores.model_store import mixed

WINDOW = 1 << 15
"""Tokens that are remembered; a power of two."""
HEADS = 1 << 15
LONGEST_HASH = 8
"""Most last tokens of a node that are hashed."""
LEVELS = LONGEST_HASH + 4
"""The n-gram orders of matches: their length up to 8, and then up to 12, 16, 24 and 32 tokens."""
CHAINS = (1, 3)
"""How many last tokens the places of each chain share."""
SHORT, LONG = range(2)
PLACES = 64
"""Places that are read of a chain; older ones add little."""
STEPS = 2 * PLACES
"""Places that are visited of a chain, hash collisions included."""
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
    """The tokens of one conversation; a few hundred kilobytes, however long it becomes."""

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


@compiled
def length_at(table: Any, tail: Ints, place: Any, oldest: Any) -> int:
    """How many tokens before a place equal the last ones of ``tail``."""
    length, most = 0, min(np.int64(LONGEST_MATCH), place - oldest)
    while length < most:
        token = tail[len(tail) - 1 - length]
        if token < 0 or table.ring[(place - 1 - length) & (WINDOW - 1)] != token:
            break
        length += 1
    return length


@compiled
def level_of(length: int) -> int:
    """The n-gram order of a match."""
    if length <= LONGEST_HASH:
        return length
    return LONGEST_HASH + (1 if length <= 12 else 2 if length <= 16 else 3 if length <= 24 else 4)
