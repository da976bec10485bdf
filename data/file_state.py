"""Recognize unchanged files by their metadata, without reading them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FileState:
    """Path and metadata of a file. Any change to the file also changes ``ctime_ns``, which programs cannot set."""

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
    def size_and_time(self) -> list[int]:
        return [self.bytes, self.mtime_ns]
