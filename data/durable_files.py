"""File locks, cached values, and append-only JSON Lines files that stay readable if the writer is killed.

A killed writer leaves complete lines and at most one torn line at the end. Readers never change a file, and the torn
line is truncated only once the caller has recognized it.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import Any, TypeVar

from hdtool.data.errors import HdtoolError
from hdtool.data.notes import note
from hdtool.data.output_files import OutputFile


@contextmanager
def file_lock(
    path: Path,
    busy: HdtoolError,
    *,
    seconds: float = 0,
    waits: bool = False,
    remove: bool = False,
) -> Iterator[None]:
    """Hold a lock on the file ``path`` during the ``with`` block.

    If another process still holds it after ``seconds`` (-1 waits without end), raise ``busy`` or, if the caller
    ``waits``, print ``busy`` as a note and block until the lock is free. The lock file is empty; ``remove`` deletes it
    at the end of a block without an error. If ``path`` is a link, a folder or a file with content, it is left untouched
    and an error of ``busy``'s class is raised. An unwritable folder raises OSError.
    """
    from filelock import FileLock, Timeout

    if reason := why_foreign_lock(path):
        raise type(busy)(f"{path} {reason}, so it is not a lock file of hdtool: move it away or choose another place")
    lock = FileLock(path)
    try:
        lock.acquire(timeout=seconds)
    except Timeout:
        if not waits:
            raise busy from None
        note(f"{busy}: waiting for it")
        lock.acquire(timeout=-1)
    try:
        yield
        # Delete the file while it is locked: afterwards, another process may have locked it. A process that waits for
        # it creates a new one. Windows cannot delete an open file, so filelock deletes it there after the release.
        if remove and os.name != "nt":
            path.unlink(missing_ok=True)
    finally:
        lock.release()


def why_foreign_lock(path: Path) -> str | None:
    """Return why ``path`` is not a lock file of hdtool, or None if it is a lock file or does not exist.

    The check is needed because some versions of filelock follow links and truncate the file that they open.
    """
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(status.st_mode):
        return "is a link"
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file"
    return f"has {status.st_size:,} bytes" if status.st_size else None


def lock_path(path: Path) -> Path:
    """Return the path of the lock file of a file or folder, which is beside it."""
    return path.with_name(f".{path.name}.lock")


T = TypeVar("T")

MAX_CACHE_AGE = 24 * 3600.0
"""Age in seconds after which a measurement is repeated, because the machine may have been busy at the time."""


@dataclass(frozen=True)
class CachedValue:
    """Value cached in a file whose name is a hash of ``circumstances``, everything that the value depends on.

    A damaged file, or one with other circumstances, is a cache miss. If the folder is not writable, nothing is cached.
    """

    folder: Path
    circumstances: dict[str, Any]

    @property
    def path(self) -> Path:
        return self.folder / f"{sha256(self._key.encode()).hexdigest()[:32]}.json"

    @property
    def _key(self) -> str:
        return json.dumps(self.circumstances, sort_keys=True)

    def read(self, parse: Callable[[Any], T], *, max_age: float = inf) -> T | None:
        """Return the cached value, parsed by ``parse``; None on a cache miss or if older than ``max_age`` seconds."""
        try:
            if max_age < inf and abs(time.time() - self.path.stat().st_mtime) > max_age:
                return None
            row = json.loads(self.path.read_bytes())
            if row["key"] != self._key or row["sha256"] != json_digest(row["value"]):
                return None
            return parse(row["value"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            return None

    def write(self, value: Any) -> None:
        """Store a JSON-serializable value atomically, or do nothing if the file cannot be written."""
        row = {"key": self._key, "value": value, "sha256": json_digest(value)}
        with suppress(HdtoolError):
            OutputFile(self.path, "a cached value", lambda _: True, HdtoolError).write(json.dumps(row))

    def forget(self) -> None:
        with suppress(OSError):
            self.path.unlink(missing_ok=True)


def json_digest(value: Any) -> str:
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, including their newlines; a last line that was cut short has none.

    A missing file yields nothing. A folder or special file raises OSError.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise OSError(0, "it is a folder" if stat.S_ISDIR(mode) else "it is not a regular file")
    with path.open("rb") as stream:
        yield from stream


def is_torn(line: bytes) -> bool:
    """Return True if a line lacks its newline."""
    return not line.endswith(b"\n")


def may_be_torn_start(torn: bytes, start: str) -> bool:
    """Return True if ``torn`` may be left from an interrupted write of a line that begins with ``start``."""
    beginning = start.encode()
    return beginning.startswith(torn) or torn.startswith(beginning)


def cut_torn_line(path: Path, torn: bytes) -> None:
    """Remove ``torn``, unless it is empty, from the end of a file; raise OSError if the file does not end with it."""
    if not torn:
        return
    with path.open("r+b") as stream:
        end = stream.seek(0, os.SEEK_END) - len(torn)
        stream.seek(max(0, end))
        if stream.read() != torn:
            raise OSError(0, "another program has changed it")
        stream.truncate(end)


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Append a row as a line of JSON, and flush it to disk."""
    with path.open("ab") as stream:
        stream.write((json.dumps(row, ensure_ascii=False) + "\n").encode())
        stream.flush()
        os.fsync(stream.fileno())
