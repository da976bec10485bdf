"""Build a model store: a model's answers in, the sequences that it often says out.

Counting is exact: what hashing finds is compared token by token. It is done in parts, each with the
sequences of some hashes, so that memory is bounded by the table of one part whatever the input;
the tokens stay on disk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from hdtool.data.documents import Document, Source, token_type
from hdtool.data.errors import StoreError
from hdtool.data.store import Manifest, SourceShare, StoreBuild, TokenizerMark, building
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
    find,
    sequence_hash,
)

TABLE_SLOTS = 1 << 23
"""Slots of the counting table, 16 bytes each; three quarters of them are used before there are two parts."""
LARGEST_COUNT = 2**31 - 1


def build_model_store(
    folder: Path,
    documents: Iterable[Document],
    tokenizer: TokenizerMark,
    sources: Sequence[Source],
    *,
    top_k: int = 100_000,
    per_key: int = 12,
    once_per_document: bool = True,
) -> Manifest:
    """Write the store of all documents to ``folder``, replacing the one there in one step.

    For each length of prefix the ``top_k`` most frequent sequences are kept, and of those at most
    ``per_key`` for each prefix; among equals the one with the smaller tokens is. A sequence is a
    prefix and a whole continuation: what a document's end cuts short is not counted.
    """
    end = tokenizer.vocab_size
    with building(folder) as build:
        shares = _write_documents(build, documents, end, sources)
        size = sum(share.records + share.tokens for share in shares)
        if not size:
            raise StoreError("the answers hold no text at all: name files that do")
        tokens = np.asarray(np.memmap(build.path("documents"), token_type(end), "r"))
        with ThreadPoolExecutor(4) as pool:
            levels = list(pool.map(lambda prefix: _level(tokens, end, prefix, top_k, per_key, once_per_document), range(1, LONGEST_PREFIX + 1)))
        keys, rows = _in_order(levels)
        if not len(keys):
            raise StoreError(f"no answer has {1 + CONTINUATION} tokens: name files with longer ones")
        slots = _slots(keys)
        _add_totals(tokens, end, slots, keys, once_per_document)
        for part, array in (("slots", slots), ("keys", keys), ("rows", rows)):
            array.tofile(build.path(part))
        _write_entries(build.path("entries", "mdb"), keys, rows, tokens.dtype)
        counts = {
            "documents": sum(share.records for share in shares),
            "tokens": sum(share.tokens for share in shares),
            "keys": len(keys),
            "continuations": len(rows),
            "end_token": end,
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
) -> tuple[SourceShare, ...]:
    """Keep the token ids, so that the store can be built anew without its sources; empty documents are left out."""
    kind = token_type(end)
    records: Counter[int] = Counter()
    tokens: Counter[int] = Counter()
    with open(build.path("documents"), "wb") as stream:
        for document in documents:
            if len(document.ids):
                np.append(np.asarray(document.ids, kind), kind.type(end)).tofile(stream)
                records[document.source] += 1
                tokens[document.source] += len(document.ids)
    return tuple(
        SourceShare(source.name, source.sha256, records[number], tokens[number])
        for number, source in enumerate(sources)
    )


def _level(tokens: Ints, end: int, prefix: int, top_k: int, per_key: int, once: bool) -> tuple[Ints, Ints]:
    """Keys and rows of the prefixes of one length; a key's range of rows is only its size yet, in STOP."""
    length = prefix + CONTINUATION
    places, counts = _most_frequent(tokens, end, length, top_k, once)
    best = np.full((len(places), per_key), -1, np.int32)
    best = best[: _group(tokens, places, counts, prefix, best, np.full(_table_size(len(places)), -1, np.int64))]
    kept = best[best >= 0]
    keys = np.full((len(best), KEY_WIDTH), NO_TOKEN, np.int32)
    keys[:, :prefix] = tokens[places[best[:, :1]] + np.arange(prefix)]
    keys[:, LENGTH] = prefix
    keys[:, STOP] = np.count_nonzero(best >= 0, axis=1)
    rows = np.empty((len(kept), ROW_WIDTH), np.int32)
    rows[:, :CONTINUATION] = tokens[places[kept][:, None] + np.arange(prefix, length)]
    rows[:, COUNT] = np.minimum(counts[kept], LARGEST_COUNT)
    return keys, rows


