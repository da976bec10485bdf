"""The files of a store by name: which names hdtool gives, what it may delete, and where a build may go.

A folder may hold other people's files beside a store. Only regular files whose names have the form that
a build gives are ever deleted, and a folder that holds other files and no store is no place for a build.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from hdtool.data.errors import StoreError, worded
from hdtool.data.files.locking import foreign_lock

MANIFEST = "manifest.json"
LOCK = ".lock"
MODEL, CORPUS = "model", "corpus"
"""The kinds of stores that are built."""
HISTORY = "history"
"""The kind of a history store, whose files no build names or replaces; see ``history_manifest.py``."""
PARTS = {
    CORPUS: {"documents": "bin", "suffixes": "bin", "heads": "bin", "signposts": "bin", "shards": "bin"},
    MODEL: {
        "record": "mdb",
        "slots": "bin",
        "keys": "bin",
        "rows": "bin",
        "heads": "bin",
        "phrases": "bin",
    },
}
"""The parts of each kind of store, with the endings of their files."""
OPTIONAL_PARTS = {CORPUS: {}, MODEL: {"rankings": "bin"}}
"""Parts that only some stores of a kind have."""
FORMER_PARTS = {MODEL: {"entries": "mdb"}}
"""Parts of stores of earlier formats, which the next build there deletes."""
ENDINGS = {
    part: ending
    for parts in (PARTS, OPTIONAL_PARTS, FORMER_PARTS)
    for kind in parts.values()
    for part, ending in kind.items()
}
FIELDS = frozenset({"kind", "tokenizer", "counts", "options", "sources", "files", "format"})
"""The fields of a manifest."""
FIELDS_OF_OURS = 5
"""A JSON object with at least so many of these fields is a damaged manifest of hdtool's."""

_BUILD = "[0-9a-f]{8}"
"""Eight hexadecimal digits, drawn for each build."""
_PART = re.compile("|".join(rf"{part}-{_BUILD}\.{ending}" for part, ending in ENDINGS.items()))
_MANIFEST = re.compile(re.escape(MANIFEST) + f"-{_BUILD}")


def part_name(part: str, build: str) -> str:
    """The file name of a part in the build with these digits."""
    if part not in ENDINGS:
        raise ValueError(f"a store has no part {part}: known are {', '.join(ENDINGS)}")
    return f"{part}-{build}.{ENDINGS[part]}"


def is_name_of(part: str, name: str) -> bool:
    """Whether ``name`` is a file name that some build gives to ``part``."""
    return bool(_PART.fullmatch(name)) and name.startswith(f"{part}-")


def create(path: Path) -> None:
    """Create an empty file at a path where nothing exists, not even a link."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))


def delete_leftovers(folder: Path, kept: Collection[str]) -> None:
    """Delete the files of all builds but those named ``kept``."""
    for name in os.listdir(folder):
        path = folder / name
        if name not in kept and (_PART.fullmatch(name) or _MANIFEST.fullmatch(name)) and is_regular(path):
            # Where an open file cannot be deleted, a later build deletes it.
            with suppress(FileNotFoundError, PermissionError):
                path.unlink()


def check_destination(folder: Path) -> None:
    """Raise unless a build may write to ``folder``: it is new, empty, or holds a store or leftovers of a build."""
    with worded(StoreError, f"{folder} cannot be read", "mend the permissions or choose another place"):
        if folder.is_dir():
            if holds_history(folder):
                raise StoreError(f"{folder} holds a history store, which no build replaces: choose another place")
            names = sorted(os.listdir(folder))
            other = [] if holds_manifest(folder) else [name for name in names if not _is_ours(folder / name)]
            if other:
                raise StoreError(
                    f"{folder} holds no store, but other files, such as {printable(other[0])}: "
                    "choose an empty or a new folder"
                )
        elif os.path.lexists(folder):
            found = "a file" if folder.exists() else "a link to a place that does not exist"
            raise StoreError(f"{folder} is {found}, a folder is needed: choose another place")


def holds_manifest(folder: Path) -> bool:
    """Whether ``manifest.json`` is a store's, even if damaged or of another format, and not another program's."""
    path = folder / MANIFEST
    if not is_regular(path):
        return False
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        # It is too damaged to read; files of a build beside it show that it was a store's.
        return any(_PART.fullmatch(name) and is_regular(folder / name) for name in os.listdir(folder))
    if not isinstance(row, dict):
        return False
    known_kind = isinstance(row.get("kind"), str) and row["kind"] in PARTS
    return (known_kind and isinstance(row.get("format"), int)) or len(FIELDS & row.keys()) >= FIELDS_OF_OURS


def holds_history(folder: Path) -> bool:
    """Whether the manifest in a folder is that of a history store."""
    path = folder / MANIFEST
    try:
        row = json.loads(path.read_text(encoding="utf-8")) if is_regular(path) else None
    except (ValueError, RecursionError):
        return False
    return isinstance(row, dict) and row.get("kind") == HISTORY


def printable(name: str) -> str:
    """A name from a file system or a manifest, for one line of a terminal."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in name)


def _is_ours(path: Path) -> bool:
    if path.name == LOCK:
        return foreign_lock(path) is None
    return bool(_PART.fullmatch(path.name) or _MANIFEST.fullmatch(path.name)) and is_regular(path)


def is_regular(path: Path) -> bool:
    """Whether a regular file is there, and not a link."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
