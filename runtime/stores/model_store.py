"""The model store: what often follows the last one to four tokens in the model's own answers.

A hash table of prefixes, each with the tokens that most often come next, and for each token the phrases
of four tokens that most often follow it. All lookups of prefixes go through ``entry_of``.
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
"""Tokens of a phrase, after the token that it follows."""

LONGEST_PROBE = 256
"""Slots that a search reads at most. In 2**31 slots, half of them free, at most about 100 in a row are used."""
ROWS_READ = 64
"""Next tokens that a lookup reads of an entry, the most frequent ones."""

HASH_LOW, HASH_HIGH, START, STOP, TOTAL, DISTINCT = range(6)
KEY_WIDTH = 6
"""A key is the hash of its prefix, the range of its rows, and the counts of all that follows the prefix."""
ROW_TOKEN, ROW_COUNT = range(2)

Ints = npt.NDArray[Any]


class Entry(NamedTuple):
    """What comes next after a prefix."""

    length: int
    """Tokens of the prefix."""
    total: int
    """The counts of all tokens that follow the prefix, also of those that the build left out."""
    distinct: int
    """How many different tokens follow it."""
    tokens: Ints
    """Next tokens, the most frequent first."""
    counts: Ints


class ModelStore:
    """A store opened for lookups; its files are mapped, read only where they are touched."""

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

    def after(self, context: Sequence[int] | Ints) -> list[Entry]:
        """The entries of the suffixes of ``context`` that are prefixes in the store, the longest first."""
        tail = np.array(context[-LONGEST_PREFIX:], np.int64)
        found = lookup(self.slots, self.keys, self.rows, tail, self.vocabulary).tolist()
        return [
            Entry(length, total, distinct, self.rows[start:stop, ROW_TOKEN], self.rows[start:stop, ROW_COUNT])
            for length, start, stop, total, distinct in found
        ]

    def phrases_after(self, token: int, most: int = 64) -> tuple[Ints, Ints]:
        """At most ``most`` phrases that follow a token, a row each, and their counts; most frequent first."""
        if not 0 <= token < self.vocabulary:
            return self._phrases[:0, :PHRASE], self._phrases[:0, PHRASE]
        start, stop = self._heads[token : token + 2].tolist()
        # A damaged file must not give a token that no model has.
        start = max(start, 0)
        found = self._phrases[start : max(start, min(stop, start + most))]
        found = found[(found[:, :PHRASE] >= 0).all(1) & (found[:, :PHRASE] < self.vocabulary).all(1)]
        return found[:, :PHRASE], found[:, PHRASE]


@njit(cache=True, nogil=True)
def lookup(slots: Ints, keys: Ints, rows: Ints, tail: Ints, vocabulary: int) -> Ints:
    """A row for each suffix of ``tail`` that has an entry, the longest first: its length and its ``entry_of``."""
    found = np.empty((len(tail), 5), np.int64)
    place, prefix_hash = len(tail), np.uint64(0)
    for length in range(1, len(tail) + 1):
        prefix_hash = mixed(prefix_hash, tail[len(tail) - length])
        start, stop, total, distinct = entry_of(slots, keys, len(rows), prefix_hash)
        # A damaged file must not give a token that no model has.
        valid = start
        while valid < stop and 0 <= rows[valid, ROW_TOKEN] < vocabulary:
            valid += 1
        if total > 0:
            place -= 1
            found[place, 0], found[place, 1], found[place, 2] = length, start, valid
            found[place, 3], found[place, 4] = total, distinct
    return found[place:]


@njit(cache=True, nogil=True)
def entry_of(slots: Ints, keys: Ints, rows: int, prefix_hash: np.uint64) -> tuple[Any, Any, Any, Any]:
    """The entry of the prefix with this hash: its first of ``rows``, the one after its last, total and distinct.

    The total is 0 if there is no entry.
    """
    key = find(slots, keys, prefix_hash)
    if key < 0:
        return 0, 0, 0, 0
    start, stop = np.int64(keys[key, START]), np.int64(keys[key, STOP])
    total, distinct = np.int64(keys[key, TOTAL]), np.int64(keys[key, DISTINCT])
    # A damaged file must not lead out of the arrays.
    if not 0 <= start <= stop <= rows or total <= 0:
        return 0, 0, 0, 0
    return start, min(stop, start + ROWS_READ), total, distinct


@njit(cache=True, nogil=True)
def find(slots: Ints, keys: Ints, prefix_hash: np.uint64) -> int:
    """The number of the key of a prefix with this hash, or -1.

    The search is linear probing, bounded: a damaged table without a free slot must not be read to its end.
    """
    mask = len(slots) - 1
    slot = slot_of(prefix_hash, mask)
    low, high = halves(prefix_hash)
    for _ in range(min(len(slots), LONGEST_PROBE)):
        key = slots[slot]
        if key < 0 or key >= len(keys):
            break
        if keys[key, HASH_LOW] == low and keys[key, HASH_HIGH] == high:
            return int(key)
        slot = (slot + 1) & mask
    return -1


@njit(cache=True, nogil=True)
def slot_of(prefix_hash: np.uint64, mask: int) -> int:
    """Where the search for a hash begins."""
    return int(np.int64(prefix_hash >> np.uint64(7)) & mask)


@njit(cache=True, nogil=True)
def halves(prefix_hash: np.uint64) -> tuple[np.int32, np.int32]:
    """A hash as two numbers that fit into the keys."""
    low, high = prefix_hash & np.uint64(0xFFFFFFFF), prefix_hash >> np.uint64(32)
    return np.int32(np.uint32(low)), np.int32(np.uint32(high))


@njit(cache=True, nogil=True)
def mixed(suffix_hash: np.uint64, token: Any) -> np.uint64:
    """The hash of a sequence, from that of the sequence without its first token, ``token``; 0 is that of none.

    Lookups compare hashes alone. Of a million keys, one in ten million sequences that are not in the
    store would be taken for one of them, which costs a draft.
    """
    mixture = (suffix_hash ^ np.uint64(np.int64(token) + 1)) * np.uint64(0x9E3779B97F4A7C15)
    return mixture ^ (mixture >> np.uint64(29))


@njit(cache=True, nogil=True)
def sequence_hash(tokens: Ints, start: int, length: int) -> np.uint64:
    """The hash of tokens, mixed from the last to the first."""
    found = np.uint64(0)
    for offset in range(length - 1, -1, -1):
        found = mixed(found, np.int64(tokens[start + offset]))
    return found
