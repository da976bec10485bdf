"""The table of sequences: the four tokens that came last behind each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

LENGTH = 4
"""Tokens of a sequence, behind the token that is its key."""
KEYS_AT_FIRST = 1 << 10

Ints = npt.NDArray[Any]


class SequenceTable:
    """For each token at most ``per_key`` sequences that followed it; the least recent one makes room.

    A sequence that comes again becomes the most recent one and is held once.
    """

    def __init__(self, per_key: int) -> None:
        self.per_key = per_key
        self._used = 0
        self._row_of = np.full(KEYS_AT_FIRST, -1, np.int32)
        self._rows = np.empty((KEYS_AT_FIRST, per_key, LENGTH), np.int32)
        self._filled = np.empty(KEYS_AT_FIRST, np.int32)

    @property
    def nbytes(self) -> int:
        return self._row_of.nbytes + self._rows.nbytes + self._filled.nbytes

    def clear(self) -> None:
        self._row_of.fill(-1)
        self._used = 0

    def add_text(self, tokens: Sequence[int]) -> None:
        """Every token of a text that four others follow."""
        self._add(np.array(tokens, np.int32), len(tokens) - LENGTH, 1)

    def add(self, sequences: Ints) -> None:
        """Sequences behind their keys, a row of five tokens each; the last row is the most recent."""
        self._add(sequences.astype(np.int32).reshape(-1), len(sequences), LENGTH + 1)

    def _add(self, tokens: Ints, count: int, stride: int) -> None:
        if count > 0:
            self._make_room(int(tokens.max()), count)
            self._used = _add(self._row_of, self._rows, self._filled, self._used, tokens, count, stride)

    def after(self, token: int) -> Ints:
        """The sequences that followed a token, a row each, the most recent first."""
        row = self._row_of[token] if 0 <= token < len(self._row_of) else -1
        return self._rows[row, : self._filled[row]] if row >= 0 else self._rows[0, :0]

    def _make_room(self, highest: int, more: int) -> None:
        """For the highest token as a key, and for as many new keys as there may be."""
        if highest >= len(self._row_of):
            added = np.full(max(highest + 1, 2 * len(self._row_of)) - len(self._row_of), -1, np.int32)
            self._row_of = np.concatenate([self._row_of, added])
        if self._used + more > len(self._rows):
            size = 2 * (self._used + more)
            rows, filled = np.empty((size, self.per_key, LENGTH), np.int32), np.empty(size, np.int32)
            rows[: self._used], filled[: self._used] = self._rows[: self._used], self._filled[: self._used]
            self._rows, self._filled = rows, filled


@njit(cache=True, nogil=True)
def _add(row_of: Ints, rows: Ints, filled: Ints, used: int, tokens: Ints, count: int, stride: int) -> int:
    """Add ``count`` sequences, each ``stride`` tokens behind the last; how many rows are in use afterwards."""
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


@njit(cache=True, nogil=True)
def _same(row: Ints, tokens: Ints, start: int) -> bool:
    level = 0
    while level < LENGTH and row[level] == tokens[start + level]:
        level += 1
    return level == LENGTH
