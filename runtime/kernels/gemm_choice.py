"""The saved choice between two matrix products: the first process that measures them decides for all later ones.

The products round differently. If each process followed its own timing, two processes with one seed could return
different tokens at a near tie.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import mkstemp

Choice = dict[int, bool]
"""For each measured number of rows, whether our own product is the faster one."""

LARGEST_FILE = 4096
"""Bytes; files written by hdtool have less than a hundred."""

_used: dict[Path, Choice] = {}
"""The choices of this process, which stay in effect where no file can be written."""


def saved_choice(path: Path | None, rows: Sequence[int], measure: Callable[[], Choice]) -> Choice:
    """The choice saved in the file ``path``; measured and saved if there is none for these ``rows``.

    Without a file, or if it cannot be written, the choice holds for this process alone.
    """
    if path is None:
        return measure()
    if path not in _used:
        _used.setdefault(path, _read(path, rows) or _save_first(path, rows, measure()))
    return _used[path]


def _read(path: Path, rows: Sequence[int]) -> Choice | None:
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(LARGEST_FILE))
    except OSError:
        return None
    except ValueError:
        found = None
    if (
        isinstance(found, dict)
        and set(found) == set(map(str, rows))
        and {type(own) for own in found.values()} == {bool}
    ):
        return {most: found[str(most)] for most in rows}
    print(f"note: {path} is damaged: the matrix products are measured again and the file is replaced", file=sys.stderr)
    return None


def _save_first(path: Path, rows: Sequence[int], measured: Choice) -> Choice:
    """Save a choice unless another process was first; return the saved one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        number, name = mkstemp(prefix=".", suffix=".json", dir=path.parent)
        written = Path(name)
        try:
            with open(number, "w") as file:
                json.dump(measured, file)
            return _create(written, path, rows) or measured
        finally:
            written.unlink(missing_ok=True)
    except OSError:  # a folder that cannot be written, or a full disk
        return measured


def _create(written: Path, path: Path, rows: Sequence[int]) -> Choice | None:
    """Create the file atomically unless it exists; return the choice in it."""
    try:
        os.link(written, path)
    except OSError:  # there is a file, or the file system has no links
        if found := _read(path, rows):
            return found
        written.replace(path)
    return _read(path, rows)
