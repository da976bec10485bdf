"""The model store: what often follows the last one to four tokens in the model's own answers.

A hash table of prefixes, each with the tokens that most often come next, and for each token the phrases
of four tokens that most often follow it. All look-ups of prefixes, of drafters and of ``inspect``, are a ``fetch`` of
all lengths and a ``known_as`` for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hdtool.data.errors import StoreError
from hdtool.data.stores.store import Manifest, TokenizerFingerprint, read_store, require
from hdtool.runtime.kernels.compiled import Ints as Ints
from hdtool.runtime.kernels.compiled import compiled
from hdtool.runtime.kernels.memory.no_copy import Pinned
from hdtool.runtime.kernels.memory.raw_memory import array_at, prefetch
from hdtool.runtime.stores.mapped_file import mapped_part

KIND = "model"
LONGEST_PREFIX = 4
PHRASE = 4
"""Tokens of a phrase, after the token that it follows."""

LONGEST_PROBE = 256
"""Slots that a search reads at most. In 2**31 slots, half of them free, at most about 100 in a row are used."""
ROWS_READ = 64
"""Next tokens that a lookup reads of an entry, the most frequent ones."""

RANKED = 8
"""Tokens of a ranking of the vocabulary: rows hold them, best first, and then their probabilities in millionths."""

HASH_LOW, HASH_HIGH, START, STOP, TOTAL, DISTINCT = range(6)
KEY_WIDTH = 6
"""A key is the hash of its prefix, the range of its rows, and the counts of all that follows the prefix."""
ROW_TOKEN, ROW_COUNT = range(2)

MODEL = np.dtype(
    [
        ("slots", np.int64, 2),  # address and length, as of all arrays
        ("keys", np.int64, 2),
        ("rows", np.int64, 2),
        ("vocabulary", np.int64),
    ],
    align=True,
)


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


class ModelStore(Pinned):
    """A store opened for lookups; its files are mapped, read only where they are touched."""

    def __init__(
        self, folder: Path, tokenizer: TokenizerFingerprint | None = None, manifest: Manifest | None = None
    ) -> None:
        """``manifest`` is that of the folder, if it was read already."""
        self.folder = folder
        if manifest:
            self._open(manifest, tokenizer)
        else:
            read_store(folder, lambda found: self._open(found, tokenizer))

    def _open(self, manifest: Manifest, tokenizer: TokenizerFingerprint | None) -> None:
        require(manifest, self.folder, KIND, tokenizer)
        self.manifest = manifest
        self.vocabulary = manifest.tokenizer.vocab_size
        self.slots = self._part("slots", 1).reshape(-1)
        self.keys = self._part("keys", KEY_WIDTH)
        self.rows = self._part("rows", 2)
        self._heads = self._part("heads", 1).reshape(-1)
        self._phrases = self._part("phrases", PHRASE + 1)
        self.rankings = self._part("rankings", 2 * RANKED) if "rankings" in manifest.files else None
        """The model's own ranking after each token of the vocabulary, if the store was built with them."""
        self.record = model_record(self)
        """The addresses of its arrays, for compiled code."""
        fits = self.rankings is None or len(self.rankings) == self.vocabulary
        if len(self.slots) & (len(self.slots) - 1) or len(self._heads) != self.vocabulary + 1 or not fits:
            raise StoreError(f"{self.folder} is damaged (its tables do not have the sizes they need): build it again")

    def _part(self, part: str, width: int) -> Ints:
        # Compiled code takes writable arrays fastest; what is written to a "c" mapping stays in memory.
        return mapped_part(self.folder, self.manifest, part, np.int32, width, "c")

    def after(self, context: Sequence[int] | Ints) -> list[Entry]:
        """The entries of the suffixes of ``context`` that are prefixes in the store, the longest first."""
        found = look_up(self.record, np.array(context[-LONGEST_PREFIX:], np.int64)).tolist()
        return [
            Entry(length, total, distinct, *self._valid(self.rows[start:stop]))
            for length, start, stop, total, distinct in found
        ]

    def _valid(self, rows: Ints) -> tuple[Ints, Ints]:
        """Tokens and counts; a damaged file must not give a token that no model has."""
        rows = rows[(rows[:, ROW_TOKEN] >= 0) & (rows[:, ROW_TOKEN] < self.vocabulary)]
        return rows[:, ROW_TOKEN], rows[:, ROW_COUNT]

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


