"""The model store: what the model itself often says, found by the last one to four tokens.

A hash table of prefixes. Each has a range of rows: the sequences that most often follow it, with
their counts, most frequent first. One compiled call looks up all four lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from hdtool.data.store import Manifest, TokenizerMark, read_manifest, require

KIND = "model"
LONGEST_PREFIX = 4
CONTINUATION = 4

NO_TOKEN = -1
"""Fills up a key's tokens behind a shorter prefix."""
LENGTH, START, STOP, TOTAL = range(LONGEST_PREFIX, LONGEST_PREFIX + 4)
KEY_WIDTH = LONGEST_PREFIX + 4
"""A key is the tokens of its prefix, their number, its range of rows, and its total."""
COUNT = CONTINUATION
ROW_WIDTH = CONTINUATION + 1
"""A row is the tokens of a continuation and its count."""

Ints = npt.NDArray[Any]


class Levels(NamedTuple):
    """How a context goes on after its last four, three, two tokens and its last one, as far as these are known."""

    lengths: Ints
    """Tokens of each known prefix, the longest first."""
    totals: Ints
    """The counts of all that follows each prefix, also of what the store left out."""
    starts: Ints
    stops: Ints
    """The range of rows of each prefix."""
    tokens: Ints
    """A continuation in each row, always whole."""
    counts: Ints
    """How often it follows the prefix, most often first within each."""


class ModelStore:
    """A store opened for look-ups; its files are mapped, read only where they are touched."""

    def __init__(self, folder: Path, tokenizer: TokenizerMark | None = None) -> None:
        self.folder = folder
        self.manifest: Manifest = read_manifest(folder)
        require(self.manifest, folder, KIND, tokenizer)
        self._vocabulary = self.manifest.tokenizer.vocab_size
        self.slots = self._open("slots", 1).reshape(-1)
        self.keys = self._open("keys", KEY_WIDTH)
        self.rows = self._open("rows", ROW_WIDTH)

    def _open(self, part: str, width: int) -> Ints:
        # numba hands over plain writable arrays fastest; what is written to a "c" mapping stays in memory.
        mapped = np.memmap(self.folder / self.manifest.files[part].name, np.int32, "c")
        return np.asarray(mapped).reshape(-1, width)

    def after(self, context: Sequence[int] | Ints, most: int = 64) -> Levels:
        """At most ``most`` continuations of each suffix of ``context`` that is a key."""
        tail = np.array(context[-LONGEST_PREFIX:], np.int64)
        return Levels(*look_up(self.slots, self.keys, self.rows, tail, most, self._vocabulary))


@njit(cache=True, nogil=True)
def look_up(slots: Ints, keys: Ints, rows: Ints, tail: Ints, most: int, vocabulary: int) -> tuple[Ints, ...]:
    """The fields of ``Levels`` for a context of at most four tokens."""
    found = np.empty(LONGEST_PREFIX, np.int64)
    lengths = np.empty(LONGEST_PREFIX, np.int64)
    totals = np.empty(LONGEST_PREFIX, np.int64)
    starts = np.empty(LONGEST_PREFIX, np.int64)
    stops = np.empty(LONGEST_PREFIX, np.int64)
    levels, size = 0, 0
    for length in range(len(tail), 0, -1):
        key = find(slots, keys, tail, len(tail) - length, length)
        # A damaged file must not lead out of the arrays, nor to a token that no model has.
        if key >= 0 and 0 <= keys[key, START] <= keys[key, STOP] <= len(rows):
            found[levels], lengths[levels], totals[levels] = key, length, keys[key, TOTAL]
            starts[levels] = size
            size += min(most, keys[key, STOP] - keys[key, START])
            stops[levels] = size
            levels += 1
    tokens = np.empty((size, CONTINUATION), np.int64)
    counts = np.empty(size, np.int64)
    for level in range(levels):
        place = keys[found[level], START]
        for row in range(starts[level], stops[level]):
            for column in range(CONTINUATION):
                tokens[row, column] = rows[place, column] if 0 <= rows[place, column] < vocabulary else 0
            counts[row] = rows[place, COUNT]
            place += 1
    return lengths[:levels], totals[:levels], starts[:levels], stops[:levels], tokens, counts


@njit(cache=True, nogil=True)
def find(slots: Ints, keys: Ints, tokens: Ints, start: int, length: int) -> int:
    """The number of the key that ``length`` tokens from ``start`` on are, or -1."""
    mask = len(slots) - 1
    slot = sequence_hash(tokens, start, length) & mask
    for _ in range(len(slots)):
        key = slots[slot]
        if key < 0 or key >= len(keys):
            break
        same = keys[key, LENGTH] == length
        for offset in range(length):
            same = same and keys[key, offset] == np.int64(tokens[start + offset])
        if same:
            return int(key)
        slot = (slot + 1) & mask
    return -1


@njit(cache=True, nogil=True)
def sequence_hash(tokens: Ints, start: int, length: int) -> int:
    """A number of 62 bits that tells most sequences apart; the caller compares the tokens."""
    mixed = np.uint64(length)
    for offset in range(length):
        mixed = (mixed ^ np.uint64(np.int64(tokens[start + offset]))) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return int(np.int64(mixed >> np.uint64(2)))
