"""Write output files atomically, and never over files that hdtool did not create, unless they are empty.

New content goes to a temporary file in the same folder, which replaces the old file once it is on disk. An interrupted
or failed write leaves the old file unchanged.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hdtool.data.errors import HdtoolError, os_errors_as

TEMPORARY_BYTES = 8
"""Number of random bytes in the name of a temporary file."""
TEMPORARY_ENDING = rf"[0-9a-f]{{{2 * TEMPORARY_BYTES}}}\.tmp"
O_BINARY = getattr(os, "O_BINARY", 0)
O_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)


@dataclass(frozen=True)
class OutputFile:
    """File that hdtool writes as a whole."""

    path: Path
    content: str
    """Description of the content, for the message ``{path} is there and is not {content}``."""
    is_ours: Callable[[Path], bool]
    """Function that returns True if hdtool wrote the file at a path, judged by its content."""
    error: type[HdtoolError]
    advice: str = "choose another --out, or move it away"
    private: bool = False
    """If True, only the owner may read the file, whatever the umask."""

    def check(self) -> None:
        """Raise ``error`` if the destination must not be replaced or cannot be written; write nothing."""
        destination = self._destination()
        folder = next((place for place in destination.parents if os.path.lexists(place)), destination.parent)
        fault = "" if folder.is_dir() else f"{folder} is not a folder"
        if not fault and not os.access(folder, os.W_OK | os.X_OK):
            fault = f"{folder} is read-only"
        if fault:
            raise self.error(f"{self.path} cannot be written ({fault}): {self.advice}")

    def exists(self) -> bool:
        """Return True if the file exists and is not empty; raise ``error`` if hdtool did not write it."""
        return bool(_size(self._destination()))

    def write(self, content: bytes | str) -> None:
        """Create the file or replace its content; raise ``error`` if it must not be replaced or cannot be written."""
        with self.replaced() as stream:
            stream.write(content.encode() if isinstance(content, str) else content)

    @contextmanager
    def replaced(self) -> Iterator[IO[bytes]]:
        """Yield a stream for the new content, and replace the file at the end of the block.

        If the block raises, the old file stays. If the destination is a symbolic link, the file that it points to is
        replaced. Raise ``error`` if the file must not be replaced or cannot be written.
        """
        with self._errors_worded():
            destination = self._destination()
            destination.parent.mkdir(parents=True, exist_ok=True)
            _remove_stale(destination)
            temporary, descriptor = _temporary(destination, 0o600 if self.private else 0o666)
            try:
                with os.fdopen(descriptor, "w+b") as stream:
                    yield stream
                    stream.flush()
                    os.fsync(descriptor)
                    self._destination()  # raises if another program has put a file there in the meantime
                    if os.name == "nt":  # Windows cannot rename an open file
                        stream.close()
                    temporary.replace(destination)
            finally:
                temporary.unlink(missing_ok=True)
            sync_to_disk(destination.parent)

    def remove(self) -> None:
        """Delete the file and its leftover temporary files; raise ``error`` if hdtool did not write the file."""
        with self._errors_worded():
            destination = self._destination()
            if destination.parent.is_dir():
                _remove_stale(destination)
                destination.unlink(missing_ok=True)

    def _errors_worded(self) -> AbstractContextManager[None]:
        return os_errors_as(self.error, f"{self.path} cannot be written", self.advice)

    def _destination(self) -> Path:
        """Return the file to replace, with links resolved; raise ``error`` if its content is not hdtool's."""
        destination = Path(os.path.realpath(self.path))
        with self._errors_worded():
            ours = not _size(destination) or self.is_ours(destination)
        if not ours:
            raise self.error(f"{self.path} is there and is not {self.content}: {self.advice}")
        return destination


def temporary_names(names: str) -> re.Pattern[str]:
    """Return a pattern that matches the name of a temporary file if its destination's name matches ``names``."""
    return re.compile(rf"\.({names})\.{TEMPORARY_ENDING}")


def _size(path: Path) -> int | None:
    """Return the size of a regular file, or None if nothing is there; raise OSError if something else is there."""
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if stat.S_ISREG(status.st_mode):
        return status.st_size
    kinds = {stat.S_IFDIR: "it is a folder", stat.S_IFLNK: "its links form a circle"}
    raise OSError(0, kinds.get(stat.S_IFMT(status.st_mode), "it is not a regular file"))


def _temporary(destination: Path, mode: int) -> tuple[Path, int]:
    """Create, open and lock a temporary file beside ``destination``; return its path and its descriptor.

    The umask reduces the permissions in ``mode``.
    """
    while True:
        path = destination.with_name(f"{_temporary_prefix(destination)}{secrets.token_hex(TEMPORARY_BYTES)}.tmp")
        # Exclusive creation does not follow links.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | O_NOFOLLOW | O_BINARY, mode)
        lock(descriptor, wait=True)
        if os.fstat(descriptor).st_nlink:
            return path, descriptor
        os.close(descriptor)  # another writer removed the file before it was locked


def _temporary_prefix(destination: Path) -> str:
    """Return the prefix of a temporary file's name. Long names are cut, because file systems limit their length."""
    return f".{destination.name.encode()[:150].decode(errors='ignore')}."


def _remove_stale(destination: Path) -> None:
    """Delete the temporary files that killed writers left for this destination."""
    name = re.compile(re.escape(_temporary_prefix(destination)) + TEMPORARY_ENDING)
    for path in destination.parent.iterdir():
        if name.fullmatch(path.name) and path.is_file() and not path.is_symlink():
            with suppress(OSError):
                _remove_unless_locked(path)


def _remove_unless_locked(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR | O_NOFOLLOW)
    try:
        if lock(descriptor, wait=False):  # a running writer holds the lock of its file
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def lock(descriptor: int, *, wait: bool) -> bool:
    """Lock an open file until it is closed or the process ends; return False on failure.

    On Windows, do nothing and return True.
    """
    try:
        from fcntl import LOCK_EX, LOCK_NB, flock
    except ImportError:
        return True  # Windows does not delete files that another process has open
    try:
        flock(descriptor, LOCK_EX if wait else LOCK_EX | LOCK_NB)
    except OSError:
        return False
    return True


def sync_to_disk(path: Path) -> None:
    """Flush a file, or a folder's entries, to disk; ignore errors for folders, which not every system can flush."""
    is_folder = path.is_dir()
    try:
        descriptor = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError:
        if not is_folder:
            raise
