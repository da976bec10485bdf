"""The ring of a history store: its tokens and their chains, mapped from two files that all processes share.

The layout is that of a token log, without blocks: conversations follow each other, each after a place without token
and the tokens before it. Writers hold the lock of the conversations. What lies at or above the committed end is of an
append that was killed; the next writer takes it off the chains.
"""

from __future__ import annotations

import mmap
import os
from io import FileIO
from pathlib import Path

import numpy as np

from hdtool.data.errors import StoreError
from hdtool.data.stores.history_manifest import HistoryManifest
from hdtool.data.stores.store_files import create
from hdtool.runtime.kernels.compiled import Ints, compiled
from hdtool.runtime.stores.history.token_log import (
    BEFORE,
    BLOCK,
    CHAINED,
    LOG,
    NO_TOKEN,
    TOKEN,
    TokenLog,
    chain_of,
    heads_of,
    link,
    places_of,
)
from hdtool.runtime.stores.model_store import mixed

PLACES_PER_CHAIN = 2
"""Two places share a chain if the ring is full, so that a place takes 10 bytes."""
HEADER = 64
"""Bytes before the chains: the end of the places that a writer may have written, as a 64-bit number."""
ALLOCATED = 1 << 16
"""Places that get room on the disk at once: a write to a mapped file without room would end the process."""
ZEROS = 1 << 20
PLACE = 8
CHAIN = 4


