"""A folder in hdtool's home that is made once: whole or not there, by one process at a time."""

from __future__ import annotations

import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hdtool.data.errors import HdtoolError
from hdtool.data.files.locking import exclusive


def lock_of(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


@contextmanager
def locked(folder: Path, busy: HdtoolError) -> Iterator[None]:
    """Hold the lock of a folder; where another process has it, print a note and wait."""
    folder.parent.mkdir(parents=True, exist_ok=True)

    def wait() -> None:
        print(f"note: {busy}: waiting for it", file=sys.stderr)

    with exclusive(lock_of(folder), busy, wait):
        yield


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """A new folder beside the folder; what is left in it is removed."""
    place = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.tmp")
    place.mkdir()
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def remove_unfinished(folder: Path) -> None:
    """Delete what a killed process left of a folder; its lock must be held."""
    for place in folder.parent.glob(f".{folder.name}.*.tmp"):
        shutil.rmtree(place, ignore_errors=True)
