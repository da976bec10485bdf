"""Files that are there whole or not at all: written beside their place, then moved onto it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """Where to write what takes the place of ``path`` in the end, in one step; an error leaves what was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Two processes may write the same file at once.
    written = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield written
        written.replace(path)
    finally:
        written.unlink(missing_ok=True)
