"""Creates, opens and rebuilds the files of a history store.

The ring has the layout of a token log without blocks. Conversations are consecutive, each preceded by an empty position
and a few tokens of its prompt. Writers must hold the LMDB write lock of the conversations. To the holder of that lock,
positions at or above the committed end are leftovers of an append that was killed, which it unlinks from their chains.
Readers must ignore such positions, since an append may be in progress.

The files are rebuilt to enlarge the store, when conversations are dropped, and when positions would overflow. The
caller must hold the write lock, so that nobody appends to files about to be replaced. Other processes see the new
manifest at their next append or refresh.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from io import FileIO
from pathlib import Path
from shutil import disk_usage
from typing import NamedTuple

import lmdb
import numpy as np

from hdtool.data.errors import StoreError, error_reason, write_fault
from hdtool.data.output_files import sync_to_disk
from hdtool.data.stores.history_manifest import (
    HistoryManifest,
    history_lock,
    is_new_history,
    manifest_stamp,
    read_history_manifest,
    sweep_history,
)
from hdtool.data.stores.manifest import TokenizerFingerprint
from hdtool.data.stores.store_file_names import HISTORY_FILES, MANIFEST, create_empty, leftovers, write_manifest
from hdtool.runtime.kernels.compiled import Ints, compiled
from hdtool.runtime.stores.history_metadata import RecordFile, StoredConversation, StoreState
from hdtool.runtime.stores.model_store import mix_hash
from hdtool.runtime.stores.token_log import (
    CHAIN_KEY_TOKENS,
    LOG,
    LOG_BLOCK,
    NO_TOKEN,
    PREVIOUS,
    TOKEN,
    TokenLog,
    chain_of,
    entries_of,
    heads_of,
    link,
)

POSITIONS_PER_CHAIN = 2
"""Average number of positions per chain in a full ring, so that a position takes 10 bytes, chains included."""
CHAINS_HEADER_BYTES = 64
"""Size of the header before the chains. It holds, as an int64, the end of the positions that may have been written."""
ALLOCATION_POSITIONS = 1 << 16
"""Number of positions whose disk space is allocated at once; writing to a mapped page without space kills a process."""
ZERO_BLOCK = 1 << 20
BYTES_PER_POSITION = 8
BYTES_PER_CHAIN = 4


class HistoryRing:
    """The ring and chains of a history store, memory-mapped from the files that its manifest names."""

    def __init__(self, folder: Path, manifest: HistoryManifest, *, writable: bool = True) -> None:
        self.size = manifest.size
        self.chains = max(1, manifest.size // POSITIONS_PER_CHAIN)
        self._path, self._chains_path = manifest.path(folder, "ring"), manifest.path(folder, "chains")
        entries = _mapped(self._path, BYTES_PER_POSITION * self.size, writable)
        chains = _mapped(self._chains_path, CHAINS_HEADER_BYTES + BYTES_PER_CHAIN * self.chains, writable)
        self.entries: Ints = np.frombuffer(entries, np.int32).reshape(-1, 2)
        self._header: Ints = np.frombuffer(chains, np.int64, 1)
        self.heads: Ints = np.frombuffer(chains, np.int32, offset=CHAINS_HEADER_BYTES)
        self._end = np.zeros(1, np.int64)
        self._log = np.zeros(1, LOG)
        self.fill(self._log, self._end)

    @property
    def nbytes(self) -> int:
        return self.entries.nbytes + CHAINS_HEADER_BYTES + self.heads.nbytes

    def fill(self, log: Ints, end: Ints) -> None:
        """Fill a record for compiled code with the ring's sizes and the addresses of its arrays and of ``end``."""
        log["end_at"], log["owners"] = end.ctypes.data, 0
        log["entries"], log["heads"] = self.entries.ctypes.data, self.heads.ctypes.data
        log["size"], log["chains"] = self.size, self.chains

    def recover(self, end: int) -> None:
        """Unlink the positions that a killed writer left after the committed end, and reset the header to this end."""
        if end < (reserved := int(self._header[0])) <= end + self.size:
            unlink(self._log, end, reserved)
        self._header[0] = end

    def append(self, end: int, overlap: Ints, tokens: Ints) -> int:
        """Write a conversation after the committed end and return the new end, which the caller must commit.

        ``overlap`` holds the tokens that precede the answer's ``tokens``.
        """
        stop = end + 1 + len(overlap) + len(tokens)
        self.recover(end)
        self._allocate(end, stop)
        self._header[0] = stop
        write(self._log, end, overlap, tokens)
        return stop

    def tokens(self, first: int, count: int) -> Ints:
        """Return a copy of the ``count`` tokens from position ``first`` on."""
        positions = np.arange(first, first + count) & (self.size - 1)
        ring_tokens: Ints = self.entries[positions, TOKEN]
        return ring_tokens

    def _allocate(self, start: int, stop: int) -> None:
        """Allocate disk space for each run of ``ALLOCATION_POSITIONS`` positions that begins in ``[start, stop)``."""
        start, stop = (
            min(self.size, -(-position // ALLOCATION_POSITIONS) * ALLOCATION_POSITIONS) for position in (start, stop)
        )
        if start < stop:
            with open(self._path, "r+b", buffering=0) as stream:
                _write_zeros(stream, BYTES_PER_POSITION * start, BYTES_PER_POSITION * stop)


def create_ring(folder: Path, manifest: HistoryManifest) -> HistoryRing:
    """Create the files of an empty ring and return the ring."""
    ring, chains = manifest.path(folder, "ring"), manifest.path(folder, "chains")
    for path in (ring, chains):
        create_empty(path)
    with open(ring, "r+b", buffering=0) as stream:
        stream.truncate(BYTES_PER_POSITION * manifest.size)
    with open(chains, "r+b", buffering=0) as stream:
        _write_zeros(stream, 0, CHAINS_HEADER_BYTES + BYTES_PER_CHAIN * max(1, manifest.size // POSITIONS_PER_CHAIN))
    return HistoryRing(folder, manifest)


def compile_ring() -> None:
    """Compile the functions that append conversations, or load them from the cache, so that no append has to wait."""
    log, none = TokenLog(size=LOG_BLOCK).memory, np.empty(0, np.int32)
    write(log, 0, none, none)
    unlink(log, 0, 0)


def _mapped(path: Path, size: int, writable: bool) -> mmap.mmap:
    try:
        with open(path, "r+b" if writable else "rb") as stream:
            if (file_bytes := os.fstat(stream.fileno()).st_size) < size:
                raise StoreError(f"{path} has {file_bytes:,} bytes instead of {size:,}")
            return mmap.mmap(stream.fileno(), size, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
    except FileNotFoundError:
        raise StoreError(f"{path} is missing") from None


def _write_zeros(stream: FileIO, start: int, stop: int) -> None:
    stream.seek(start)
    while start < stop:
        start += stream.write(bytes(min(ZERO_BLOCK, stop - start)))


@compiled
def write(memory: Ints, position: int, overlap: Ints, tokens: Ints) -> None:
    """Write a conversation starting at ``position``; the tokens in ``overlap`` aren't linked to chains."""
    log = memory[0]
    entries, mask = entries_of(log), log.size - 1
    entries[position & mask, TOKEN], entries[position & mask, PREVIOUS] = NO_TOKEN, 0
    position += 1
    for token in overlap:
        entries[position & mask, TOKEN], entries[position & mask, PREVIOUS] = token, 0
        position += 1
    for token in tokens:
        entries[position & mask, TOKEN], entries[position & mask, PREVIOUS] = token, 0
        link(log, position)
        position += 1


@compiled
def unlink(memory: Ints, end: int, reserved: int) -> None:
    """Unlink the positions in ``[end, reserved)``, latest first, to restore the chains of the committed positions."""
    log = memory[0]
    entries, heads, mask = entries_of(log), heads_of(log), log.size - 1
    for position in range(reserved - 1, end - 1, -1):
        pair_hash = np.uint64(0)
        for length in range(1, CHAIN_KEY_TOKENS + 1):
            pair_hash = mix_hash(pair_hash, max(entries[(position - length) & mask, TOKEN], np.int32(0)))
        chain = chain_of(log, pair_hash)
        previous = entries[position & mask, PREVIOUS]
        if heads[chain] == position:
            heads[chain] = previous if 0 <= previous < position else 0


MAX_STORE_BYTES = 256 << 20
"""Default limit of a store's size in bytes."""
DISK_BYTES_PER_POSITION = 12
"""Bytes per position on disk: token, link, and its share of the chains and the conversations."""
NEW_STORE_POSITIONS, MIN_STORE_POSITIONS = 1 << 16, 1 << 8
"""Number of positions in a new store, and minimum for stores with a small size limit."""
FOLDER_MODE = 0o700
"""Mode of a new folder, private because a history contains conversations. Existing folders keep their mode."""
RESERVED_DISK_BYTES = 16 << 20
"""Disk space in bytes that a store leaves free."""
OPEN_ATTEMPTS = 10
"""Maximum number of attempts to open a store that other processes keep replacing."""


class OpenFiles(NamedTuple):
    """The open files of a history store, with its manifest and the manifest's ``manifest_stamp``."""

    manifest: HistoryManifest
    stamp: tuple[int, int]
    ring: HistoryRing
    records: RecordFile


def positions_within(max_bytes: int) -> int:
    """Return the maximum number of positions in ``max_bytes``: a power of two, at least ``MIN_STORE_POSITIONS``."""
    return max(MIN_STORE_POSITIONS, 1 << (max_bytes // DISK_BYTES_PER_POSITION).bit_length() - 1)


@contextmanager
def store_errors(folder: Path) -> Iterator[None]:
    """Re-raise OSError and LMDB errors as StoreError, with advice on how to solve the problem."""
    try:
        yield
    except lmdb.InvalidError as error:
        raise StoreError(f"{folder} is damaged ({error_reason(error)}): {deletion_advice(folder)}") from None
    except lmdb.Error as error:
        if not isinstance(error, lmdb.DiskError) and os.strerror(errno.EIO) not in str(error):
            raise StoreError(
                f"{folder} cannot be used (LMDB: {error_reason(error)}): make room, or {deletion_advice(folder)}"
            ) from None
        raise _unwritable(folder, write_fault(folder, error)) from None
    except OSError as error:
        raise _unwritable(folder, error.strerror or str(error)) from error


def _unwritable(folder: Path, reason: str) -> StoreError:
    return StoreError(
        f"{folder} cannot be written ({reason}): what it holds stays; make room, correct the permissions or choose "
        "another place"
    )


def deletion_advice(folder: Path) -> str:
    return f"delete {folder} to begin a new history"


def create_if_new(folder: Path, tokenizer: TokenizerFingerprint, model: str, max_bytes: int = MAX_STORE_BYTES) -> None:
    """Create an empty store unless there is one; raise StoreError if the folder holds other files or isn't writable."""
    with store_errors(folder):
        if not is_new_history(folder):
            return
        folder.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
        with history_lock(folder):
            if is_new_history(folder):
                require_room(folder)
                size = min(NEW_STORE_POSITIONS, positions_within(max_bytes))
                _write(folder, HistoryManifest(tokenizer, model, max_bytes, size, secrets.token_hex(4)))


def require_room(folder: Path, needed: int = 0) -> None:
    """Raise OSError unless the disk has space for ``needed`` bytes besides ``RESERVED_DISK_BYTES``."""
    if (free := disk_usage(folder).free) < needed + RESERVED_DISK_BYTES:
        raise OSError(errno.ENOSPC, f"No space left on device, {free >> 20} MiB free")


def delete_rebuild_leftovers(folder: Path) -> None:
    """Delete the files that a killed rebuild left behind, as they may contain dropped conversations."""
    with store_errors(folder):
        if leftovers(folder, read_history_manifest(folder).file_names, HISTORY_FILES):
            with history_lock(folder):
                sweep_history(folder)


def open_files(folder: Path, *, writable: bool = True) -> OpenFiles:
    """Open the files that the manifest names, retrying if it is replaced meanwhile; raise StoreError if that fails."""
    for _ in range(OPEN_ATTEMPTS):
        # Take the stamp before reading the manifest: if the manifest is replaced in between, the next append reopens
        # the files. In the other order, appends would go to files that are no longer read.
        stamp = _stamp(folder)
        manifest = read_history_manifest(folder)
        try:
            with store_errors(folder):
                ring = HistoryRing(folder, manifest, writable=writable)
                records = RecordFile.of(manifest.path(folder, "conversations"), positions_within(manifest.max_bytes))
                return OpenFiles(manifest, stamp, ring, records)
        except StoreError as error:
            if read_history_manifest(folder) == manifest:
                known = str(error).startswith(f"{folder} ")
                raise error if known else StoreError(f"{error}: {deletion_advice(folder)}") from None
    raise StoreError(f"{folder} was replaced {OPEN_ATTEMPTS} times while it was opened: wait for the commands to end")


def _stamp(folder: Path) -> tuple[int, int]:
    try:
        return manifest_stamp(folder / MANIFEST)
    except OSError:
        return 0, 0  # reading the manifest will report the error


def rebuild(folder: Path, old: OpenFiles, kept: Sequence[StoredConversation], size: int | None = None) -> None:
    """Replace the ``old`` files with new ones of ``size`` positions (default: as many) for the ``kept`` conversations.

    The conversations are given oldest first, and numbered anew. The caller must hold the write lock of ``old.records``.
    Raise StoreError if another command has removed or replaced the ``old`` files.
    """
    with _locked(folder, old):
        manifest = replace(old.manifest, size=size or old.manifest.size, build=secrets.token_hex(4))
        _write(
            folder,
            manifest,
            ((each, old.ring.tokens(each.first - each.before, each.before + each.tokens)) for each in kept),
        )


@contextmanager
def _locked(folder: Path, old: OpenFiles) -> Iterator[None]:
    """Hold the folder's lock; raise StoreError if another command has removed or replaced the ``old`` files."""
    with history_lock(folder):
        if _stamp(folder) != old.stamp:
            raise StoreError(f"{folder} was removed or replaced by another command meanwhile: try again")
        yield


def _write(folder: Path, manifest: HistoryManifest, kept: Iterable[tuple[StoredConversation, Ints]] = ()) -> None:
    """Write new files with conversations, then the manifest that names these files, and delete the old files.

    ``kept`` holds the conversations, oldest first, each with its tokens, including those from before the answer.
    On an error before the manifest is replaced, the new files are deleted and the old ones stay in use.
    """
    try:
        ring, end = create_ring(folder, manifest), 0
        moved = list[StoredConversation]()
        for each, tokens in kept:
            end = ring.append(end, tokens[: each.before], tokens[each.before :])
            moved.append(each._replace(number=len(moved), first=end - each.tokens))
        path = manifest.path(folder, "conversations")
        create_empty(path)
        RecordFile.created(path, positions_within(manifest.max_bytes), StoreState(end, len(moved)), moved)
        for part in ("ring", "chains"):
            sync_to_disk(manifest.path(folder, part))
        write_manifest(folder, manifest.build, manifest.to_json())
    finally:
        sweep_history(folder)
