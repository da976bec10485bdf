"""A model store's contents as a portable file: LMDB, with msgpack values.

The first byte of a key tells what it holds: 1 to 4, what comes next after a prefix of as many tokens;
5, the phrases that follow one token. The tokens are behind it, as big-endian 32-bit numbers. A value is
``[total, distinct, continuations]``, and a continuation ``[[token, ...], count]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
from numba import njit

from hdtool.runtime.stores.model_store import Ints

LIST_OF_2, LIST_OF_3, LIST, NUMBER_16, NUMBER_32 = 0x92, 0x93, 0xDD, 0xCD, 0xCE
"""Of msgpack: how what follows is to be read. Numbers of fixed width need no loop, and every reader takes them."""
LARGEST_ENTRY = 256
"""Bytes that LMDB may need for an entry of one continuation."""


@dataclass(frozen=True)
class Group:
    """Continuations in the order of what they follow, the most frequent first within each."""

    heads: Ints
    """What is followed: the tokens of a prefix in each row."""
    totals: Ints
    distinct: Ints
    stops: Ints
    """Where the continuations of each end."""
    tokens: Ints
    """A continuation in each row."""
    counts: Ints

    @property
    def starts(self) -> Ints:
        return np.append(0, self.stops[:-1])


def write_entries(path: Path, groups: Iterable[tuple[int, Group]], most: int) -> None:
    """Write groups in the order of the first bytes of their keys; ``most`` continuations in all."""
    import lmdb

    # LMDB wants a limit beforehand; the file has the size of what is written.
    size = LARGEST_ENTRY * most + (1 << 24)
    try:
        with (
            lmdb.open(str(path), subdir=False, lock=False, sync=False, map_size=size) as file,
            file.begin(write=True) as transaction,
            transaction.cursor() as cursor,
        ):
            for kind, group in groups:
                cursor.putmulti(zip(_keys(kind, group), _values(group), strict=True), append=True)
    except lmdb.Error as error:
        raise OSError(f"LMDB: {error}") from error


def _keys(kind: int, group: Group) -> list[bytes]:
    layout = np.dtype([("kind", np.uint8), ("tokens", ">u4", group.heads.shape[1])])
    keys = np.empty(len(group.heads), layout)
    keys["kind"], keys["tokens"] = kind, group.heads
    return cast(list[bytes], keys.view(f"V{layout.itemsize}").tolist())


def _values(group: Group) -> Iterator[bytes]:
    number = [("mark", np.uint8), ("value", ">u4")]
    head = np.empty(len(group.heads), [("lists", np.uint8), ("total", number), ("distinct", number), ("size", number)])
    head["lists"] = LIST_OF_3
    sizes = (("total", NUMBER_32, group.totals), ("distinct", NUMBER_32, group.distinct))
    for name, mark, values in (*sizes, ("size", LIST, group.stops - group.starts)):
        head[name]["mark"], head[name]["value"] = mark, values
    rows = _rows(group)
    content, ends = np.empty(head.nbytes + rows.nbytes, np.uint8), np.empty(len(head), np.int64)
    _interleave(_bytes_of(head), _bytes_of(rows), group.stops, content, ends)
    whole, stops = content.tobytes(), ends.tolist()
    return map(whole.__getitem__, map(slice, [0, *stops[:-1]], stops))


def _bytes_of(records: Ints) -> Ints:
    return records.view(np.uint8).reshape(len(records), -1)


@njit(cache=True, nogil=True)
def _interleave(heads: Ints, rows: Ints, stops: Ints, content: Ints, ends: Ints) -> None:
    """Each head with its rows behind it; where each of them ends."""
    at = row = 0
    for head in range(len(heads)):
        content[at : at + heads.shape[1]] = heads[head]
        at += heads.shape[1]
        while row < stops[head]:
            content[at : at + rows.shape[1]] = rows[row]
            at += rows.shape[1]
            row += 1
        ends[head] = at


def _rows(group: Group) -> Ints:
    width = group.tokens.shape[1]
    wide = group.tokens.max() >= 2**16
    token = [("mark", np.uint8), ("value", ">u4" if wide else ">u2")]
    rows = np.empty(
        len(group.tokens), [("lists", np.uint8, 2), ("tokens", token, width), ("mark", np.uint8), ("count", ">u4")]
    )
    rows["lists"] = LIST_OF_2, 0x90 + width
    rows["tokens"]["mark"] = NUMBER_32 if wide else NUMBER_16
    rows["tokens"]["value"] = group.tokens
    rows["mark"] = NUMBER_32
    rows["count"] = group.counts
    return rows
