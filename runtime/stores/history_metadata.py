"""Metadata of a history store's conversations, in an LMDB file with msgpack values.

A conversation's key is its number, as a 64-bit big-endian integer. Its value is ``{first, before, tokens, source, time,
hash}``: the position of the answer's first token in the ring, the number of tokens kept from before it, the number of
tokens in the answer, the name of its source, a Unix timestamp, and a hash of the answer's tokens. A key of one zero
byte stores ``{end, next}``: the committed end of the ring and the next conversation's number. A conversation exists
once its transaction is committed.

LMDB's write lock locks the whole store, including the ring: writers hold it until the transaction with the new end is
committed. The lock is released if its holder is killed.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import msgpack
import numpy as np

from hdtool.data.errors import StoreError
from hdtool.runtime.kernels.compiled import Ints
from hdtool.runtime.stores.lmdb_files import damage_of, opened_once

STATE_KEY = b"\0"
"""Key of the ``StoreState``; it sorts before the keys of all conversations."""
MIN_POSITIONS_PER_CONVERSATION = 64
"""The ring keeps at most one conversation per this many positions, however short conversations are."""
BYTES_PER_CONVERSATION = 1024
"""LMDB map size per conversation; the file only grows as needed."""
MIN_MAP_BYTES = 1 << 24
MAX_READERS = 1024
SYNC_SECONDS = 1.0
"""Minimum interval between syncs to disk. A killed process loses nothing; a power failure loses unsynced appends."""
DIGEST_BYTES = 8
MAX_SOURCE_NAME = 200
"""Maximum length of a source's name in characters."""


class StoreState(NamedTuple):
    """Committed end of the ring, and the number that the next conversation will get."""

    end: int
    next: int


class StoredConversation(NamedTuple):
    """An answer in the ring; the module docstring describes the fields."""

    number: int
    first: int
    before: int
    tokens: int
    source: str
    time: float
    hash: bytes

    def packed(self) -> bytes:
        row = self._asdict()
        del row["number"]
        value: bytes = msgpack.packb(row)
        return value


class RecordFile:
    """An open LMDB file with the metadata of conversations; it stays usable after a fork."""

    def __init__(self, path: Path, positions: int) -> None:
        self.path = path
        self._room = MIN_MAP_BYTES + BYTES_PER_CONVERSATION * (positions // MIN_POSITIONS_PER_CONVERSATION)
        self._synced = time.monotonic()
        self._environment, self._process = self._open(), os.getpid()

    @classmethod
    def of(cls, path: Path, positions: int) -> RecordFile:
        """Return a file's ``RecordFile``, opening it if necessary; raise StoreError if it is missing or damaged."""

        def open_file(_: Path) -> RecordFile:
            if not path.is_file():
                raise StoreError(f"{path} is missing")
            records = cls(path, positions)
            records._check()
            return records

        return opened_once(path, open_file)

    @classmethod
    def created(
        cls, path: Path, positions: int, state: StoreState, conversations: Iterable[StoredConversation] = ()
    ) -> RecordFile:
        """Write the state and the conversations to a new file, sync it to disk, and return its ``RecordFile``."""
        records = opened_once(path, lambda _: cls(path, positions))
        with records.writing() as transaction:
            put_state(transaction, state)
            for each in conversations:
                put(transaction, each)
        records._environment.sync(True)
        return records

    @contextmanager
    def reading(self) -> Iterator[Any]:
        with self._current().begin() as transaction:
            yield transaction

    @contextmanager
    def writing(self) -> Iterator[Any]:
        """Yield a transaction that holds the store's lock and is rolled back if the block raises."""
        with self._current().begin(write=True) as transaction:
            yield transaction

    def sync(self) -> None:
        """Sync committed transactions to disk, unless the last sync was less than ``SYNC_SECONDS`` ago."""
        if (now := time.monotonic()) - self._synced > SYNC_SECONDS:
            self._synced = now
            self._current().sync(True)

    @property
    def nbytes(self) -> int:
        return os.path.getsize(self.path)

    def _current(self) -> Any:
        """Return the LMDB environment, reopening it after a fork."""
        if self._process != os.getpid():
            self._environment.close()
            self._environment, self._process = self._open(), os.getpid()
        return self._environment

    def _open(self) -> Any:
        environment = lmdb.open(
            str(self.path),
            subdir=False,
            map_size=self._room,
            max_readers=MAX_READERS,
            max_spare_txns=0,  # spare ones would be shared with forked processes
            sync=False,
            create=True,
        )
        environment.reader_check()  # releases reader slots of killed processes
        return environment

    def _check(self) -> None:
        """Raise StoreError if the file is damaged; LMDB itself may crash on damaged pages."""
        with self._environment.begin() as transaction:
            if fault := damage_of(self.path, transaction.id()):
                raise StoreError(f"{self.path} is damaged ({fault})")
            state_of(transaction, self.path)


def state_of(transaction: Any, path: Path) -> StoreState:
    row = _unpacked(transaction.get(STATE_KEY), path)
    if not all(type(row.get(name)) is int and row[name] >= 0 for name in StoreState._fields):
        raise StoreError(f"{path} is damaged (it has no state)")
    return StoreState(row["end"], row["next"])


def put_state(transaction: Any, state: StoreState) -> None:
    transaction.put(STATE_KEY, msgpack.packb(state._asdict()))


def count_of(transaction: Any) -> int:
    """Return the number of conversations."""
    return max(0, int(transaction.stat()["entries"]) - 1)


def put(transaction: Any, conversation: StoredConversation) -> None:
    transaction.put(_key(conversation.number), conversation.packed(), append=True)


def delete(transaction: Any, conversation: StoredConversation) -> None:
    transaction.delete(_key(conversation.number))


def conversations(transaction: Any, path: Path, *, latest_first: bool = False) -> Iterator[StoredConversation]:
    """Yield all conversations, oldest first unless ``latest_first``; raise StoreError at a damaged one."""
    cursor = transaction.cursor()
    for key, value in cursor.iterprev() if latest_first else cursor.iternext():
        if key == STATE_KEY:
            continue
        row = _unpacked(value, path)
        try:
            yield StoredConversation(
                int.from_bytes(key, "big"),
                _natural(row["first"]),
                _natural(row["before"]),
                _natural(row["tokens"]),
                str(row["source"]),
                float(row["time"]),
                bytes(row["hash"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"{path} is damaged (conversation {key.hex()}: {error!r})") from None


def token_hash(tokens: Ints) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(tokens, np.int32).data, digest_size=DIGEST_BYTES).digest()


def _key(number: int) -> bytes:
    return number.to_bytes(8, "big")


def _natural(number: Any) -> int:
    if type(number) is not int or not 0 <= number < 1 << 31:
        raise ValueError(f"{number!r} is no place")
    return number


def _unpacked(value: bytes | None, path: Path) -> dict[str, Any]:
    try:
        row = msgpack.unpackb(value) if value else None
    except (ValueError, msgpack.UnpackException) as error:
        raise StoreError(f"{path} is damaged ({error})") from None
    return row if isinstance(row, dict) else {}
