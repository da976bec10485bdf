"""Recycled logits: the tokens that the target ranked highest when it last read the same tokens.

The table is filled from all nodes of a tree, accepted or not (as Token Recycling does). Rankings are kept by the last
token and, hashed, by more of them. Memory is allocated when the first ranking arrives.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hdtool.runtime.kernels.compiled import Array, compiled
from hdtool.runtime.kernels.memory.no_copy import Pinned
from hdtool.runtime.kernels.memory.raw_memory import array_at, prefetch
from hdtool.runtime.stores.model_store import mixed

BEST = 8
"""Tokens of a ranking."""
LONGEST_NODE = 5
"""The most last tokens that rankings are kept by."""
HASHED_ROWS = 1 << 15
"""For each of the longer lengths."""
WHOLE = 1000
"""Shares are in thousandths."""
SHARPNESS = 1.5
"""Shares are of probabilities raised to this power: the best token is chosen more often than its probability."""
LONG_RUN = 4
"""Rankings with the same best token so many times in a row have a weight of their own."""

RANKING = np.dtype(
    [
        ("tokens", np.int32, BEST),  # best first
        ("shares", np.int16, BEST),  # in thousandths
        ("tag", np.uint32),  # the other half of the hash, which detects collisions
        ("run", np.uint8),  # how many times in a row the best token was the same
        ("unused", np.uint8, 11),
    ]
)
"""A row of the table. It fills one cache line, so that it costs one cache miss."""
LINE = RANKING.itemsize

RECYCLED = np.dtype(
    [
        ("rankings", np.int64),  # address of the rows; 0 before anything is kept
        ("vocabulary", np.int64),  # rows for a single token
        ("longest", np.int64),  # last tokens that rows are kept by; 0 before anything is kept
    ],
    align=True,
)


class Recycled(Pinned):
    """The table."""

    def __init__(self) -> None:
        self.memory = np.zeros(1, RECYCLED)
        self._lines: Array | None = None
        # Compiled, or loaded from the cache, before a step needs it.
        tokens, scores = np.zeros((0, BEST), np.int64), np.zeros((0, BEST), np.float32)
        _keep(self.memory, tokens, tokens, scores)

    def keep(self, tails: Array, tokens: Array, scores: Array, vocabulary: int) -> None:
        """Keep the rankings of nodes with these last tokens, a row each; the most probable node comes first."""
        if self._lines is None:
            self._allocate(vocabulary)
        _keep(self.memory, tails, tokens, scores)

    def forget(self) -> None:
        """Drop all rankings."""
        self._lines = None
        self.memory[:] = np.zeros(1, RECYCLED)

    def begin_with(self, known: Array, *, recycles: bool) -> None:
        """Begin with rankings of single tokens: rows of tokens and of their probabilities in millionths.

        A table that ``recycles`` has room for more, and replaces these as the target reads the tokens.
        """
        self._allocate(len(known), LONGEST_NODE if recycles else 1)
        longest, self.memory["longest"] = int(self.memory["longest"][0]), 1
        tails = np.arange(len(known)).reshape(-1, 1)
        with np.errstate(divide="ignore"):
            scores = np.log(known[:, BEST:].astype(np.float32))
        _keep(self.memory, tails, known[:, :BEST].astype(np.int64), scores)
        self.memory["longest"] = longest

    def _allocate(self, vocabulary: int, longest: int = LONGEST_NODE) -> None:
        rows = vocabulary + (longest - 1) * HASHED_ROWS
        self._lines = np.zeros((rows + 1) * LINE, np.uint8)  # one more, for alignment
        self.memory["rankings"] = -(-self._lines.ctypes.data // LINE) * LINE
        self.memory["vocabulary"], self.memory["longest"] = vocabulary, longest


@compiled
def _keep(memory: Array, tails: Array, tokens: Array, scores: Array) -> None:
    table = memory[0]
    rankings = rankings_of(table)
    shares = np.empty(BEST)
    marks = np.zeros(LONGEST_NODE + 1, np.uint64)
    for node in range(len(tails) - 1, -1, -1):  # the most probable node last: its ranking stays
        if not np.isfinite(scores[node, 0]):
            continue
        for length in range(1, table.longest + 1):
            marks[length] = mixed(marks[length - 1], tails[node, -length])
        fetch_rankings(table, tails[node, -1], marks)
        for place in range(BEST):
            shares[place] = np.exp(SHARPNESS * (scores[node, place] - scores[node, 0]))
        shares *= WHOLE / shares.sum()
        for length in range(1, table.longest + 1):
            row = row_of(table, tails[node, -1], marks[length], length)
            if row >= 0:
                kept, tag = rankings[row], tag_of(marks[length])
                again = kept.tag == tag and kept.tokens[0] == tokens[node, 0]
                kept.tag, kept.run = tag, min(kept.run + 1, LONG_RUN) if again else 0
                for place in range(BEST):
                    kept.tokens[place], kept.shares[place] = tokens[node, place], int(shares[place])


@compiled
def fetch_rankings(table: Any, last: Any, marks: Array) -> None:
    """Prefetch the rankings after the last tokens with these hashes, all at once."""
    rankings = rankings_of(table)
    for length in range(1, table.longest + 1):
        row = row_of(table, last, marks[length], length)
        if row >= 0:
            prefetch(rankings, row)


@compiled
def tag_of(mark: np.uint64) -> Any:
    """The half of a hash that does not select the row, to detect collisions."""
    return np.uint32(mark >> np.uint64(32))


@compiled
def row_of(table: Any, last: Any, mark: np.uint64, length: int) -> int:
    """The row of the table after ``length`` tokens of this hash, which end with ``last``; or -1."""
    if length > table.longest or not 0 <= last < table.vocabulary:
        return -1
    if length == 1:
        return int(last)
    return int(table.vocabulary + (length - 2) * HASHED_ROWS + np.int64(mark & np.uint64(HASHED_ROWS - 1)))


@compiled
def rankings_of(table: Any) -> Array:
    """All rows."""
    return array_at(table.rankings, table.vocabulary + (table.longest - 1) * HASHED_ROWS, RANKING)
