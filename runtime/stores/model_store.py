"""The model store: frequent continuations of the last one to four tokens in the model's own answers.

Lookups read a hash table that maps each prefix to its most frequent next tokens, and an array of the most frequent
four-token phrases after each token. Table and array are built from the n-grams in ``model_store_lmdb``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hdtool.data.errors import StoreError
from hdtool.data.stores.kinds import MODEL_KIND
from hdtool.data.stores.manifest import Manifest
from hdtool.runtime.kernels.compiled import Ints as Ints, array_at, compiled, prefetch
from hdtool.runtime.stores.built_store import BuiltStore
from hdtool.runtime.stores.mapped_files import mapped_part
from hdtool.runtime.stores.model_store_lmdb import MAX_PREFIX_TOKENS, PHRASE_TOKENS

MAX_PROBES = 256
"""Maximum number of slots probed. If half of 2**31 slots are used, runs of used slots are at most about 100 long."""
MAX_ROWS_READ = 64
"""Maximum number of next tokens returned by a lookup, most frequent first."""

VOCABULARY_RANKING_TOKENS = 8
"""Number of tokens in a token's ranking. A row has their ids, best first, then their probabilities in millionths."""

HASH_LOW, HASH_HIGH, KEY_START, KEY_STOP, KEY_TOTAL, KEY_DISTINCT = range(6)
KEY_WIDTH = 6
"""Number of fields in a key: hash of the prefix, range of its rows, total count, number of distinct next tokens."""
ROW_TOKEN, ROW_COUNT = range(2)

MODEL_RECORD = np.dtype(
    [
        ("slots", np.int64, 2),  # address and length of the array, as below
        ("keys", np.int64, 2),
        ("rows", np.int64, 2),
        ("vocabulary", np.int64),
    ],
    align=True,
)


class StoreEntry(NamedTuple):
    """The next tokens after a prefix."""

    length: int
    """Length of the prefix in tokens."""
    total: int
    """Number of occurrences of the prefix with a next token, including those whose next token the build left out."""
    distinct: int
    """Number of distinct next tokens, including those that the build left out."""
    tokens: Ints
    """Next tokens, most frequent first."""
    counts: Ints


class ModelStore(BuiltStore):
    """A model store opened for lookups."""

    kind = MODEL_KIND

    def _map_files(self) -> None:
        self.vocabulary = self.manifest.tokenizer.vocab_size
        self.slots = self._part("slots", 1).reshape(-1)
        self.keys = self._part("keys", KEY_WIDTH)
        self.rows = self._part("rows", 2)
        self._heads = self._part("heads", 1).reshape(-1)
        self._phrases = self._part("phrases", PHRASE_TOKENS + 1)
        ranked = "rankings" in self.manifest.files
        self.rankings = self._part("rankings", 2 * VOCABULARY_RANKING_TOKENS) if ranked else None
        """The model's top tokens after each token of the vocabulary; None if the store was built without them."""
        self.record = model_record(self)
        """Addresses of the store's arrays, for compiled code."""
        fits = self.rankings is None or len(self.rankings) == self.vocabulary
        if len(self.slots) & (len(self.slots) - 1) or len(self._heads) != self.vocabulary + 1 or not fits:
            raise StoreError(f"{self.folder} is damaged (its tables do not have the sizes they need): build it again")

    def _part(self, part: str, width: int) -> Ints:
        # Passing writable arrays to compiled code is fastest; "c" is copy-on-write, so the file is protected.
        return mapped_part(self.folder, self.manifest, part, np.int32, width, "c")

    def after(self, context: Sequence[int] | Ints) -> list[StoreEntry]:
        """Return the store's entries whose prefix is a suffix of ``context``, longest prefix first."""
        entries = look_up(self.record, np.array(context[-MAX_PREFIX_TOKENS:], np.int64)).tolist()
        return [
            StoreEntry(length, total, distinct, *self._valid(self.rows[start:stop]))
            for length, start, stop, total, distinct in entries
        ]

    def _valid(self, rows: Ints) -> tuple[Ints, Ints]:
        """Return the rows' tokens within the vocabulary, and their counts; a damaged file may contain other tokens."""
        rows = rows[(rows[:, ROW_TOKEN] >= 0) & (rows[:, ROW_TOKEN] < self.vocabulary)]
        return rows[:, ROW_TOKEN], rows[:, ROW_COUNT]

    def phrases_after(self, token: int, max_phrases: int = 64) -> tuple[Ints, Ints]:
        """Return up to ``max_phrases`` phrases after a token, one per row, and their counts, most frequent first."""
        if not 0 <= token < self.vocabulary:
            return self._phrases[:0, :PHRASE_TOKENS], self._phrases[:0, PHRASE_TOKENS]
        start, stop = self._heads[token : token + 2].tolist()
        # Guard against a damaged file: bad offsets, and ids outside the vocabulary.
        start = max(start, 0)
        rows = self._phrases[start : max(start, min(stop, start + max_phrases))]
        rows = rows[(rows[:, :PHRASE_TOKENS] >= 0).all(1) & (rows[:, :PHRASE_TOKENS] < self.vocabulary).all(1)]
        return rows[:, :PHRASE_TOKENS], rows[:, PHRASE_TOKENS]


def rankings_in(folder: Path, manifest: Manifest) -> Ints | None:
    """Return a copy of a store's rankings, one for each token of the vocabulary; None if the store has none."""
    if "rankings" not in manifest.files:
        return None
    return np.array(mapped_part(folder, manifest, "rankings", np.int32, 2 * VOCABULARY_RANKING_TOKENS))


