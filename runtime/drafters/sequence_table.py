"""The context table of ``hd-paper``: for each token, the most recent sequences of four tokens after it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hdtool.runtime.kernels.compiled import Ints, compiled

LENGTH = 4
"""Tokens of a sequence, without the token before it, which is its key."""
INITIAL_KEYS = 1 << 10


class SequenceTable:
    """For each token at most ``per_key`` sequences that followed it; the least recent one is replaced.

    A sequence that occurs again becomes the most recent one and is stored once.
    """

    def __init__(self, per_key: int) -> None:
        self.per_key = per_key
        self._used = 0
        self._row_of = np.full(INITIAL_KEYS, -1, np.int32)
        self._rows = np.empty((INITIAL_KEYS, per_key, LENGTH), np.int32)
        self._filled = np.empty(INITIAL_KEYS, np.int32)

    @property
    def nbytes(self) -> int:
        return self._row_of.nbytes + self._rows.nbytes + self._filled.nbytes

    def clear(self) -> None:
        self._row_of.fill(-1)
        self._used = 0

    def add_text(self, tokens: Sequence[int]) -> None:
        """Add the sequence after each token of a text."""
        self._add(np.array(tokens, np.int32), len(tokens) - LENGTH, 1)

    def add(self, sequences: Ints) -> None:
        """Add rows of five tokens, a key and its sequence; the last row is the most recent."""
        self._add(sequences.astype(np.int32).reshape(-1), len(sequences), LENGTH + 1)

    def _add(self, tokens: Ints, count: int, stride: int) -> None:
        if count > 0:
            self._make_room(int(tokens.max()), count)
            self._used = _add(self._row_of, self._rows, self._filled, self._used, tokens, count, stride)

    def after(self, token: int) -> Ints:
        """The sequences after a token, one row each, most recent first."""
        row = self._row_of[token] if 0 <= token < len(self._row_of) else -1
        return self._rows[row, : self._filled[row]] if row >= 0 else self._rows[0, :0]

    def _make_room(self, highest: int, more: int) -> None:
        """Grow for keys up to ``highest`` and ``more`` new keys."""
        if highest >= len(self._row_of):
            added = np.full(max(highest + 1, 2 * len(self._row_of)) - len(self._row_of), -1, np.int32)
            self._row_of = np.concatenate([self._row_of, added])
        if self._used + more > len(self._rows):
            size = 2 * (self._used + more)
            rows, filled = np.empty((size, self.per_key, LENGTH), np.int32), np.empty(size, np.int32)
            rows[: self._used], filled[: self._used] = self._rows[: self._used], self._filled[: self._used]
            self._rows, self._filled = rows, filled


@compiled
def _add(row_of: Ints, rows: Ints, filled: Ints, used: int, tokens: Ints, count: int, stride: int) -> int:
    """Add ``count`` sequences, each ``stride`` tokens after the last; return the number of rows in use."""
    per_key = rows.shape[1]
    for start in range(0, count * stride, stride):
        key = tokens[start]
        if row_of[key] < 0:
            row_of[key] = used
            filled[used] = 0
            used += 1
        row = row_of[key]
        place = 0
        while place < filled[row] and not _same(rows[row, place], tokens, start + 1):
            place += 1
        if place == filled[row]:
            filled[row] = min(place + 1, per_key)
            place = filled[row] - 1
        for moved in range(place, 0, -1):
            rows[row, moved] = rows[row, moved - 1]
        rows[row, 0] = tokens[start + 1 : start + 1 + LENGTH]
    return used


@compiled
def _same(row: Ints, tokens: Ints, start: int) -> bool:
    level = 0
    while level < LENGTH and row[level] == tokens[start + level]:
        level += 1
    return level == LENGTH
