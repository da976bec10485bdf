"""Recycled logits: the tokens that the target ranked highest when it last stood behind the same tokens.

A table for each kind: of the nodes that it took, which copies what it thought when a token was really said,
or of all that it verified. Rankings are kept by the last token and, hashed, by the last two and three.
Nothing is kept, and no memory taken, before the first is heard.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from hdtool.runtime.memory import array_at
from hdtool.runtime.model_store import mixed

BEST = 8
"""Tokens of a ranking."""
LONGEST_NODE = 5
HASHED_ROWS = 1 << 17
"""For each of the longer lengths."""
SURENESSES = 8
"""Rankings are told apart by how much of the chance of the best tokens the first one has."""

RECYCLED = np.dtype(
    [
        ("tokens", np.int64),  # address of the tokens by row, best first; 0 before anything is kept
        ("shares", np.int64),  # in thousandths
        ("tags", np.int64),
        ("vocabulary", np.int64),  # rows for a single token
        ("longest", np.int64),  # tokens of a node that are looked at
    ],
    align=True,
)

Array = npt.NDArray[Any]


class Recycled:
    """The table; ``longest`` of 1 keeps by the last token alone."""

    def __init__(self, longest: int = LONGEST_NODE) -> None:
        self.memory = np.zeros(1, RECYCLED)
        self._longest = longest
        self._arrays: tuple[Array, ...] = ()

    def keep(self, tails: Array, tokens: Array, scores: Array, vocabulary: int) -> None:
        """Keep rankings of nodes whose last tokens are the rows of ``tails``; of those that agree in them, the first."""
        if not self._arrays:
            self._allocate(vocabulary)
        _keep(self.memory, tails, tokens, scores)

    def _allocate(self, vocabulary: int) -> None:
        rows = vocabulary + (self._longest - 1) * HASHED_ROWS
        self._arrays = np.zeros((rows, BEST), np.int32), np.zeros((rows, BEST), np.int16), np.zeros(rows, np.uint32)
        for field, array in zip(("tokens", "shares", "tags"), self._arrays, strict=True):
            self.memory[field] = array.ctypes.data
        self.memory["vocabulary"], self.memory["longest"] = vocabulary, self._longest


WHOLE = 1000
SHARP = 1.5
BLENDED = 2
OLD = 0.8


@njit(cache=True, nogil=True)
def _keep(memory: Array, tails: Array, tokens: Array, scores: Array) -> None:
    table = memory[0]
    all_tokens, all_shares, tags = kept_tokens(table), kept_shares(table), kept_tags(table)
    for node in range(len(tails) - 1, -1, -1):
        if not np.isfinite(scores[node, 0]):
            continue
        shares = np.exp(SHARP*(scores[node,:BEST] - scores[node, 0]))
        shares *= WHOLE / shares.sum()
        mark = np.uint64(0)
        for length in range(1, table.longest + 1):
            mark = mixed(mark, tails[node, -length])
            row = row_of(table, tails[node, -1], mark, length)
            if row >= 0:
                if tags[row] != tag_of(mark) or length > BLENDED:
                    all_shares[row] = 0
                tags[row] = tag_of(mark)
                _blend(all_tokens[row], all_shares[row], tokens[node], shares)


@njit(cache=True, nogil=True)
def tag_of(mark: np.uint64) -> Any:
    return np.uint32(mark >> np.uint64(32))


@njit(cache=True, nogil=True)
def sureness(scores: Array) -> int:
    if not np.isfinite(scores[0]):
        return -1
    whole = 0.0
    for score in scores:
        whole += np.exp(score - scores[0])
    return min(SURENESSES - 1, int(SURENESSES / whole))


@njit(cache=True, nogil=True)
def row_of(table: Any, last: Any, mark: np.uint64, length: int) -> int:
    """Where the table keeps what followed ``length`` tokens of this hash, the ``last`` of them included; or -1."""
    if length > table.longest or not 0 <= last < table.vocabulary:
        return -1
    if length == 1:
        return int(last)
    return int(table.vocabulary + (length - 2) * HASHED_ROWS + np.int64(mark & np.uint64(HASHED_ROWS - 1)))


@njit(cache=True, nogil=True)
def kept_tokens(table: Any) -> Array:
    return array_at(table.tokens, (table.vocabulary + (table.longest - 1) * HASHED_ROWS, BEST), np.int32)


@njit(cache=True, nogil=True)
def kept_shares(table: Any) -> Array:
    return array_at(table.shares, (table.vocabulary + (table.longest - 1) * HASHED_ROWS, BEST), np.int16)


@njit(cache=True, nogil=True)
def kept_tags(table: Any) -> Array:
    return array_at(table.tags, table.vocabulary + (table.longest - 1) * HASHED_ROWS, np.uint32)


@njit(cache=True, nogil=True)
def _blend(old_tokens: Array, old_shares: Array, tokens: Array, shares: Array) -> None:
    """Mix a ranking into the one that is kept."""
    if old_shares[0] == 0:
        for place in range(BEST):
            old_tokens[place], old_shares[place] = tokens[place], np.int16(shares[place])
        return
    both_tokens = np.empty(2 * BEST, np.int64)
    both = np.empty(2 * BEST)
    count = BEST
    for place in range(BEST):
        both_tokens[place], both[place] = tokens[place], (1 - OLD) * shares[place]
    for place in range(BEST):
        at = 0
        while at < BEST and tokens[at] != old_tokens[place]:
            at += 1
        if at == BEST:
            at = count
            both_tokens[at], both[at] = old_tokens[place], 0.0
            count += 1
        both[at] += OLD * old_shares[place]
    for place in range(BEST):
        best = place
        for at in range(place, count):
            if both[at] > both[best]:
                best = at
        both[place], both[best] = both[best], both[place]
        both_tokens[place], both_tokens[best] = both_tokens[best], both_tokens[place]
        old_tokens[place], old_shares[place] = both_tokens[place], np.int16(both[place])
