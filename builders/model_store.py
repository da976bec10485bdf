"""Build a model store: a model's answers in, the sequences that it often says out.

Counting is exact: what hashing finds is compared token by token. The tokens stay on disk, and where
a hash table of bounded size cannot hold all sequences it counts those of one part of the hashes
after the other, so memory depends on the table and not on the input.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from hdtool.data.documents import Document, Source, token_type
from hdtool.data.errors import StoreError
from hdtool.data.store import Manifest, SourceShare, StoreBuild, TokenizerMark, building
from hdtool.runtime.config import BuildConfig
from hdtool.runtime.model_store import (
    CONTINUATION,
    COUNT,
    KEY_WIDTH,
    KIND,
    LENGTH,
    LONGEST_PREFIX,
    NO_TOKEN,
    ROW_WIDTH,
    START,
    STOP,
    TOTAL,
    Ints,
    sequence_hash,
)

TABLE_SLOTS = 1 << 22
"""Of the counting table at most, a power of two. Counting takes about 40 bytes of memory a slot."""
LARGEST_COUNT = 2**31 - 1


@dataclass(frozen=True)
class _Answers:
    """The documents on disk and how they are counted."""

    tokens: Ints
    end: int
    longest: int
    """Tokens in the longest document."""
    once: bool
    """Whether a sequence counts once in a document, however often it is in there."""

    @property
    def place_type(self) -> np.dtype[Any]:
        return np.dtype(np.int32 if len(self.tokens) < 2**31 else np.int64)


def build_model_store(
    folder: Path,
    documents: Iterable[Document],
    tokenizer: TokenizerMark,
    sources: Sequence[Source],
    *,
    top_k: int = BuildConfig.top_k,
    per_key: int = BuildConfig.per_key,
    once_per_document: bool = True,
) -> Manifest:
    """Write the store of all documents to ``folder``, replacing the one there in one step.

    For each length of prefix the ``top_k`` most frequent sequences are kept, and of those at most
    ``per_key`` for each prefix; among equals the one with the smaller tokens goes first. A sequence
    is a prefix and a whole continuation: what the end of a document cuts short is not counted.
    """
    end = tokenizer.vocab_size
    with building(folder) as build:
        shares, longest = _write_documents(build, documents, end, sources)
        if not longest:
            raise StoreError("the answers hold no text at all: name files that do")
        if longest <= CONTINUATION:
            raise StoreError(f"the longest answer has {longest} tokens: name files with answers of more than 4")
        tokens = np.asarray(np.memmap(build.path("documents"), token_type(end), "r"))
        answers = _Answers(tokens, end, longest, once_per_document)
        keys, rows = _in_order([_level(answers, prefix, top_k, per_key) for prefix in range(1, LONGEST_PREFIX + 1)])
        slots = np.full(_table_size(len(keys)), -1, np.int32)
        _fill(slots, keys)
        for part, array in (("slots", slots), ("keys", keys), ("rows", rows)):
            array.tofile(build.path(part))
        _write_entries(build.path("entries", "mdb"), keys, rows)
        counts = {
            "tokens": sum(share.tokens for share in shares),
            "documents": sum(share.records for share in shares),
            "keys": len(keys),
            "continuations": len(rows),
        }
        options = {
            "token_bytes": tokens.itemsize,
            "top_k": top_k,
            "per_key": per_key,
            "once_per_document": once_per_document,
        }
        return build.commit(Manifest(KIND, tokenizer, counts, options, shares))


def _write_documents(
    build: StoreBuild, documents: Iterable[Document], end: int, sources: Sequence[Source]
) -> tuple[tuple[SourceShare, ...], int]:
    """Keep the tokens, so that the store can be built anew without its sources; the length of the longest document."""
    width = token_type(end)
    seen = np.zeros((len(sources), 2), np.int64)
    longest = 0
    with open(build.path("documents"), "wb") as stream:
        for document in documents:
            size = len(document.ids)
            if size:
                np.append(np.asarray(document.ids, width), width.type(end)).tofile(stream)
                seen[document.source] += (1, size)
                longest = max(longest, size)
    shares = (
        SourceShare(source.name, source.sha256, int(records), int(tokens))
        for source, (records, tokens) in zip(sources, seen, strict=True)
    )
    return tuple(shares), longest


def _level(answers: _Answers, prefix: int, top_k: int, per_key: int) -> tuple[Ints, Ints]:
    """The keys of one length of prefix, and their rows."""
    tokens, length = answers.tokens, prefix + CONTINUATION
    places, counts = _most_frequent(answers, length, top_k)
    table = np.full(_table_size(len(places)), -1, answers.place_type)
    owners, owner_of = np.empty(len(table), np.int32), np.empty(len(places), np.int32)
    _find_owners(tokens, places, prefix, table, owners, owner_of)
    order, sizes = np.argsort(owner_of), np.bincount(owner_of)
    stops = np.cumsum(sizes)
    _sort_groups(tokens, places, counts, prefix, order, stops, per_key)
    firsts = places[order[stops - sizes]]
    chosen = order[np.arange(len(order)) - np.repeat(stops - sizes, sizes) < per_key]
    rows = np.empty((len(chosen), ROW_WIDTH), np.int32)
    rows[:, :CONTINUATION] = tokens[places[chosen][:, None] + np.arange(prefix, length)]
    rows[:, COUNT] = np.minimum(counts[chosen], LARGEST_COUNT)
    keys = np.full((len(sizes), KEY_WIDTH), NO_TOKEN, np.int32)
    keys[:, :prefix] = tokens[firsts[:, None] + np.arange(prefix)]
    keys[:, LENGTH] = prefix
    _set_ranges(keys, np.minimum(sizes, per_key))
    seen = np.full(_table_size(answers.longest), -1, answers.place_type)
    totals = _totals(tokens, answers.end, prefix, table, owners, answers.once, seen)
    keys[:, TOTAL] = np.minimum(totals[: len(keys)], LARGEST_COUNT)
    return keys, rows


def _set_ranges(keys: Ints, sizes: Ints) -> None:
    keys[:, STOP] = np.cumsum(sizes)
    keys[:, START] = keys[:, STOP] - sizes


def _most_frequent(answers: _Answers, length: int, top_k: int) -> tuple[Ints, Ints]:
    """A place and the count of each of the ``top_k`` most frequent sequences of a length."""
    size = min(_table_size(len(answers.tokens)), TABLE_SLOTS)
    parts = 1 << (len(answers.tokens) * 4 // (size * 3)).bit_length()
    while True:
        places, counts = np.empty(0, np.int64), np.empty(0, np.int64)
        for part in range(parts):
            table, repeats = np.full(size, -1, answers.place_type), np.zeros(size, np.uint32)
            if not _count(answers.tokens, answers.end, length, part, parts, answers.once, table, repeats):
                break  # the part does not fit into the table
            used = np.flatnonzero(table >= 0)
            places, counts = np.append(places, table[used]), np.append(counts, repeats[used] + np.int64(1))
            best = _best(answers.tokens, places, counts, length, top_k)
            places, counts = places[best], counts[best]
        else:
            return places, counts
        parts *= 2


def _table_size(entries: int) -> int:
    """Slots of a hash table that stays half empty; a power of two."""
    return 1 << (2 * entries).bit_length()


def _best(tokens: Ints, places: Ints, counts: Ints, length: int, most: int) -> Ints:
    """Which of some different sequences are the ``most`` frequent; among equals those with the smaller tokens."""
    if len(places) <= most:
        return np.arange(len(places))
    least = np.sort(counts)[-most]  # numpy sorts numbers with many equals faster than it selects from them
    best = [np.flatnonzero(counts > least)]
    equal = np.flatnonzero(counts == least)
    missing = most - len(best[0])
    for offset in range(length):
        column = tokens[places[equal] + offset].astype(np.int64)  # numpy selects from two-byte numbers slowly
        largest = np.partition(column, missing - 1)[missing - 1]
        best.append(equal[column < largest])
        missing -= len(best[-1])
        equal = equal[column == largest]
    return np.concatenate([*best, equal])


@njit(cache=True, nogil=True)
def _count(tokens: Ints, end: int, length: int, part: int, parts: int, once: bool, places: Ints, repeats: Ints) -> bool:
    """Count the sequences of one part in a table of their last places; false when they do not fit."""
    room = len(places) // 4 * 3
    begin = 0
    for last in range(len(tokens)):
        if tokens[last] == end:
            begin = last + 1
        at = last + 1 - length
        if at < begin:
            continue
        mark = sequence_hash(tokens, at, length)
        if (mark >> 32) & (parts - 1) != part:
            continue
        slot = _slot(places, tokens, at, length, mark, 0)
        if places[slot] < 0:
            room -= 1
            if room < 0:
                return False
        elif not once or places[slot] < begin:
            repeats[slot] += 1
        places[slot] = at
    return True


@njit(cache=True, nogil=True)
def _slot(places: Ints, tokens: Ints, at: int, length: int, mark: int, oldest: int) -> int:
    """Where a sequence is in a table of places, or would be; a place before ``oldest`` counts as free."""
    mask = len(places) - 1
    slot = mark & mask
    while places[slot] >= oldest:
        same = True
        for offset in range(length):
            if tokens[places[slot] + offset] != tokens[at + offset]:
                same = False
                break
        if same:
            break
        slot = (slot + 1) & mask
    return slot


@njit(cache=True, nogil=True)
def _find_owners(tokens: Ints, places: Ints, prefix: int, table: Ints, owners: Ints, owner_of: Ints) -> None:
    """Number the different prefixes, in a table for later and for each of the sequences."""
    size = 0
    for number in range(len(places)):
        slot = _slot(table, tokens, places[number], prefix, sequence_hash(tokens, places[number], prefix), 0)
        if table[slot] < 0:
            table[slot] = places[number]
            owners[slot] = size
            size += 1
        owner_of[number] = owners[slot]


@njit(cache=True, nogil=True)
def _sort_groups(tokens: Ints, places: Ints, counts: Ints, prefix: int, order: Ints, stops: Ints, most: int) -> None:
    """Bring the ``most`` frequent sequences of each prefix to the front of its group, in their order."""
    start = 0
    for stop in stops:
        for at in range(start, stop):
            moved, to = order[at], min(at, start + most)
            while to > start and _before(tokens, places, counts, moved, order[to - 1], prefix):
                order[to] = order[to - 1]
                to -= 1
            order[to] = moved
        start = stop


@njit(cache=True, nogil=True)
def _before(tokens: Ints, places: Ints, counts: Ints, one: int, other: int, prefix: int) -> bool:
    if counts[one] != counts[other]:
        return bool(counts[one] > counts[other])
    for offset in range(prefix, prefix + CONTINUATION):
        left, right = tokens[places[one] + offset], tokens[places[other] + offset]
        if left != right:
            return bool(left < right)
    return False


@njit(cache=True, nogil=True)
def _totals(tokens: Ints, end: int, prefix: int, table: Ints, owners: Ints, once: bool, seen: Ints) -> Ints:
    """The counts of all sequences that each prefix starts; ``seen`` holds those of one document."""
    totals = np.zeros(len(table), np.int64)
    length = prefix + CONTINUATION
    begin = 0
    for last in range(len(tokens)):
        if tokens[last] == end:
            begin = last + 1
        at = last + 1 - length
        if at < begin:
            continue
        slot = _slot(table, tokens, at, prefix, sequence_hash(tokens, at, prefix), 0)
        if table[slot] < 0:
            continue
        if once:
            place = _slot(seen, tokens, at, length, sequence_hash(tokens, at, length), begin)
            if seen[place] >= begin:
                continue
            seen[place] = at
        totals[owners[slot]] += 1
    return totals


def _in_order(levels: Sequence[tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
    """All keys in the order of their bytes, a shorter one before those that it starts, and their rows."""
    keys = np.concatenate([keys for keys, _ in levels])
    rows = np.concatenate([rows for _, rows in levels])
    sizes = keys[:, STOP] - keys[:, START]
    starts = np.cumsum(sizes) - sizes
    tokens = (keys[:, :LONGEST_PREFIX] - NO_TOKEN).astype(np.uint64)
    order = np.lexsort([tokens[:, at] << np.uint64(32) | tokens[:, at + 1] for at in (2, 0)])
    keys, sizes = keys[order], sizes[order]
    _set_ranges(keys, sizes)
    return keys, rows[np.repeat(starts[order] - keys[:, START], sizes) + np.arange(len(rows))]


@njit(cache=True, nogil=True)
def _fill(slots: Ints, keys: Ints) -> None:
    mask = len(slots) - 1
    for key in range(len(keys)):
        slot = sequence_hash(keys[key], 0, keys[key, LENGTH]) & mask
        while slots[slot] >= 0:
            slot = (slot + 1) & mask
        slots[slot] = key


def _write_entries(path: Path, keys: Ints, rows: Ints) -> None:
    """The same as a portable LMDB file: prefixes as big-endian tokens, msgpack lists of [tokens, count]."""
    import lmdb

    packed = _packed(rows)
    # LMDB wants a limit beforehand; the file has the size of what is written.
    limit = 4 * (packed.nbytes + 128 * len(keys)) + (1 << 24)
    with (
        lmdb.open(str(path), subdir=False, lock=False, sync=False, map_size=limit) as environment,
        environment.begin(write=True) as transaction,
        transaction.cursor() as cursor,
    ):
        cursor.putmulti(_entries(keys, packed), append=True)


def _packed(rows: Ints) -> Ints:
    """Rows as msgpack, in numbers of fixed width: that needs no loop, and every reader takes it."""
    wide = rows[:, :CONTINUATION].max() >= 2**16
    token = [("mark", np.uint8), ("value", ">u4" if wide else ">u2")]
    fields = [("lists", np.uint8, 2), ("tokens", token, CONTINUATION), ("mark", np.uint8), ("count", ">u4")]
    packed = np.empty(len(rows), fields)
    packed["lists"] = 0x92, 0x90 + CONTINUATION
    packed["tokens"]["mark"] = 0xCE if wide else 0xCD
    packed["tokens"]["value"] = rows[:, :CONTINUATION]
    packed["mark"] = 0xCE
    packed["count"] = rows[:, COUNT]
    return packed


def _entries(keys: Ints, packed: Ints) -> Iterator[tuple[bytes, bytes]]:
    tokens, lists, width = keys[:, :LONGEST_PREFIX].astype(">u4").tobytes(), packed.tobytes(), packed.itemsize
    largest = int((keys[:, STOP] - keys[:, START]).max())
    heads = [b"\xdd" + size.to_bytes(4, "big") for size in range(largest + 1)]
    lengths, starts, stops = (keys[:, column].tolist() for column in (LENGTH, START, STOP))
    for number, (length, start, stop) in enumerate(zip(lengths, starts, stops, strict=True)):
        at = number * LONGEST_PREFIX * 4
        yield tokens[at : at + 4 * length], heads[stop - start] + lists[start * width : stop * width]