class HistoryRing:
    """The mapped ring and chains of one build of a history store."""

    def __init__(self, folder: Path, manifest: HistoryManifest, *, writable: bool = True) -> None:
        self.size = manifest.size
        self.chains = max(1, manifest.size // PLACES_PER_CHAIN)
        self._path, self._chains_path = manifest.path(folder, "ring"), manifest.path(folder, "chains")
        places = _mapped(self._path, PLACE * self.size, writable)
        chains = _mapped(self._chains_path, HEADER + CHAIN * self.chains, writable)
        self.places: Ints = np.frombuffer(places, np.int32).reshape(-1, 2)
        self._header: Ints = np.frombuffer(chains, np.int64, 1)
        self.heads: Ints = np.frombuffer(chains, np.int32, offset=HEADER)
        self._end = np.zeros(1, np.int64)
        self._log = np.zeros(1, LOG)
        self.fill(self._log, self._end)

    @property
    def nbytes(self) -> int:
        return self.places.nbytes + HEADER + self.heads.nbytes

    def fill(self, log: Ints, end: Ints) -> None:
        """Write the addresses of the ring to a record for compiled code."""
        log["end_at"], log["owners"] = end.ctypes.data, 0
        log["places"], log["heads"] = self.places.ctypes.data, self.heads.ctypes.data
        log["size"], log["chains"] = self.size, self.chains

    def recover(self, end: int) -> None:
        """Take off the chains what a killed writer appended at the committed end."""
        if end < (reserved := int(self._header[0])) <= end + self.size:
            take_off(self._log, end, reserved)
        self._header[0] = end

    def append(self, end: int, before: Ints, tokens: Ints) -> int:
        """Write a conversation after the committed end, and return its end; it counts once that is committed."""
        stop = end + 1 + len(before) + len(tokens)
        self.recover(end)
        self._allocate(end, stop)
        self._header[0] = stop
        write(self._log, end, before, tokens)
        return stop

    def append_spans(self, other: HistoryRing, spans: Ints) -> int:
        """Write the conversations at these places of another ring, and return the end of the last one.

        A span is the place of its first answered token, and the numbers of tokens before it and from it on.
        """
        stop = int(spans[:, 1:].sum()) + len(spans)
        self._allocate(0, stop)
        copy_spans(self._log, other._log, spans)
        self._header[0] = stop
        return stop

    def lengthen(self, size: int) -> None:
        """Make the files long enough for ``size`` places; those that map them now see no difference.

        Places keep their numbers, as the ring has not run over yet. A chain becomes several that begin alike, and
        search compares tokens anyway, so no chain is built anew.
        """
        chains = self.heads.tobytes()
        with open(self._path, "r+b", buffering=0) as stream:
            stream.truncate(PLACE * size)
            _write_zeros(stream, PLACE * self.size, PLACE * min(size, -(-self.size // ALLOCATED) * ALLOCATED))
        with open(self._chains_path, "r+b") as stream:
            stream.seek(HEADER + len(chains))
            for _ in range(size // self.size - 1):
                stream.write(chains)

    def tokens(self, first: int, count: int) -> Ints:
        """A copy of the tokens at some places."""
        places = np.arange(first, first + count) & (self.size - 1)
        found: Ints = self.places[places, TOKEN]
        return found

    def _allocate(self, start: int, stop: int) -> None:
        """Give places room on the disk, when the first of a portion is written for the first time."""
        start, stop = (min(self.size, -(-place // ALLOCATED) * ALLOCATED) for place in (start, stop))
        if start < stop:
            with open(self._path, "r+b", buffering=0) as stream:
                _write_zeros(stream, PLACE * start, PLACE * stop)


def create_ring(folder: Path, manifest: HistoryManifest) -> HistoryRing:
    """The files of an empty ring."""
    ring, chains = manifest.path(folder, "ring"), manifest.path(folder, "chains")
    for path in (ring, chains):
        create(path)
    with open(ring, "r+b", buffering=0) as stream:
        stream.truncate(PLACE * manifest.size)
    with open(chains, "r+b", buffering=0) as stream:
        _write_zeros(stream, 0, HEADER + CHAIN * max(1, manifest.size // PLACES_PER_CHAIN))
    return HistoryRing(folder, manifest)


def compile_ring() -> None:
    """Compile what appends, or load it from the cache, before the first answer ends."""
    log, none = TokenLog(size=BLOCK).memory, np.empty(0, np.int32)
    write(log, 0, none, none)
    take_off(log, 0, 0)


def _mapped(path: Path, size: int, writable: bool) -> mmap.mmap:
    try:
        with open(path, "r+b" if writable else "rb") as stream:
            # Longer than the manifest states, if a process was killed while it lengthened the files.
            if (found := os.fstat(stream.fileno()).st_size) < size:
                raise StoreError(f"{path} has {found:,} bytes instead of {size:,}")
            return mmap.mmap(stream.fileno(), size, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
    except FileNotFoundError:
        raise StoreError(f"{path} is missing") from None


def _write_zeros(stream: FileIO, start: int, stop: int) -> None:
    stream.seek(start)
    while start < stop:
        start += stream.write(bytes(min(ZEROS, stop - start)))


@compiled
def write(memory: Ints, place: int, before: Ints, tokens: Ints) -> None:
    """Write a conversation from a place on; the tokens before it are on no chain."""
    log = memory[0]
    places, mask = places_of(log), log.size - 1
    places[place & mask, TOKEN], places[place & mask, BEFORE] = NO_TOKEN, 0
    place += 1
    for token in before:
        places[place & mask, TOKEN], places[place & mask, BEFORE] = token, 0
        place += 1
    for token in tokens:
        places[place & mask, TOKEN], places[place & mask, BEFORE] = token, 0
        link(log, place)
        place += 1


@compiled
def copy_spans(memory: Ints, other: Ints, spans: Ints) -> None:
    """Write conversations of another ring one after another."""
    source, mask = places_of(other[0]), other[0].size - 1
    place = 0
    for number in range(len(spans)):
        first, before, count = spans[number]
        tokens = np.empty(before + count, np.int32)
        for at in range(before + count):
            tokens[at] = source[(first - before + at) & mask, TOKEN]
        write(memory, place, tokens[:before], tokens[before:])
        place += 1 + before + count


@compiled
def take_off(memory: Ints, end: int, reserved: int) -> None:
    """Undo the links of all places from the latest to the committed end, so that the chains are as before."""
    log = memory[0]
    places, heads, mask = places_of(log), heads_of(log), log.size - 1
    for place in range(reserved - 1, end - 1, -1):
        pair_hash = np.uint64(0)
        for length in range(1, CHAINED + 1):
            pair_hash = mixed(pair_hash, max(places[(place - length) & mask, TOKEN], np.int32(0)))
        chain = chain_of(log, pair_hash)
        before = places[place & mask, BEFORE]
        if heads[chain] == place:
            heads[chain] = before if 0 <= before < place else 0
