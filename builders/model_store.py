"""Build a model store: a model's answers in, the sequences that it often says out.

The answers stream to disk first; the most frequent sequences of each length are counted there, sorted
by prefix, and written twice: as flat arrays for look-ups, and as LMDB for everybody else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numba import njit

from hdtool.builders.documents import DocumentFile
from hdtool.builders.sequences import Answers, most_frequent, slot_of, table_size, totals_of
from hdtool.data.documents import Document, Source, token_type
from hdtool.data.errors import StoreError
from hdtool.data.store import Manifest, TokenizerMark, building
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

LARGEST_COUNT = 2**31 - 1


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
        with DocumentFile(build.path("documents"), end, sources) as file:
            for document in documents:
                file.add(document.ids, document.source)
        if not file.longest:
            raise StoreError("the answers hold no text at all: name files that do")
        if file.longest <= CONTINUATION:
            raise StoreError(f"the longest answer has {file.longest} tokens: name files with answers of more than 4")
        tokens = np.asarray(np.memmap(build.path("documents"), token_type(end), "r"))
        answers = Answers(tokens, end, file.longest, once_per_document)
        keys, rows = _in_order([_level(answers, prefix, top_k, per_key) for prefix in range(1, LONGEST_PREFIX + 1)])
        slots = np.full(table_size(len(keys)), -1, np.int32)
        _fill(slots, keys)
        for part, array in (("slots", slots), ("keys", keys), ("rows", rows)):
            array.tofile(build.path(part))
        _write_entries(build.path("entries", "mdb"), keys, rows)
        shares = file.shares()
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


def _level(answers: Answers, prefix: int, top_k: int, per_key: int) -> tuple[Ints, Ints]:
    """The keys of one length of prefix, and their rows."""
    tokens, length = answers.tokens, prefix + CONTINUATION
    places, counts = most_frequent(answers, length, top_k)
    table = np.full(table_size(len(places)), -1, answers.place_type)
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
    seen = np.full(table_size(answers.longest), -1, answers.place_type)
    totals = totals_of(tokens, answers.end, prefix, table, owners, answers.once, seen)
    keys[:, TOTAL] = np.minimum(totals[: len(keys)], LARGEST_COUNT)
    return keys, rows


def _set_ranges(keys: Ints, sizes: Ints) -> None:
    keys[:, STOP] = np.cumsum(sizes)
    keys[:, START] = keys[:, STOP] - sizes


@njit(cache=True, nogil=True)
def _find_owners(tokens: Ints, places: Ints, prefix: int, table: Ints, owners: Ints, owner_of: Ints) -> None:
    """Number the different prefixes, in a table for later and for each of the sequences."""
    size = 0
    for number in range(len(places)):
        slot = slot_of(table, tokens, places[number], prefix, sequence_hash(tokens, places[number], prefix), 0)
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
