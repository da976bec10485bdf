"""The record of a model store: an LMDB file with its documents and n-grams, from which stores are extended and merged.

A key is a byte with the kind of the entry, followed by big-endian 32-bit numbers:

- Kind 0, a document: the document's number. The value holds the document's tokens.
- Kinds 1 to 4 (the tokens after a prefix of 1 to 4 tokens) and kind 5 (the phrases after a token): the tokens of the
  prefix. The value is ``[total, distinct, tokens, counts]``, where ``tokens`` concatenates all continuations.

In values, tokens and counts are little-endian. Tokens have two bytes, or four for large vocabularies; counts have four.
The file never changes once it is written, so it is opened without a lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import lmdb
import msgpack
import numpy as np

from hdtool.data.documents import Tokens, token_type
from hdtool.data.errors import StoreError
from hdtool.data.stores.kinds import BUILT_KINDS, MODEL_KIND
from hdtool.data.stores.manifest import Manifest
from hdtool.data.stores.store_folder import damaged_files
from hdtool.runtime.kernels.compiled import Ints as Ints
from hdtool.runtime.stores.lmdb_files import damage_of, opened_once

MAX_PREFIX_TOKENS = 4
PHRASE_TOKENS = 4
"""Number of tokens in a phrase, without the token before it."""

RECORD_PART = "record"
DOCUMENT_KIND = 0
NGRAM_KINDS = range(1, MAX_PREFIX_TOKENS + 2)
PHRASE_KIND = NGRAM_KINDS[-1]
KEY_DTYPE, COUNT_DTYPE = np.dtype(">u4"), np.dtype("<u4")
ENTRIES_PER_TRANSACTION = 1 << 14
"""Number of entries written per transaction, which keeps its pages in memory."""
MAX_ENTRY_OVERHEAD = 1 << 13
"""Upper bound of LMDB's overhead per entry in bytes, including unused space in pages."""

T = TypeVar("T")


class Ngrams(NamedTuple):
    """A prefix with its continuations in the store and their counts."""

    prefix: list[int]
    total: int
    distinct: int
    continuations: list[tuple[list[int], int]]


@dataclass(frozen=True)
class NgramGroup:
    """N-grams of one kind as arrays, sorted by prefix, then by the continuation's count in descending order."""

    heads: Ints
    """Prefixes ``[prefixes, tokens]``."""
    totals: Ints
    distinct: Ints
    stops: Ints
    """End of each prefix's continuations, as an index into ``tokens`` and ``counts``."""
    tokens: Ints
    """Continuations ``[continuations, tokens]``."""
    counts: Ints

    @property
    def starts(self) -> Ints:
        return np.append(0, self.stops)[:-1]


