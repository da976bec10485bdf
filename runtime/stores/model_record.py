"""The record of a model store: its documents and the n-grams counted in them, as an LMDB file with msgpack values.

Stores are added to, merged and taken apart by their documents. The n-grams have the tokens of their prefixes, of which
the arrays of look-ups keep only hashes: ``inspect`` lists them, and the arrays are compiled from them.

The first byte of a key is the kind of its entry, and big-endian 32-bit numbers follow:

- 0, a document: its number. The value is its tokens.
- 1 to 4, what comes next after a prefix of as many tokens, and 5, the phrases after one token: the tokens of the
  prefix. The value is ``[total, distinct, tokens, counts]``; ``tokens`` are all continuations, one after another.

Tokens and counts in values are binary, the least significant byte first: tokens in two bytes each, or in four if the
vocabulary needs them, and counts in four.

The file is written once and never changed, so it needs no lock.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import lmdb
import msgpack
import numpy as np

from hdtool.data.errors import StoreError
from hdtool.data.stores.documents import Tokens, token_type
from hdtool.data.stores.store import BUILD_COMMANDS, Manifest, damaged
from hdtool.runtime.kernels.compiled import Ints
from hdtool.runtime.stores.model_store import KIND, LONGEST_PREFIX, PHRASE

PART = "record"
DOCUMENT = 0
NGRAMS = range(1, LONGEST_PREFIX + 2)
PHRASES = NGRAMS[-1]
NUMBER, COUNT = np.dtype(">u4"), np.dtype("<u4")
AT_ONCE = 1 << 14
"""Entries of a transaction."""
MOST_PER_ENTRY = 1 << 13
"""Bytes that LMDB may need for an entry beside its value, as pages are not full."""

_opened: WeakValueDictionary[str, ModelRecord] = WeakValueDictionary()
"""LMDB opens a file once in a process."""
_opening = threading.Lock()

T = TypeVar("T")


class Ngrams(NamedTuple):
    """A prefix, and what the store has of what follows it."""

    prefix: list[int]
    total: int
    distinct: int
    continuations: list[tuple[list[int], int]]


@dataclass(frozen=True)
class Group:
    """N-grams of one kind in the order of their prefixes, the most frequent continuation first within each."""

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


class ModelRecord:
    """A record opened for reading."""

    def __init__(self, path: Path, end: int) -> None:
        """``end`` is the number after the last token of the vocabulary."""
        self.path = path
        self.end = end
        self._width = _width(end)
        try:
            self._environment = lmdb.open(str(path), subdir=False, lock=False, readonly=True)
        except lmdb.Error as error:
            raise StoreError(f"{path} cannot be opened ({error}): build the store again") from None

    @classmethod
    def opened(cls, path: Path, end: int) -> ModelRecord:
        """The record in a file, which is opened if it is not open in this process."""
        name = os.path.realpath(path)
        with _opening:
            if (found := _opened.get(name)) is None:
                found = _opened[name] = cls(Path(name), end)
        return found

    @classmethod
    def of(cls, folder: Path, manifest: Manifest) -> ModelRecord:
        """The record of a store. LMDB trusts its pages, so the checksum of the file is compared first."""
        file = manifest.files[PART]
        if damaged(folder, replace(manifest, files={PART: file})):
            raise StoreError(f"{folder / file.name} is damaged: build the store again with {BUILD_COMMANDS[KIND]}")
        return cls.opened(folder / file.name, manifest.tokenizer.vocab_size)

    def documents(self) -> Iterator[Tokens]:
        """The tokens of all documents, in the order of their inputs."""
        for _, value in self._entries(_start(DOCUMENT, [])):
            ids = np.frombuffer(value, self._width)
            if ids.max(initial=0) >= self.end:
                raise self._damage(f"token {ids.max():,} is in a document")
            yield ids

    def text(self) -> Tokens:
        """All documents in one array, an end after each."""
        end = np.array([self.end], self._width)
        return np.concatenate([end[:0], *(part for ids in self.documents() for part in (ids, end))])

    def ngrams(self, prefix: Sequence[int] = ()) -> Iterator[Ngrams]:
        """All n-grams whose prefix starts with these tokens, in the order of the record."""
        for kind in NGRAMS:
            for key, (total, distinct, tokens, counts) in self._entries(_start(kind, prefix)):
                followers = np.frombuffer(tokens, self._width).reshape(-1, PHRASE if kind == PHRASES else 1)
                rows = zip(followers.tolist(), np.frombuffer(counts, COUNT).tolist(), strict=True)
                yield Ngrams(np.frombuffer(key[1:], NUMBER).tolist(), total, distinct, list(rows))

    def group(self, kind: int) -> Group:
        """All n-grams of a kind."""
        length, width = (1, PHRASE) if kind == PHRASES else (kind, 1)
        entries = [(key[1:], *value) for key, value in self._entries(_start(kind, []))]
        keys, totals, distinct, tokens, counts = zip(*entries, strict=True) if entries else [()] * 5
        return Group(
            heads=np.frombuffer(b"".join(keys), NUMBER).astype(np.int64).reshape(-1, length),
            totals=np.array(totals, np.int64),
            distinct=np.array(distinct, np.int64),
            stops=np.cumsum([len(each) // COUNT.itemsize for each in counts], dtype=np.int64),
            tokens=np.frombuffer(b"".join(tokens), self._width).astype(np.int64).reshape(-1, width),
            counts=np.frombuffer(b"".join(counts), COUNT).astype(np.int64),
        )

    def _entries(self, start: bytes) -> Iterator[tuple[bytes, Any]]:
        """The entries whose keys begin with ``start``."""
        try:
            with self._environment.begin() as transaction:
                cursor = transaction.cursor()
                for key, value in cursor.iternext() if cursor.set_range(start) else ():
                    if not key.startswith(start):
                        break
                    yield key, msgpack.unpackb(value)
        except (lmdb.Error, ValueError, msgpack.UnpackException) as error:
            raise self._damage(str(error)) from None

    def _damage(self, found: str) -> StoreError:
        return StoreError(f"{self.path} is damaged ({found}): build the store again with {BUILD_COMMANDS[KIND]}")


class RecordWriter:
    """A new record, written in the order of its keys: the documents, then the n-grams by kind."""

    def __init__(self, environment: Any, end: int) -> None:
        self._environment = environment
        self._width = _width(end)
        self._pack = msgpack.Packer().pack

    def put_documents(self, documents: Iterable[Tokens]) -> None:
        self._put(
            (_start(DOCUMENT, [number]), self._pack(ids.astype(self._width).tobytes()))
            for number, ids in enumerate(documents)
        )

    def put_ngrams(self, kind: int, group: Group) -> None:
        start, heads = bytes([kind]), group.heads.astype(NUMBER).view(f"V{NUMBER.itemsize * group.heads.shape[1]}")
        tokens, counts = group.tokens.astype(self._width).tobytes(), group.counts.astype(COUNT).tobytes()
        wide, size = self._width.itemsize * group.tokens.shape[1], COUNT.itemsize
        columns = (heads.ravel(), group.totals, group.distinct, group.starts, group.stops)
        self._put(
            (
                start + head,
                self._pack((total, distinct, tokens[wide * first : wide * stop], counts[size * first : size * stop])),
            )
            for head, total, distinct, first, stop in zip(*(column.tolist() for column in columns), strict=True)
        )

    def _put(self, entries: Iterator[tuple[bytes, bytes]]) -> None:
        # A transaction keeps its pages in memory.
        for batch in _batches(entries):
            with self._environment.begin(write=True) as transaction, transaction.cursor() as cursor:
                cursor.putmulti(batch, append=True)


@contextmanager
def writing(path: Path, end: int, value_bytes: int, entries: int) -> Iterator[RecordWriter]:
    """Write a record of so many entries, whose values have so many bytes, to a file that is empty."""
    # LMDB needs a limit; the file has the size of its content.
    size = value_bytes + MOST_PER_ENTRY * entries + (1 << 24)
    try:
        with lmdb.open(str(path), subdir=False, lock=False, sync=False, map_size=size) as environment:
            yield RecordWriter(environment, end)
    except lmdb.Error as error:
        raise OSError(f"LMDB: {error}") from error


def _start(kind: int, numbers: Sequence[int]) -> bytes:
    """The start of keys of a kind."""
    return bytes([kind]) + np.asarray(numbers, NUMBER).tobytes()


def _width(end: int) -> np.dtype[Any]:
    return token_type(end).newbyteorder("<")


def _batches(items: Iterator[T]) -> Iterator[list[T]]:
    while batch := list(islice(items, AT_ONCE)):
        yield batch
