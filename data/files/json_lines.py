"""A resumable file of JSON lines: every line is on disk before the next one starts.

A kill leaves whole lines and at most one torn line after them. Reading changes nothing; the torn line is cut off
only after the caller has recognised it.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def lines_of(path: Path) -> Iterator[bytes]:
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
    """Whether a line lacks its end."""
    return not line.endswith(b"\n")


def may_be_torn_from(torn: bytes, start: str) -> bool:
    """Whether a torn line may be the rest of a line that begins with ``start``."""
    beginning = start.encode()
    return beginning.startswith(torn) or torn.startswith(beginning)


def cut(path: Path, torn: bytes) -> None:
    """Remove a torn line from the end of a file; raises an OSError if the file ends in something else by now."""
    if not torn:
        return
    with path.open("r+b") as stream:
        end = stream.seek(0, os.SEEK_END) - len(torn)
        stream.seek(max(0, end))
        if stream.read() != torn:
            raise OSError(0, "another program has changed it")
        stream.truncate(end)


def append(path: Path, row: dict[str, Any]) -> None:
    """Add a row; it is on disk when this returns."""
    with path.open("ab") as stream:
        stream.write((json.dumps(row, ensure_ascii=False) + "\n").encode())
        stream.flush()
        os.fsync(stream.fileno())
