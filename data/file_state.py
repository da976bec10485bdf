"""Recognizes unchanged files by their metadata, without reading them, and files by their hash."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hdtool.data.progress import progress_bar

MIN_SETTLED_AGE = 2.0
"""Minimum age of a file's last change in seconds before its state is remembered.

A younger file may change again within one tick of the file system's clock and keep its state.
"""
CHUNK = 1 << 24


@dataclass(frozen=True)
class FileState:
    """Path and metadata of a file; any change to the file changes its metadata.

    A program can reset the modification time (``mtime_ns``), but not the time of the last inode change (``ctime_ns``).
    """

    path: str
    bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        place = path.resolve()
        status = place.stat()
        return cls(str(place), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)

    @property
    def holds(self) -> bool:
        """True if the file still exists in this state."""
        try:
            return FileState.of(Path(self.path)) == self
        except OSError:
            return False

    @property
    def is_settled(self) -> bool:
        return max(self.mtime_ns, self.ctime_ns) / 1e9 + MIN_SETTLED_AGE < time.time()


States = tuple[FileState, ...]
"""States of all files that something was made from."""


class StoredFile(NamedTuple):
    """SHA-256 and ``stat`` fields of a file in a folder of hdtool; if the fields have changed, the file is hashed."""

    sha256: str
    bytes: int
    mtime_ns: int = 0
    ctime_ns: int = 0
    inode: int = 0

    @classmethod
    def of(cls, path: Path, sha256: str) -> StoredFile:
        status = path.stat()
        return cls(sha256, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)

    def is_at(self, path: Path) -> bool:
        status = path.stat()
        if StoredFile.of(path, self.sha256) == self:
            return True
        return status.st_size == self.bytes and content_hash(path) == self.sha256


def content_hash(path: Path) -> str:
    """Return a file's SHA-256 as a hexadecimal string; show a progress bar meanwhile."""
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as stream, progress_bar(path.stat().st_size, f"reading {path.name}", unit="B") as shown:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
            done += len(chunk)
            shown.to(done)
    return digest.hexdigest()
