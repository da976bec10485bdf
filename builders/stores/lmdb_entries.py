"""The n-grams of a model store as an LMDB file with msgpack values, written by a build and listed by ``inspect``.

The runtime's arrays hold hashes of prefixes: they answer for a given context, and cannot be listed. This
file holds the prefixes themselves, in order, for people and for programs in any language.

The first byte of a key is the kind of entry: 1 to 4, what comes next after a prefix of as many tokens; 5,
the phrases that follow one token. The tokens come after it, as big-endian 32-bit numbers. A value is
``[total, distinct, continuations]``, and a continuation ``[[token, ...], count]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np

from hdtool.data.errors import StoreError
from hdtool.data.stores.store import Manifest, damaged
from hdtool.runtime.stores.model_store import LONGEST_PREFIX, Ints

KINDS = range(1, LONGEST_PREFIX + 2)
LIST_OF_2, LIST_OF_3, LIST, NUMBER_16, NUMBER_32 = 0x92, 0x93, 0xDD, 0xCD, 0xCE
"""Type bytes of msgpack. Numbers of fixed width are written without a loop, and every reader takes them."""
LARGEST_ENTRY = 256
"""Bytes that LMDB may need for an entry of one continuation."""


class Ngram(NamedTuple):
    """An entry of the file: a prefix, and what the store keeps of what follows it."""

    prefix: list[int]
    total: int
    distinct: int
    continuations: list[tuple[list[int], int]]


@dataclass(frozen=True)
class Group:
    """Continuations in the order of their prefixes, the most frequent first within each."""

    heads: Ints
    """The tokens of a prefix in each row."""
    totals: Ints
    distinct: Ints
    stops: Ints
    """Where the continuations of each prefix end."""
    tokens: Ints
    """A continuation in each row."""
    counts: Ints

    @property
    def starts(self) -> Ints:
        return np.append(0, self.stops)[:-1]


def write_entries(path: Path, groups: Iterable[tuple[int, Group]], most: int) -> None:
    """Write groups of the kinds 1, 2, ...; there are ``most`` continuations in all."""
    import lmdb

    # LMDB needs a limit beforehand; the file has the size of its content.
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


def read_entries(folder: Path, manifest: Manifest, prefix: Sequence[int] = ()) -> Iterator[Ngram]:
    """Every entry whose prefix starts with these tokens, in the order of the file.

    LMDB trusts its pages, so the checksum of the file is compared first.
    """
    import lmdb
    import msgpack

    file = manifest.files["entries"]
    if damaged(folder, replace(manifest, files={"entries": file})):
        raise StoreError(f"{folder / file.name} is damaged: build the store again with hdtool build-model-db")
    tokens = b"".join(token.to_bytes(4, "big") for token in prefix)
    try:
        with (
            lmdb.open(str(folder / file.name), subdir=False, lock=False, readonly=True) as environment,
            environment.begin() as transaction,
        ):
            for kind in KINDS:
                start, cursor = bytes([kind]) + tokens, transaction.cursor()
                for key, value in cursor.iternext() if cursor.set_range(start) else ():
                    if not key.startswith(start):
                        break
                    total, distinct, rows = msgpack.unpackb(value)
                    head = np.frombuffer(key[1:], ">u4").tolist()
                    yield Ngram(head, total, distinct, [(ids, count) for ids, count in rows])
    except lmdb.Error as error:
        raise StoreError(f"{folder / file.name} cannot be opened ({error}): build the store again") from None


def _keys(kind: int, group: Group) -> list[bytes]:
    layout = np.dtype([("kind", np.uint8), ("tokens", ">u4", group.heads.shape[1])])
    keys = np.empty(len(group.heads), layout)
    keys["kind"], keys["tokens"] = kind, group.heads
    return cast(list[bytes], keys.view(f"V{layout.itemsize}").tolist())


def _values(group: Group) -> Iterator[bytes]:
    number = [("type", np.uint8), ("value", ">u4")]
    head = np.empty(len(group.heads), [("lists", np.uint8), ("total", number), ("distinct", number), ("size", number)])
    head["lists"] = LIST_OF_3
    sizes = (("total", NUMBER_32, group.totals), ("distinct", NUMBER_32, group.distinct))
    for name, kind, values in (*sizes, ("size", LIST, group.stops - group.starts)):
        head[name]["type"], head[name]["value"] = kind, values
    rows = _rows(group)
    content, stops = rows.tobytes(), (group.stops * rows.itemsize).tolist()
    after = (content[start:stop] for start, stop in zip([0, *stops][:-1], stops, strict=True))
    return map(bytes.__add__, head.view(f"V{head.itemsize}").tolist(), after)


def _rows(group: Group) -> Ints:
    width = group.tokens.shape[1]
    wide = group.tokens.max(initial=0) >= 2**16
    token = [("type", np.uint8), ("value", ">u4" if wide else ">u2")]
    rows = np.empty(
        len(group.tokens), [("lists", np.uint8, 2), ("tokens", token, width), ("type", np.uint8), ("count", ">u4")]
    )
    rows["lists"] = LIST_OF_2, 0x90 + width
    rows["tokens"]["type"] = NUMBER_32 if wide else NUMBER_16
    rows["tokens"]["value"] = group.tokens
    rows["type"] = NUMBER_32
    rows["count"] = group.counts
    return rows
