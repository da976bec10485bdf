"""The identity of a file: the hash of its content, and a signature that shows whether it was changed since."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path

from hdtool.data.progress import bar

SETTLED = 2.0
"""Seconds. A file that was changed less than this before its hash was computed may change again within one tick of a
file system's clock, which no signature would show."""
CHUNK = 1 << 24


@dataclass(frozen=True)
class Signature:
    """What a change of a file changes.

    A program can set the time of modification back but not the time of the last change of the entry (``ctime_ns``).
    """

    path: str
    bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> Signature:
        place = path.resolve()
        found = place.stat()
        return cls(str(place), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)

    @property
    def holds(self) -> bool:
        """Whether the file is there and has this signature still."""
        try:
            return Signature.of(Path(self.path)) == self
        except OSError:
            return False

    @property
    def is_settled(self) -> bool:
        return max(self.mtime_ns, self.ctime_ns) / 1e9 + SETTLED < time.time()


def content_hash(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as stream, bar(path.stat().st_size, f"reading {path.name}", unit="B") as shown:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
            done += len(chunk)
            shown.to(done)
    return digest.hexdigest()