def _most_frequent(tokens: Ints, end: int, length: int, top_k: int, once: bool) -> tuple[Ints, Ints]:
    """First places and counts of the ``top_k`` most frequent sequences of a length."""
    size = min(_table_size(len(tokens)), TABLE_SLOTS)
    parts = 1
    while True:
        places, counts = np.empty(0, np.int64), np.empty(0, np.int64)
        for part in range(parts):
            table, found, seen = np.full(size, -1, np.int64), np.zeros(size, np.uint32), np.zeros(size, np.uint32)
            if not _count(tokens, end, length, part, parts, once, table, found, seen):
                break  # the table is too small for so large a part
            floor = counts.min() if len(counts) == top_k else 1
            used = np.flatnonzero(found >= floor)
            places, counts = np.append(places, table[used]), np.append(counts, found[used])
            chosen = _best(tokens, places, counts, length, top_k)
            places, counts = places[chosen], counts[chosen]
        else:
            return places, counts
        parts *= 2


def _table_size(entries: int) -> int:
    """Slots of a hash table that stays half empty; a power of two."""
    return 1 << (2 * max(entries, 1)).bit_length()


def _best(tokens: Ints, places: Ints, counts: Ints, length: int, most: int) -> Ints:
    """Which of some different sequences are the ``most`` frequent; among equals those with the smallest tokens."""
    if len(places) <= most:
        return np.arange(len(places))
    last = np.partition(counts, -most)[-most]
    chosen = [np.flatnonzero(counts > last)]
    equal = np.flatnonzero(counts == last)
    missing = most - len(chosen[0])
    for offset in range(length):
        column = tokens[places[equal] + offset]
        middle = np.partition(column, missing - 1)[missing - 1]
        chosen.append(equal[column < middle])
        missing -= len(chosen[-1])
        equal = equal[column == middle]
    return np.concatenate([*chosen, equal])


@njit(cache=True, nogil=True)
def _count(
    tokens: Ints,
    end: int,
    length: int,
    part: int,
    parts: int,
    once: bool,
    places: Ints,
    counts: Ints,
    documents: Ints,
) -> bool:
    """Count the sequences of one part in a hash table; false when it is too small."""
    room = len(places) // 4 * 3
    document, begin = 1, 0
    for last in range(len(tokens)):
        if tokens[last] == end:
            document += 1
            begin = last + 1
        elif last + 1 - begin >= length:
            at = last + 1 - length
            mark = sequence_hash(tokens, at, length)
            if (mark >> 32) & (parts - 1) == part:
                slot = _slot(places, tokens, at, length, mark, 0)
                if places[slot] < 0:
                    if room == 0:
                        return False
                    room -= 1
                    places[slot] = at
                elif once and documents[slot] == document:
                    continue
                counts[slot] += 1
                documents[slot] = document
    return True


@njit(cache=True, nogil=True)
def _slot(places: Ints, tokens: Ints, at: int, length: int, mark: int, oldest: int) -> int:
    """Where a sequence is in a table of places, or where it would be; places before ``oldest`` are free."""
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
def _group(tokens: Ints, places: Ints, counts: Ints, prefix: int, best: Ints, table: Ints) -> int:
    """Sort the sequences of each prefix into a line of ``best``, most frequent first; the number of prefixes."""
    owners = np.empty(len(table), np.int32)
    size = 0
    for row in range(len(places)):
        slot = _slot(table, tokens, places[row], prefix, sequence_hash(tokens, places[row], prefix), 0)
        if table[slot] < 0:
            table[slot] = places[row]
            owners[slot] = size
            size += 1
        line = best[owners[slot]]
        rank = len(line)
        while rank > 0 and (line[rank - 1] < 0 or _before(tokens, places, counts, row, line[rank - 1], prefix)):
            if rank < len(line):
                line[rank] = line[rank - 1]
            rank -= 1
        if rank < len(line):
            line[rank] = row
    return size


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
    filled = (keys[:, :LONGEST_PREFIX] - NO_TOKEN).astype(np.uint64)
    order = np.lexsort([filled[:, at - 1] << np.uint64(32) | filled[:, at] for at in range(LONGEST_PREFIX - 1, 0, -2)])
    sizes = keys[:, STOP].astype(np.int64)
    starts = (np.cumsum(sizes) - sizes)[order]
    keys, sizes = keys[order], sizes[order]
    keys[:, STOP] = np.cumsum(sizes)
    keys[:, START] = keys[:, STOP] - sizes
    keys[:, TOTAL] = 0
    return keys, rows[np.repeat(starts - keys[:, START], sizes) + np.arange(len(rows))]


