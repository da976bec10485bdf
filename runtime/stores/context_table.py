"""The latest tokens of a conversation, with hash chains that find where the last tokens occurred before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hdtool.runtime.kernels.compiled import Ints, compiled
from hdtool.runtime.stores.model_store import mix_hash

CONTEXT_WINDOW = 1 << 15
"""Number of latest tokens of the conversation that the table holds; a power of two."""
CHAIN_HEADS = 1 << 15
CHAIN_LENGTHS = (1, 3)
"""Numbers of preceding tokens whose hash selects the short and the long chain of a position."""
SHORT_CHAIN, LONG_CHAIN = range(2)
MAX_LATEST_VISITS = 4
"""Maximum number of chain entries visited to find a token's latest position; other tokens may share the chain."""
COMPARED_AT_ONCE = 256
"""Maximum number of tokens that ``holds`` compares without a branch; a power of two."""

CONTEXT_TABLE = np.dtype(
    [
        ("end", np.int64),  # number of tokens ever added, which is the position of the next
        ("ring", np.int32, CONTEXT_WINDOW),
        ("previous", np.int32, (2, CONTEXT_WINDOW)),  # previous position in the chain, by kind of chain and position
        ("heads", np.int32, (2, CHAIN_HEADS)),  # latest position, by kind of chain and hash
    ],
    align=True,
)


class ContextTable:
    """The latest tokens of a conversation, with hash chains for prompt lookup.

    Once the table is full, the oldest tokens are overwritten.
    """

    def __init__(self) -> None:
        self.memory = np.zeros(1, CONTEXT_TABLE)
        self.reset()

    def __len__(self) -> int:
        """Return the number of tokens ever added, including those that were overwritten."""
        return int(self.memory["end"][0])

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def reset(self) -> None:
        clear(self.memory[0])

    def read(self, prompt: Sequence[int] | Ints) -> int:
        """Make ``prompt`` the content of the table, and return how many tokens were appended.

        If the prompt starts with the tokens added so far, as at a conversation's next turn, the table is only extended;
        otherwise it is rebuilt.
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
    """Return True if ``tokens`` start with those added to the table; tokens that were overwritten are not compared."""
    if table.end > len(tokens):
        return False
    position = max(np.int64(0), table.end - CONTEXT_WINDOW)
    while position < table.end:
        # Compare runs that don't wrap around the ring, without branches.
        stop = min(table.end, (position | (COMPARED_AT_ONCE - 1)) + 1)
        start, differ = position & (CONTEXT_WINDOW - 1), np.int64(0)
        for offset in range(stop - position):
            differ |= np.int64(table.ring[start + offset]) ^ np.int64(tokens[position + offset])
        if differ != 0:
            return False
        position = stop
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
    """Append a token, and link its position into a short chain and a long chain."""
    position = table.end
    suffix_hash = np.uint64(0)
    for length in range(1, min(CHAIN_LENGTHS[LONG_CHAIN], position) + 1):
        suffix_hash = mix_hash(suffix_hash, table.ring[(position - length) & (CONTEXT_WINDOW - 1)])
        if length == CHAIN_LENGTHS[SHORT_CHAIN] or length == CHAIN_LENGTHS[LONG_CHAIN]:
            chain = SHORT_CHAIN if length == CHAIN_LENGTHS[SHORT_CHAIN] else LONG_CHAIN
            head = head_of(suffix_hash)
            table.previous[chain, position & (CONTEXT_WINDOW - 1)] = table.heads[chain, head]
            table.heads[chain, head] = position
    table.ring[position & (CONTEXT_WINDOW - 1)] = token
    table.end = position + 1


@compiled
def latest_position(table: Any, token: Any) -> int:
    """Return a token's latest position, ignoring the last position of the table; -1 if none is found."""
    oldest = max(np.int64(0), table.end - CONTEXT_WINDOW)
    after = np.int64(table.heads[SHORT_CHAIN, head_of(mix_hash(np.uint64(0), token))])
    for _ in range(MAX_LATEST_VISITS):
        if after <= oldest:
            break
        if table.ring[(after - 1) & (CONTEXT_WINDOW - 1)] == token:
            return int(after - 1)
        after = np.int64(table.previous[SHORT_CHAIN, after & (CONTEXT_WINDOW - 1)])
    return -1


@compiled
def head_of(suffix_hash: np.uint64) -> np.int64:
    """Return the index of the chain for a hash, taken from the hash's high bits, which are mixed best."""
    return np.int64((suffix_hash >> np.uint64(40)) & np.uint64(CHAIN_HEADS - 1))