def rankings_in(folder: Path, manifest: Manifest) -> Ints | None:
    """A copy of the rankings of the vocabulary in a store, if it has any."""
    if "rankings" not in manifest.files:
        return None
    return np.array(mapped_part(folder, manifest, "rankings", np.int32, 2 * RANKED))


def model_record(store: ModelStore | None) -> Ints:
    """The addresses of the arrays of a store, which must outlive them; without a store, no entry is found."""
    record = np.zeros(1, MODEL)
    if store:
        for part in ("slots", "keys", "rows"):
            array = getattr(store, part)
            assert array.flags.c_contiguous and array.dtype == np.int32
            record[part] = array.ctypes.data, len(array)
        record["vocabulary"] = store.vocabulary
    return record


@compiled
def rows_of(model: Any) -> Ints:
    """Tokens and counts of all prefixes."""
    return array_at(model.rows[0], (model.rows[1], 2), np.int32)


@compiled
def known_as(model: Any, prefix_hash: np.uint64) -> tuple[Any, Any, Any, Any]:
    """The entry of the prefix with this hash, as ``entry_of`` gives it."""
    slots = array_at(model.slots[0], model.slots[1], np.int32)
    keys = array_at(model.keys[0], (model.keys[1], KEY_WIDTH), np.int32)
    return entry_of(slots, keys, model.rows[1], prefix_hash)


@compiled
def fetch(model: Any, hashes: Ints, longest: int) -> None:
    """Prefetch the entries of prefixes up to a length, all at once and not one after the other."""
    slots = array_at(model.slots[0], model.slots[1], np.int32)
    keys = array_at(model.keys[0], model.keys[1] * KEY_WIDTH, np.int32)
    mask = len(slots) - 1
    for length in range(1, longest + 1):
        prefetch(slots, slot_of(hashes[length], mask))
    for length in range(1, longest + 1):
        key = np.int64(slots[slot_of(hashes[length], mask)])
        if 0 <= key < model.keys[1]:
            prefetch(keys, key * KEY_WIDTH)


@compiled
def look_up(memory: Ints, tail: Ints) -> Ints:
    """A row for each suffix of ``tail`` that has an entry, the longest first: its length and its ``known_as``."""
    model, found, count = memory[0], np.empty((len(tail), 5), np.int64), 0
    hashes = np.zeros(len(tail) + 1, np.uint64)
    for length in range(1, len(tail) + 1):
        hashes[length] = mixed(hashes[length - 1], tail[len(tail) - length])
    fetch(model, hashes, len(tail))
    for length in range(len(tail), 0, -1):
        start, stop, total, distinct = known_as(model, hashes[length])
        if total > 0:
            found[count, 0], found[count, 1], found[count, 2] = length, start, stop
            found[count, 3], found[count, 4] = total, distinct
            count += 1
    return found[:count]


@compiled
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


@compiled
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


@compiled
def slot_of(prefix_hash: np.uint64, mask: int) -> int:
    """Where the search for a hash begins."""
    return int(np.int64(prefix_hash >> np.uint64(7)) & mask)


@compiled
def halves(prefix_hash: np.uint64) -> tuple[np.int32, np.int32]:
    """A hash as two numbers that fit into the keys."""
    low, high = prefix_hash & np.uint64(0xFFFFFFFF), prefix_hash >> np.uint64(32)
    return np.int32(np.uint32(low)), np.int32(np.uint32(high))


@compiled
def mixed(suffix_hash: np.uint64, token: Any) -> np.uint64:
    """The hash of a sequence, from that of the sequence without its first token, ``token``; 0 is that of none.

    Lookups compare hashes alone. Of a million keys, one in ten million sequences that are not in the
    store would be taken for one of them, which costs a draft.
    """
    mixture = (suffix_hash ^ np.uint64(np.int64(token) + 1)) * np.uint64(0x9E3779B97F4A7C15)
    return mixture ^ (mixture >> np.uint64(29))


@compiled
def sequence_hash(tokens: Ints, start: int, length: int) -> np.uint64:
    """The hash of tokens, mixed from the last to the first."""
    found = np.uint64(0)
    for offset in range(length - 1, -1, -1):
        found = mixed(found, np.int64(tokens[start + offset]))
    return found