def _slots(keys: Ints) -> Ints:
    slots = np.full(_table_size(len(keys)), -1, np.int32)
    _fill(slots, keys)
    return slots


@njit(cache=True, nogil=True)
def _fill(slots: Ints, keys: Ints) -> None:
    mask = len(slots) - 1
    for key in range(len(keys)):
        slot = sequence_hash(keys[key], 0, keys[key, LENGTH]) & mask
        while slots[slot] >= 0:
            slot = (slot + 1) & mask
        slots[slot] = key


def _add_totals(tokens: Ints, end: int, slots: Ints, keys: Ints, once: bool) -> None:
    ends = np.flatnonzero(tokens == end)
    longest = int(np.diff(ends, prepend=-1).max())
    def of_prefix(prefix: int) -> Ints:
        return _totals(tokens, end, prefix, slots, keys, once, np.full(_table_size(longest), -1, np.int64))
    with ThreadPoolExecutor(4) as pool:
        for totals in pool.map(of_prefix, range(1,5)):
            keys[:, TOTAL] += np.minimum(totals, LARGEST_COUNT).astype(np.int32)


@njit(cache=True, nogil=True)
def _totals(tokens: Ints, end: int, prefix: int, slots: Ints, keys: Ints, once: bool, table: Ints) -> Ints:
    """The counts of all sequences that each prefix of a length starts; ``table`` holds those of one document."""
    totals = np.zeros(len(keys), np.int64)
    length = prefix + CONTINUATION
    begin = 0
    for last in range(len(tokens)):
        if tokens[last] == end:
            begin = last + 1
        at = last + 1 - length
        if at < begin:
            continue
        key = find(slots, keys, tokens, at, prefix)
        if key < 0:
            continue
        if once:
            slot = _slot(table, tokens, at, length, sequence_hash(tokens, at, length), begin)
            if table[slot] >= begin:
                continue
            table[slot] = at
        totals[key] += 1
    return totals


def _write_entries(path: Path, keys: Ints, rows: Ints, kind: np.dtype[Any]) -> None:
    """The same as a portable LMDB file: prefixes as big-endian tokens, msgpack lists of [tokens, count]."""
    import lmdb

    # msgpack takes numbers wider than they need to be, and rows of one width need no loop.
    tokens, wide = kind.newbyteorder(">"), np.dtype(">u4")
    token_mark, wide_mark, list_mark = (0xCD if kind.itemsize == 2 else 0xCE), 0xCE, 0xDD
    number = [("mark", np.uint8), ("value", tokens)]
    packed = np.empty(len(rows), [("lists", np.uint8, 2), ("tokens", number, CONTINUATION), ("mark", np.uint8), ("count", wide)])
    packed["lists"] = 0x92, 0x90 + CONTINUATION
    packed["tokens"]["mark"], packed["tokens"]["value"] = token_mark, rows[:, :CONTINUATION]
    packed["mark"], packed["count"] = wide_mark, rows[:, COUNT]
    heads = np.empty(len(keys), [("mark", np.uint8), ("size", wide)])
    heads["mark"], heads["size"] = list_mark, keys[:, STOP] - keys[:, START]
    room = 4 * (packed.nbytes + 128 * len(keys)) + (1 << 24)
    with (
        lmdb.open(str(path), subdir=False, lock=False, sync=False, map_size=room) as env,
        env.begin(write=True) as transaction,
        transaction.cursor() as cursor,
    ):
        cursor.putmulti(_entries(keys, heads, packed), append=True)


def _entries(keys: Ints, heads: Ints, packed: Ints) -> Iterator[tuple[bytes, bytes]]:
    prefixes, head, row = keys[:, :LONGEST_PREFIX].astype(">u4").tobytes(), heads.tobytes(), packed.tobytes()
    for number, (length, start, stop) in enumerate(keys[:, LENGTH : STOP + 1].tolist()):
        at = number * 4 * LONGEST_PREFIX
        yield (
            prefixes[at : at + 4 * length],
            head[number * 5 : number * 5 + 5] + row[start * packed.itemsize : stop * packed.itemsize],
        )
