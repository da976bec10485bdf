"""The conversations of a history store, as an LMDB file with msgpack values.

The key of a conversation is its number, as 64 big-endian bits, and its value ``{first, before, tokens, source, time,
hash}``: the place of its first token in the ring, the numbers of tokens before it and from it on, the name of its
source, the seconds since 1970, and a hash of the tokens. The key of one zero byte holds ``{end, next}``: the committed
end of the ring and the number of the next conversation. A conversation counts once its transaction is committed.

LMDB's write lock is the lock of the whole store. It blocks until it is free, is released if its holder is killed, and
protects the ring until the transaction that commits the new end is done.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import lmdb
import msgpack
import numpy as np

from hdtool.data.errors import StoreError
from hdtool.runtime.kernels.compiled import Ints
from hdtool.runtime.stores.store_files import damage_of

STATE_KEY = b"\0"
"""The key of the state, which is less than that of any conversation."""
PLACES_PER_CONVERSATION = 64
"""So many places a conversation are needed at least: more conversations are not kept, however short they are."""
BYTES_PER_CONVERSATION = 1024
"""Room of the LMDB file for a conversation; the file has the size of its content."""
MIN_MAP_BYTES = 1 << 24
MAX_READERS = 1024
SYNC_SECONDS = 1.0
"""Seconds after which an append waits for the disk; a kill loses nothing, a power failure what came since."""
DIGEST_BYTES = 8
MAX_SOURCE_NAME = 200
"""Characters of the name of a source."""

_opened: WeakValueDictionary[str, Records] = WeakValueDictionary()
"""The open files by path: LMDB opens a file only once in a process."""
_opening = threading.Lock()


class StoreState(NamedTuple):
    """What is committed."""

    end: int
    next: int


class StoredConversation(NamedTuple):
    """An answer in the ring."""

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


class Records:
    """An open LMDB file of conversations."""

    def __init__(self, path: Path, places: int) -> None:
        self.path = path
        self._room = MIN_MAP_BYTES + BYTES_PER_CONVERSATION * (places // PLACES_PER_CONVERSATION)
        self._synced = time.monotonic()
        self._environment, self._process = self._open(), os.getpid()

    @classmethod
    def of(cls, path: Path, places: int) -> Records:
        """The records in a file; a damaged file is a ``StoreError``."""
        name = os.path.realpath(path)
        with _opening:
            if (records := _opened.get(name)) is None:
                if not path.is_file():
                    raise StoreError(f"{path} is missing")
                records = cls(path, places)
                records._check()
                _opened[name] = records
        return records

    @classmethod
    def created(
        cls, path: Path, places: int, state: StoreState, conversations: Iterable[StoredConversation] = ()
    ) -> Records:
        """A new file, which is on the disk when this returns."""
        records = _opened[os.path.realpath(path)] = cls(path, places)
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
        """A transaction under the lock of the store; an error in the block undoes it."""
        with self._current().begin(write=True) as transaction:
            yield transaction

    def sync(self) -> None:
        """Have the committed transactions on the disk, at most once a second."""
        if (now := time.monotonic()) - self._synced > SYNC_SECONDS:
            self._synced = now
            self._current().sync(True)

    @property
    def nbytes(self) -> int:
        return os.path.getsize(self.path)

    def _current(self) -> Any:
        """The environment; a forked process opens its own."""
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
            max_spare_txns=0,  # a forked process would share them
            sync=False,
            create=True,
        )
        environment.reader_check()  # releases what killed processes read
        return environment

    def _check(self) -> None:
        """LMDB trusts its pages, so they are checked before it reads one."""
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
    """The number of conversations."""
    return max(0, int(transaction.stat()["entries"]) - 1)


def put(transaction: Any, conversation: StoredConversation) -> None:
    transaction.put(_key(conversation.number), conversation.packed(), append=True)


def delete(transaction: Any, conversation: StoredConversation) -> None:
    transaction.delete(_key(conversation.number))


def conversations(transaction: Any, path: Path, *, latest_first: bool = False) -> Iterator[StoredConversation]:
    """All conversations, the oldest first or the latest."""
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