class ModelRecord:
    """A model store's record, opened for reading; see the module docstring for its format."""

    def __init__(self, path: Path, end: int) -> None:
        """Open a file without checking its pages; raise StoreError if LMDB fails.

        ``end`` is the size of the vocabulary, and the id of the end token.
        """
        self.path = path
        self.end = end
        self._width = _width(end)
        try:
            self._environment = lmdb.open(str(path), subdir=False, lock=False, readonly=True)
        except lmdb.Error as error:
            raise StoreError(f"{path} cannot be opened ({error}): build the store again") from None

    @classmethod
    def opened(cls, path: Path, end: int) -> ModelRecord:
        """Return the record in a file, opening it if necessary, without the checks of ``of``."""
        return opened_once(path, lambda name: cls(name, end))

    @classmethod
    def of(cls, folder: Path, manifest: Manifest) -> ModelRecord:
        """Return the opened record of a store.

        Raise StoreError if the record's checksum is wrong or one of its pages is damaged, because LMDB may crash on
        such a file. The checksum alone isn't enough: a crafted file can come with a matching one.
        """
        file = manifest.files[RECORD_PART]
        if damaged_files(folder, replace(manifest, files={RECORD_PART: file})):
            raise StoreError(f"{folder / file.name} is damaged: {BUILT_KINDS[MODEL_KIND].rebuild_advice}")
        record = cls.opened(folder / file.name, manifest.tokenizer.vocab_size)
        with record._environment.begin() as transaction:
            if fault := damage_of(record.path, transaction.id()):
                raise record._damage(fault)
        return record

    def documents(self) -> Iterator[Tokens]:
        """Yield the tokens of each document, in input order; raise StoreError at damaged ones."""
        for _, value in self._entries(_start(DOCUMENT_KIND, [])):
            ids = np.frombuffer(value, self._width)
            if ids.max(initial=0) >= self.end:
                raise self._damage(f"token {ids.max():,} is in a document")
            yield ids

    def text(self) -> Tokens:
        """Return all documents as one array, with an end token after each."""
        end = np.array([self.end], self._width)
        return np.concatenate([end[:0], *(part for ids in self.documents() for part in (ids, end))])

    def ngrams(self, prefix: Sequence[int] = ()) -> Iterator[Ngrams]:
        """Yield all n-grams whose prefix starts with these tokens, ordered by kind, then by prefix."""
        for kind in NGRAM_KINDS:
            for key, (total, distinct, tokens, counts) in self._entries(_start(kind, prefix)):
                followers = np.frombuffer(tokens, self._width).reshape(-1, PHRASE_TOKENS if kind == PHRASE_KIND else 1)
                rows = zip(followers.tolist(), np.frombuffer(counts, COUNT_DTYPE).tolist(), strict=True)
                yield Ngrams(np.frombuffer(key[1:], KEY_DTYPE).tolist(), total, distinct, list(rows))

    def group(self, kind: int) -> NgramGroup:
        """Return all n-grams of a kind."""
        length, width = (1, PHRASE_TOKENS) if kind == PHRASE_KIND else (kind, 1)
        entries = [(key[1:], *value) for key, value in self._entries(_start(kind, []))]
        keys, totals, distinct, tokens, counts = zip(*entries, strict=True) if entries else [()] * 5
        return NgramGroup(
            heads=np.frombuffer(b"".join(keys), KEY_DTYPE).astype(np.int64).reshape(-1, length),
            totals=np.array(totals, np.int64),
            distinct=np.array(distinct, np.int64),
            stops=np.cumsum([len(each) // COUNT_DTYPE.itemsize for each in counts], dtype=np.int64),
            tokens=np.frombuffer(b"".join(tokens), self._width).astype(np.int64).reshape(-1, width),
            counts=np.frombuffer(b"".join(counts), COUNT_DTYPE).astype(np.int64),
        )

    def _entries(self, start: bytes) -> Iterator[tuple[bytes, Any]]:
        """Yield each key that begins with ``start``, and its unpacked value; raise StoreError for a damaged file."""
        try:
            with self._environment.begin() as transaction:
                cursor = transaction.cursor()
                for key, value in cursor.iternext() if cursor.set_range(start) else ():
                    if not key.startswith(start):
                        break
                    yield key, msgpack.unpackb(value)
        except (lmdb.Error, ValueError, msgpack.UnpackException) as error:
            raise self._damage(str(error)) from None

    def _damage(self, fault: str) -> StoreError:
        return StoreError(f"{self.path} is damaged ({fault}): {BUILT_KINDS[MODEL_KIND].rebuild_advice}")


class RecordWriter:
    """Writes a new record. Call the methods in key order: documents first, then n-grams by ascending kind."""

    def __init__(self, environment: Any, end: int) -> None:
        self._environment = environment
        self._width = _width(end)
        self._pack = msgpack.Packer().pack

    def put_documents(self, documents: Iterable[Tokens]) -> None:
        self._put(
            (_start(DOCUMENT_KIND, [number]), self._pack(ids.astype(self._width).tobytes()))
            for number, ids in enumerate(documents)
        )

    def put_ngrams(self, kind: int, group: NgramGroup) -> None:
        start, heads = (
            bytes([kind]),
            group.heads.astype(KEY_DTYPE).view(f"V{KEY_DTYPE.itemsize * group.heads.shape[1]}"),
        )
        tokens, counts = group.tokens.astype(self._width).tobytes(), group.counts.astype(COUNT_DTYPE).tobytes()
        wide, size = self._width.itemsize * group.tokens.shape[1], COUNT_DTYPE.itemsize
        columns = (heads.ravel(), group.totals, group.distinct, group.starts, group.stops)
        self._put(
            (
                start + head,
                self._pack((total, distinct, tokens[wide * first : wide * stop], counts[size * first : size * stop])),
            )
            for head, total, distinct, first, stop in zip(*(column.tolist() for column in columns), strict=True)
        )

    def _put(self, entries: Iterator[tuple[bytes, bytes]]) -> None:
        # In batches, because a transaction keeps its pages in memory.
        for batch in _batches(entries):
            with self._environment.begin(write=True) as transaction, transaction.cursor() as cursor:
                cursor.putmulti(batch, append=True)


@contextmanager
def writing(path: Path, end: int, value_bytes: int, entries: int) -> Iterator[RecordWriter]:
    """Open an empty file for writing a record, and yield the writer; convert LMDB's errors to OSError.

    The record must not exceed ``entries`` entries or ``value_bytes`` bytes of values.
    """
    # LMDB needs a size limit; the file only grows as needed.
    size = value_bytes + MAX_ENTRY_OVERHEAD * entries + (1 << 24)
    try:
        with lmdb.open(str(path), subdir=False, lock=False, sync=False, map_size=size) as environment:
            yield RecordWriter(environment, end)
    except lmdb.Error as error:
        raise OSError(f"LMDB: {error}") from error


def _start(kind: int, prefix_tokens: Sequence[int]) -> bytes:
    """Return the key made of a kind and numbers; keys with further numbers begin with its bytes."""
    return bytes([kind]) + np.asarray(prefix_tokens, KEY_DTYPE).tobytes()


def _width(end: int) -> np.dtype[Any]:
    return token_type(end).newbyteorder("<")


def _batches(items: Iterator[T]) -> Iterator[list[T]]:
    while batch := list(islice(items, ENTRIES_PER_TRANSACTION)):
        yield batch
