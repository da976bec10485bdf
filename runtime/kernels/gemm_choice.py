"""Which of two matrix products a machine uses: the first process that measures them decides for all later ones.

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
"""For each number of rows that was measured, whether our own product is the faster one."""

LARGEST_FILE = 4096
"""Bytes; what hdtool writes has less than a hundred."""

_used: dict[Path, Choice] = {}
"""The choices of this process, which holds to them where nothing can be written."""


def kept_choice(place: Path | None, rows: Sequence[int], measure: Callable[[], Choice]) -> Choice:
    """The choice that is kept at ``place``; measured, and kept there, if there is none for these ``rows``.

    Without a place, or if it cannot be written, the choice holds for this process alone.
    """
    if place is None:
        return measure()
    if place not in _used:
        _used.setdefault(place, _read(place, rows) or _first_written(place, rows, measure()))
    return _used[place]


def _read(place: Path, rows: Sequence[int]) -> Choice | None:
    try:
        with place.open("rb") as file:
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
    print(f"note: {place} is damaged: the matrix products are measured again and the file is replaced", file=sys.stderr)
    return None


def _first_written(place: Path, rows: Sequence[int], measured: Choice) -> Choice:
    """Keep a choice unless another process was first; returns the one that is kept."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        number, name = mkstemp(prefix=".", suffix=".json", dir=place.parent)
        written = Path(name)
        try:
            with open(number, "w") as file:
                json.dump(measured, file)
            return _linked(written, place, rows) or measured
        finally:
            written.unlink(missing_ok=True)
    except OSError:  # a folder that cannot be written, or a full disk
        return measured


def _linked(written: Path, place: Path, rows: Sequence[int]) -> Choice | None:
    """Give a file its place in one step, which fails if another file is there; returns what is there then."""
    try:
        os.link(written, place)
    except OSError:  # there is a file, or the file system has no links
        if found := _read(place, rows):
            return found
        written.replace(place)
    return _read(place, rows)
