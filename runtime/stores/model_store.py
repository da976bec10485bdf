"""The model store: what the model itself often says, found by the last one to four tokens.

A hash table of prefixes, each with the tokens that most often come next; one compiled call looks up
all four lengths. Beside it, for each token, the phrases of four tokens that most often follow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from hdtool.data.errors import StoreError
from hdtool.data.stores.store import Manifest, TokenizerFingerprint, read_store, require
from hdtool.runtime.stores.mapped_file import documents_of, mapped_part

KIND = "model"
LONGEST_PREFIX = 4
PHRASE = 4
"""Tokens of a phrase, behind the token that it follows."""

LONGEST_PROBE = 256
"""Slots that a search reads at most. Of 2**31 slots, half of them free, about 100 in a row are used."""

HASH_LOW, HASH_HIGH, START, STOP, TOTAL, DISTINCT = range(6)
KEY_WIDTH = 6
"""A key is the hash of its prefix, the range of its rows, and what is known of all that follows it."""
ROW_TOKEN, ROW_COUNT = range(2)

Ints = npt.NDArray[Any]


class Levels(NamedTuple):
    """What comes next after the last four, three, two tokens and the last one, as far as these are known."""

    lengths: Ints
    """Tokens of each known prefix, the longest first."""
    totals: Ints
    """The counts of all that follows each prefix, also of what the store left out."""
    distinct: Ints
    """How many different tokens follow it."""
    starts: Ints
    stops: Ints
    """The range of rows of each prefix."""
    tokens: Ints
    counts: Ints
    """How often each token follows the prefix, most often first within each."""


class ModelStore:
    """A store opened for look-ups; its files are mapped, read only where they are touched."""

    def __init__(self, folder: Path, tokenizer: TokenizerFingerprint | None = None) -> None:
        self.folder = folder
        read_store(folder, lambda manifest: self._open(manifest, tokenizer))

    @classmethod
    def of(cls, folder: Path, manifest: Manifest) -> ModelStore:
        """The store with this manifest, which was read already."""
        store = cls.__new__(cls)
        store.folder = folder
        store._open(manifest)
        return store

    def _open(self, manifest: Manifest, tokenizer: TokenizerFingerprint | None = None) -> None:
        require(manifest, self.folder, KIND, tokenizer)
        self.manifest = manifest
        self.vocabulary = manifest.tokenizer.vocab_size
        self.documents = documents_of(self.folder, manifest)
        """All documents, an end after each."""
        self.slots = self._part("slots", 1).reshape(-1)
        self.keys = self._part("keys", KEY_WIDTH)
        self.rows = self._part("rows", 2)
        self._heads = self._part("heads", 1).reshape(-1)
        self._phrases = self._part("phrases", PHRASE + 1)
        if len(self.slots) & (len(self.slots) - 1) or len(self._heads) != self.vocabulary + 1:
            raise StoreError(f"{self.folder} is damaged (its tables do not have the sizes they need): build it again")

    def _part(self, part: str, width: int) -> Ints:
        # Compiled code takes writable arrays fastest; what is written to a "c" mapping stays in memory.
        return mapped_part(self.folder, self.manifest, part, np.int32, width, "c")

    def after(self, context: Sequence[int] | Ints, most: int = 64) -> Levels:
        """At most ``most`` next tokens of each suffix of ``context`` that is a key."""
        tail = np.array(context[-LONGEST_PREFIX:], np.int64)
        return Levels(*look_up(self.slots, self.keys, self.rows, tail, most, self.vocabulary))

    def phrases_after(self, token: int, most: int = 64) -> tuple[Ints, Ints]:
        """At most ``most`` phrases that follow a token, a row each, and their counts; most frequent first."""
        if not 0 <= token < self.vocabulary:
            return self._phrases[:0, :PHRASE], self._phrases[:0, PHRASE]
        start, stop = self._heads[token : token + 2].tolist()
        # A damaged file must not give a token that no model has; what is cut off costs a draft at worst.
        start = max(start, 0)
        found = self._phrases[start : max(start, min(stop, start + most))]
        found = found[(found[:, :PHRASE] >= 0).all(1) & (found[:, :PHRASE] < self.vocabulary).all(1)]
        return found[:, :PHRASE], found[:, PHRASE]


@njit(cache=True, nogil=True)
def look_up(slots: Ints, keys: Ints, rows: Ints, tail: Ints, most: int, vocabulary: int) -> tuple[Ints, ...]:
    """The fields of ``Levels`` for a context of at most four tokens."""
    known = np.empty((5, LONGEST_PREFIX), np.int64)  # the first five fields
    found = np.empty(LONGEST_PREFIX, np.int64)
    mark, levels, size = np.uint64(0), LONGEST_PREFIX, 0
    for length in range(1, len(tail) + 1):
        mark = mixed(mark, tail[len(tail) - length])
        key = find(slots, keys, mark)
        # A damaged file must not lead out of the arrays, nor to a token that no model has.
        if key >= 0 and 0 <= keys[key, START] <= keys[key, STOP] <= len(rows):
            levels -= 1
            found[levels] = key
            known[0, levels] = length
    for level in range(levels, LONGEST_PREFIX):
        key = found[level]
        known[1, level], known[2, level] = keys[key, TOTAL], keys[key, DISTINCT]
        known[3, level] = size
        size += min(most, keys[key, STOP] - keys[key, START])
        known[4, level] = size
    tokens, counts = np.empty(size, np.int64), np.empty(size, np.int64)
    for level in range(levels, LONGEST_PREFIX):
        place = keys[found[level], START] - known[3, level]
        for row in range(known[3, level], known[4, level]):
            token = rows[place + row, ROW_TOKEN]
            tokens[row] = token if 0 <= token < vocabulary else 0
            counts[row] = rows[place + row, ROW_COUNT]
    lengths, totals, distinct, starts, stops = known[:, levels:]
    return lengths, totals, distinct, starts, stops, tokens, counts


@njit(cache=True, nogil=True)
def find(slots: Ints, keys: Ints, mark: np.uint64) -> int:
    """The number of the key of a prefix with this hash, or -1.

    The search is linear probing; a damaged table without a free slot must not be read to its end.
    """
    mask = len(slots) - 1
    slot = slot_of(mark, mask)
    low, high = halves(mark)
    for _ in range(min(len(slots), LONGEST_PROBE)):
        key = slots[slot]
        if key < 0 or key >= len(keys):
            break
        if keys[key, HASH_LOW] == low and keys[key, HASH_HIGH] == high:
            return int(key)
        slot = (slot + 1) & mask
    return -1


@njit(cache=True, nogil=True)
def slot_of(mark: np.uint64, mask: int) -> int:
    """Where the search for a hash begins."""
    return int(np.int64(mark >> np.uint64(7)) & mask)


@njit(cache=True, nogil=True)
def halves(mark: np.uint64) -> tuple[np.int32, np.int32]:
    """A hash as two numbers that fit into the keys."""
    return np.int32(np.uint32(mark & np.uint64(0xFFFFFFFF))), np.int32(np.uint32(mark >> np.uint64(32)))


@njit(cache=True, nogil=True)
def mixed(mark: np.uint64, token: Any) -> np.uint64:
    """The hash of a sequence with one token more before it; 0 is that of none.

    Nothing compares the tokens behind a hash: of a million keys, one in ten million strangers would be
    taken for one of them, and cost a draft.
    """
    mark = (mark ^ np.uint64(np.int64(token) + 1)) * np.uint64(0x9E3779B97F4A7C15)
    return mark ^ (mark >> np.uint64(29))


@njit(cache=True, nogil=True)
def sequence_hash(tokens: Ints, start: int, length: int) -> np.uint64:
    """The hash of tokens, mixed from the last to the first."""
    mark = np.uint64(0)
    for offset in range(length - 1, -1, -1):
        mark = mixed(mark, np.int64(tokens[start + offset]))
    return mark
