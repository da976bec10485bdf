"""Lock files: one process at a time writes a folder or a file."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hdtool.data.errors import HdtoolError


@contextmanager
def exclusive(
    path: Path, busy: HdtoolError, wait: Callable[[], object] | None = None, *, seconds: float = 0
) -> Iterator[None]:
    """Hold the lock file ``path``; raise ``busy`` if another holder has it, at once or after some ``seconds``.

    With ``wait``, call that instead and wait for the other holder.
    The lock file stays in place and empty. A file with content, a link or a folder of that name is not
    hdtool's: the error has the class of ``busy``, and the file is neither opened nor changed.
    A folder that cannot be written raises an ``OSError``, which the caller words.
    """
    from filelock import FileLock, Timeout

    if found := foreign_lock(path):
        raise type(busy)(f"{path} {found}, so it is not a lock file of hdtool: move it away or choose another place")
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


def foreign_lock(path: Path) -> str | None:
    """What shows that ``path`` is not a lock file of hdtool; ``None`` if it is one or does not exist.

    Some versions of filelock truncate the file that they open, and follow links.
    """
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(found.st_mode):
        return "is a link"
    if not stat.S_ISREG(found.st_mode):
        return "is not a regular file"
    return f"has {found.st_size:,} bytes" if found.st_size else None
