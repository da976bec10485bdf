"""Token sequences of documents on disk, counted exactly in bounded memory.

What hashing finds is compared token by token. Where a hash table of bounded size cannot hold all
sequences it counts those of one part of the hashes after the other, so memory depends on the table
and not on the input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit

from hdtool.runtime.model_store import CONTINUATION, Ints, sequence_hash

TABLE_SLOTS = 1 << 22
"""Of the counting table at most, a power of two. Counting takes about 40 bytes of memory a slot."""


@dataclass(frozen=True)
class Answers:
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


def most_frequent(answers: Answers, length: int, top_k: int) -> tuple[Ints, Ints]:
    """A place and the count of each of the ``top_k`` most frequent sequences of a length."""
    size = min(table_size(len(answers.tokens)), TABLE_SLOTS)
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


def table_size(entries: int) -> int:
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
        slot = slot_of(places, tokens, at, length, mark, 0)
        if places[slot] < 0:
            room -= 1
            if room < 0:
                return False
        elif not once or places[slot] < begin:
            repeats[slot] += 1
        places[slot] = at
    return True


@njit(cache=True, nogil=True)
def slot_of(places: Ints, tokens: Ints, at: int, length: int, mark: int, oldest: int) -> int:
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
def totals_of(tokens: Ints, end: int, prefix: int, table: Ints, owners: Ints, once: bool, seen: Ints) -> Ints:
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
        slot = slot_of(table, tokens, at, prefix, sequence_hash(tokens, at, prefix), 0)
        if table[slot] < 0:
            continue
        if once:
            place = slot_of(seen, tokens, at, length, sequence_hash(tokens, at, length), begin)
            if seen[place] >= begin:
                continue
            seen[place] = at
        totals[owners[slot]] += 1
    return totals