def model_record(store: ModelStore | None) -> Ints:
    """Return a record with the addresses of a store's arrays, valid while the store exists.

    If ``store`` is None, lookups in the record find nothing.
    """
    record = np.zeros(1, MODEL_RECORD)
    if store:
        for part in ("slots", "keys", "rows"):
            array = getattr(store, part)
            assert array.flags.c_contiguous and array.dtype == np.int32
            record[part] = array.ctypes.data, len(array)
        record["vocabulary"] = store.vocabulary
    return record


@compiled
def rows_of(model: Any) -> Ints:
    """Return the rows of all prefixes as one array; each row holds a next token of a prefix and its count."""
    return array_at(model.rows[0], (model.rows[1], 2), np.int32)


@compiled
def lookup_hash(model: Any, prefix_hash: np.uint64) -> tuple[Any, Any, Any, Any]:
    """Look up a prefix by its hash.

    Return ``(start, stop, total, distinct)``; all are 0 without a valid entry. The rows from ``start`` to ``stop``, at
    most ``MAX_ROWS_READ``, hold the next tokens; ``StoreEntry`` describes ``total`` and ``distinct``.
    """
    keys = array_at(model.keys[0], (model.keys[1], KEY_WIDTH), np.int32)
    key = find_key(array_at(model.slots[0], model.slots[1], np.int32), keys, prefix_hash)
    if key < 0:
        return 0, 0, 0, 0
    start, stop = np.int64(keys[key, KEY_START]), np.int64(keys[key, KEY_STOP])
    total, distinct = np.int64(keys[key, KEY_TOTAL]), np.int64(keys[key, KEY_DISTINCT])
    # A damaged file must not cause reads outside the arrays.
    if not 0 <= start <= stop <= model.rows[1] or total <= 0:
        return 0, 0, 0, 0
    return start, min(stop, start + MAX_ROWS_READ), total, distinct


@compiled
def prefetch_entries(model: Any, hashes: Ints, max_tokens: int) -> None:
    """Prefetch the entries of prefixes of 1 to ``max_tokens`` tokens, so that their cache misses overlap."""
    slots = array_at(model.slots[0], model.slots[1], np.int32)
    keys = array_at(model.keys[0], model.keys[1] * KEY_WIDTH, np.int32)
    mask = len(slots) - 1
    for length in range(1, max_tokens + 1):
        prefetch(slots, slot_of(hashes[length], mask))
    for length in range(1, max_tokens + 1):
        key = np.int64(slots[slot_of(hashes[length], mask)])
        if 0 <= key < model.keys[1]:
            prefetch(keys, key * KEY_WIDTH)


@compiled
def look_up(memory: Ints, tail: Ints) -> Ints:
    """Return a row for each suffix of ``tail`` that has an entry in the store, longest first.

    A row holds the length of the suffix, then the result of ``lookup_hash``.
    """
    model, entries, count = memory[0], np.empty((len(tail), 5), np.int64), 0
    hashes = np.zeros(len(tail) + 1, np.uint64)
    for length in range(1, len(tail) + 1):
        hashes[length] = mix_hash(hashes[length - 1], tail[len(tail) - length])
    prefetch_entries(model, hashes, len(tail))
    for length in range(len(tail), 0, -1):
        start, stop, total, distinct = lookup_hash(model, hashes[length])
        if total > 0:
            entries[count, 0], entries[count, 1], entries[count, 2] = length, start, stop
            entries[count, 3], entries[count, 4] = total, distinct
            count += 1
    return entries[:count]


@compiled
def find_key(slots: Ints, keys: Ints, prefix_hash: np.uint64) -> int:
    """Return the index of the key with this hash, or -1 if there is none.

    Linear probing is limited to ``MAX_PROBES``, because a damaged table may have no free slot.
    """
    mask = len(slots) - 1
    slot = slot_of(prefix_hash, mask)
    low, high = split_hash(prefix_hash)
    for _ in range(min(len(slots), MAX_PROBES)):
        key = slots[slot]
        if key < 0 or key >= len(keys):
            break
        if keys[key, HASH_LOW] == low and keys[key, HASH_HIGH] == high:
            return int(key)
        slot = (slot + 1) & mask
    return -1


@compiled
def slot_of(prefix_hash: np.uint64, mask: int) -> int:
    """Return the first slot to probe for a hash."""
    return int(np.int64(prefix_hash >> np.uint64(7)) & mask)


@compiled
def split_hash(prefix_hash: np.uint64) -> tuple[np.int32, np.int32]:
    """Split a hash into its lower and upper 32 bits, as stored in keys."""
    low, high = prefix_hash & np.uint64(0xFFFFFFFF), prefix_hash >> np.uint64(32)
    return np.int32(np.uint32(low)), np.int32(np.uint32(high))


@compiled
def mix_hash(suffix_hash: np.uint64, token: Any) -> np.uint64:
    """Return a sequence's hash, given its first token and the hash of the rest; an empty sequence has the hash 0.

    Lookups in the model store compare only these 64-bit hashes. A collision is improbable, and costs a rejected draft.
    """
    mixture = (suffix_hash ^ np.uint64(np.int64(token) + 1)) * np.uint64(0x9E3779B97F4A7C15)
    return mixture ^ (mixture >> np.uint64(29))


@compiled
def sequence_hash(tokens: Ints, start: int, length: int) -> np.uint64:
    """Return the hash of the ``length`` tokens from index ``start`` on; it mixes in the last token first."""
    mixed_hash = np.uint64(0)
    for offset in range(length - 1, -1, -1):
        mixed_hash = mix_hash(mixed_hash, np.int64(tokens[start + offset]))
    return mixed_hash
