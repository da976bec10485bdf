"""File locks, cached values and append-only JSON Lines files that survive a kill.

A kill leaves whole lines and at most one torn line at the end. Readers never change a file; the torn line is truncated
only once the caller has recognised it.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from math import inf
from pathlib import Path
from tempfile import mkstemp
from typing import Any, TypeVar

from hdtool.data.errors import HdtoolError


@contextmanager
def file_lock(
    path: Path, busy: HdtoolError, wait: Callable[[], object] | None = None, *, seconds: float = 0
) -> Iterator[None]:
    """Hold the lock file ``path``; raise ``busy`` if another holder has it, at once or after some ``seconds``.

    With ``wait``, call that instead and wait for the other holder.
    The lock file stays in place and empty. A file with content, a link or a folder of that name is not
    hdtool's: the error has the class of ``busy``, and the file is neither opened nor changed.
    A folder that cannot be written raises an ``OSError``, which the caller words.
    """
    from filelock import FileLock, Timeout

    if reason := why_foreign_lock(path):
        raise type(busy)(f"{path} {reason}, so it is not a lock file of hdtool: move it away or choose another place")
    lock = FileLock(path)
    try:
        lock.acquire(timeout=seconds)
    except Timeout:
        if wait is None:
            raise busy from None
        wait()
        lock.acquire(timeout=-1)
    try:
        yield
    finally:
        lock.release()


def why_foreign_lock(path: Path) -> str | None:
    """What shows that ``path`` is not a lock file of hdtool; ``None`` if it is one or does not exist.

    Some versions of filelock truncate the file that they open, and follow links.
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


def lock_path(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


@contextmanager
def folder_lock(folder: Path, busy: HdtoolError) -> Iterator[None]:
    """Hold the lock of a folder; where another process has it, print a note and wait."""
    folder.parent.mkdir(parents=True, exist_ok=True)

    def wait() -> None:
        print(f"note: {busy}: waiting for it", file=sys.stderr)

    with file_lock(lock_path(folder), busy, wait):
        yield


@contextmanager
def scratch_folder(folder: Path) -> Iterator[Path]:
    """A new folder beside the folder; what is left in it is removed."""
    scratch = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.tmp")
    scratch.mkdir()
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def remove_unfinished(folder: Path) -> None:
    """Delete what a killed process left of a folder; its lock must be held."""
    for place in folder.parent.glob(f".{folder.name}.*.tmp"):
        shutil.rmtree(place, ignore_errors=True)


T = TypeVar("T")

MAX_CACHE_AGE = 24 * 3600.0
"""Seconds after which a measurement is repeated, because the machine may have been busy."""


@dataclass(frozen=True)
class CachedValue:
    """A value cached in a file whose name is a hash of its circumstances.

    A file that is damaged or belongs to other circumstances is a cache miss. If the folder is not writable, every read
    is a miss.
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
        """The cached value as ``parse`` reads it; None if it is missing or older than ``max_age``."""
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
        """Store a JSON-serialisable value atomically."""
        row = json.dumps({"key": self._key, "value": value, "sha256": json_digest(value)})
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            number, name = mkstemp(prefix=".", suffix=".json", dir=self.folder)
            try:
                with open(number, "w", encoding="utf-8") as file:
                    file.write(row)
                os.replace(name, self.path)
            except OSError:
                Path(name).unlink(missing_ok=True)
                raise

    def forget(self) -> None:
        with suppress(OSError):
            self.path.unlink(missing_ok=True)


def json_digest(value: Any) -> str:
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file with their line ends, which a torn last line lacks; a missing file has none.

    Anything but a regular file raises an OSError.
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
    """Return True if a line lacks its end."""
    return not line.endswith(b"\n")


def may_be_torn_start(torn: bytes, start: str) -> bool:
    """Return True if a torn line may be the rest of a line that begins with ``start``."""
    beginning = start.encode()
    return beginning.startswith(torn) or torn.startswith(beginning)


def cut_torn_line(path: Path, torn: bytes) -> None:
    """Remove a torn line from the end of a file; raises an OSError if the file ends in something else by now."""
    if not torn:
        return
    with path.open("r+b") as stream:
        end = stream.seek(0, os.SEEK_END) - len(torn)
        stream.seek(max(0, end))
        if stream.read() != torn:
            raise OSError(0, "another program has changed it")
        stream.truncate(end)


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Append a row and flush it to disk."""
    with path.open("ab") as stream:
        stream.write((json.dumps(row, ensure_ascii=False) + "\n").encode())
        stream.flush()
        os.fsync(stream.fileno())
