"""Compile the record of a model store into the flat arrays of look-ups."""

from __future__ import annotations

import numpy as np

from hdtool.builders.stores.sequences import table_size
from hdtool.runtime.kernels.compiled import compiled
from hdtool.runtime.stores.model_record import NGRAMS, PHRASES, Group, ModelRecord
from hdtool.runtime.stores.model_store import (
    DISTINCT,
    HASH_HIGH,
    HASH_LOW,
    KEY_WIDTH,
    LONGEST_PROBE,
    START,
    STOP,
    TOTAL,
    Ints,
    halves,
    sequence_hash,
    slot_of,
)

DOUBLINGS = 3
"""How often the hash table is doubled at most, for keys that lie too close together."""


def compiled_arrays(record: ModelRecord) -> dict[str, Ints]:
    """The arrays of a store by part."""
    by_length = [record.group(kind) for kind in NGRAMS if kind != PHRASES]
    return {**_hashed(by_length), **_by_token(record.group(PHRASES), record.end)}


def _hashed(by_length: list[Group]) -> dict[str, Ints]:
    """The prefixes of all lengths as a hash table, and what comes next after each."""
    keys = np.empty((sum(len(group.heads) for group in by_length), KEY_WIDTH), np.int32)
    key = row = 0
    for group in by_length:
        own = keys[key : key + len(group.heads)]
        own[:, START], own[:, STOP] = group.starts + row, group.stops + row
        own[:, TOTAL], own[:, DISTINCT] = group.totals, group.distinct
        key, row = key + len(group.heads), row + len(group.counts)
    rows = np.concatenate([np.column_stack([group.tokens, group.counts]) for group in by_length])
    heads = [group.heads for group in by_length]
    return {"slots": _table(keys, heads), "keys": keys, "rows": rows.astype(np.int32)}


def _table(keys: Ints, heads: list[Ints]) -> Ints:
    """The hash table of all prefixes, so large that a search for each ends within ``LONGEST_PROBE`` slots.

    Keys with equal hashes are neighbours in any table: after some doublings the rest is left out.
    """
    size = table_size(len(keys))
    for _ in range(DOUBLINGS + 1):
        slots = np.full(size, -1, np.int32)
        firsts = np.cumsum([0, *map(len, heads)])
        if not sum(_fill(slots, keys, own, first) for own, first in zip(heads, firsts, strict=False)):
            break
        size *= 2
    return slots


@compiled
def _fill(slots: Ints, keys: Ints, heads: Ints, first: int) -> int:
    """Enter prefixes into the hash table, the keys from ``first`` on; the number of those without a slot."""
    mask, left_out = len(slots) - 1, 0
    for number in range(len(heads)):
        prefix_hash = sequence_hash(heads[number], 0, heads.shape[1])
        keys[first + number, HASH_LOW], keys[first + number, HASH_HIGH] = halves(prefix_hash)
        slot, probes = slot_of(prefix_hash, mask), 1
        while slots[slot] >= 0 and probes < LONGEST_PROBE:
            slot = (slot + 1) & mask
            probes += 1
        if slots[slot] < 0:
            slots[slot] = first + number
        else:
            left_out += 1
    return left_out


def _by_token(phrases: Group, end: int) -> dict[str, Ints]:
    """Phrases, and for each token where those begin that follow it."""
    sizes = np.zeros(end + 1, np.int32)
    sizes[phrases.heads[:, 0].astype(np.int64) + 1] = phrases.stops - phrases.starts
    rows = np.column_stack([phrases.tokens, phrases.counts])
    return {"heads": np.cumsum(sizes, dtype=np.int32), "phrases": rows.astype(np.int32)}
