"""Names of store files, which decide what hdtool may delete.

hdtool deletes only regular files whose names a build could have given, and does not build into a folder that holds
other files but no store.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from hdtool.data.durable_files import why_foreign_lock
from hdtool.data.errors import StoreError, os_errors_as
from hdtool.data.output_files import sync_to_disk
from hdtool.data.own_files import json_object
from hdtool.data.stores.kinds import BUILT_KINDS, HISTORY, HISTORY_KIND

MANIFEST = "manifest.json"
LOCK_FILE = ".lock"
LMDB_LOCK_ENDING = "-lock"
"""Suffix of the file in which LMDB registers its readers."""
PART_ENDINGS = {
    part: ending for kind in BUILT_KINDS.values() for part, ending in (*kind.parts.items(), *kind.optional.items())
}
MANIFEST_FIELDS = frozenset({"kind", "tokenizer", "counts", "options", "sources", "files", "format"})
MIN_OWN_FIELDS = 5
"""Number of known fields that is enough for a JSON object to count as a manifest of hdtool, even a damaged one."""

_BUILD = "[0-9a-f]{8}"
"""Pattern of a build's eight random hexadecimal digits."""
BUILT_FILES = re.compile("|".join(rf"{part}-{_BUILD}\.{ending}" for part, ending in PART_ENDINGS.items()))
HISTORY_FILES = re.compile(
    "|".join(rf"{part}-{_BUILD}\.{ending}({LMDB_LOCK_ENDING})?" for part, ending in HISTORY.parts.items())
)
"""Patterns of the names of the files of built stores and of history stores."""
NEW_MANIFEST = re.compile(re.escape(MANIFEST) + f"-{_BUILD}")
"""Pattern of the names of manifests that have not replaced the old one yet."""


def part_name(part: str, build: str) -> str:
    """Return the file name of a part, which must be known. ``build`` is the hexadecimal id of the build."""
    if part not in PART_ENDINGS:
        raise ValueError(f"a store has no part {part}: known are {', '.join(PART_ENDINGS)}")
    return f"{part}-{build}.{PART_ENDINGS[part]}"


def is_part_name(part: str, name: str) -> bool:
    """Return True if a build could have given this name to a file of ``part``."""
    return bool(BUILT_FILES.fullmatch(name)) and name.startswith(f"{part}-")


def create_empty(path: Path) -> None:
    """Create an empty file; raise FileExistsError if anything exists at the path, even a link."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))


def manifest_bytes(folder: Path, needed: str = "store", advice: str = "build one, or name the folder of one") -> bytes:
    """Return the content of the manifest in a folder; raise StoreError if the folder has no readable manifest."""
    path = folder / MANIFEST
    with os_errors_as(StoreError, f"{path} cannot be read", "correct the permissions"):
        if path.exists() and not path.is_file():  # reading a named pipe would block
            raise StoreError(f"{path} is not a file: name the folder of a {needed}")
        try:
            return path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise StoreError(f"{folder} holds no {needed}: {advice}") from None


def write_manifest(folder: Path, build: str, row: dict[str, Any]) -> None:
    """Replace the manifest in a folder atomically; the caller must hold the folder's lock."""
    new = folder / f"{MANIFEST}-{build}"
    new.unlink(missing_ok=True)  # a killed process may have left this file
    try:
        with open(new, "x", encoding="utf-8", newline="\n") as stream:
            stream.write(json.dumps(row, indent=1, ensure_ascii=False) + "\n")
        sync_to_disk(new)
        new.replace(folder / MANIFEST)
        sync_to_disk(folder)
    finally:
        new.unlink(missing_ok=True)


def leftovers(folder: Path, kept: Collection[str], names: re.Pattern[str]) -> list[Path]:
    """Return a folder's unfinished manifests and files that match ``names``, except those whose name is in ``kept``."""
    found = (name for name in sorted(os.listdir(folder)) if names.fullmatch(name) or NEW_MANIFEST.fullmatch(name))
    return [folder / name for name in found if name not in kept and is_regular(folder / name)]


def delete_leftovers(folder: Path, kept: Collection[str], names: re.Pattern[str] = BUILT_FILES) -> None:
    for path in leftovers(folder, kept, names):
        # If the system cannot delete an open file, a later command does it.
        with suppress(FileNotFoundError, PermissionError):
            path.unlink()


def sweep(folder: Path, kept: Callable[[], Collection[str]], names: re.Pattern[str]) -> None:
    """Delete files that the manifest does not name: replaced files, and leftovers of killed or failed commands.

    ``kept`` reads the manifest and returns the names of its files. Readers can still use the files that they have
    opened. Nothing is deleted if the manifest cannot be read. The caller must hold the folder's lock.
    """
    try:
        known = kept() if os.path.lexists(folder / MANIFEST) else ()
    except StoreError:
        return  # damaged or of another format: a later sweep deletes its files, once the manifest is replaced
    delete_leftovers(folder, known, names)


def check_destination(folder: Path) -> None:
    """Raise StoreError unless ``folder`` is new or empty, or holds build leftovers or a store (not a history store)."""
    with os_errors_as(StoreError, f"{folder} cannot be read", "mend the permissions or choose another place"):
        if folder.is_dir():
            if holds_history(folder):
                raise StoreError(f"{folder} holds a history store, which no build replaces: choose another place")
            if not holds_manifest(folder):
                refuse_other_files(folder, "store", BUILT_FILES)
        elif os.path.lexists(folder):
            obstacle = "a file" if folder.exists() else "a link to a place that does not exist"
            raise StoreError(f"{folder} is {obstacle}, a folder is needed: choose another place")


def holds_manifest(folder: Path) -> bool:
    """Return True if a folder's ``manifest.json`` is a built store's, even if it is damaged or of another format."""
    path = folder / MANIFEST
    if not is_regular(path):
        return False
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        # The manifest is too damaged to read, but files of a build beside it show that it belongs to a store.
        return any(BUILT_FILES.fullmatch(name) and is_regular(folder / name) for name in os.listdir(folder))
    if not isinstance(row, dict):
        return False
    known_kind = isinstance(row.get("kind"), str) and row["kind"] in BUILT_KINDS
    return (known_kind and isinstance(row.get("format"), int)) or len(MANIFEST_FIELDS & row.keys()) >= MIN_OWN_FIELDS


def holds_history(folder: Path) -> bool:
    """Return True if the manifest in a folder belongs to a history store."""
    path = folder / MANIFEST
    return is_regular(path) and json_object(path).get("kind") == HISTORY_KIND


def printable(name: str) -> str:
    """Escape unprintable characters in a name from a file system or a manifest, so that it fits on one line."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in name)


def refuse_other_files(folder: Path, needed: str, parts: re.Pattern[str]) -> None:
    """Raise StoreError if a folder holds anything but its lock, temporary manifests and files that match ``parts``."""
    for name in sorted(os.listdir(folder)):
        path = folder / name
        is_own = (parts.fullmatch(name) or NEW_MANIFEST.fullmatch(name)) and is_regular(path)
        if not is_own and (name != LOCK_FILE or why_foreign_lock(path)):
            raise StoreError(
                f"{folder} holds no {needed}, but other files, such as {printable(name)}: "
                "choose an empty or a new folder"
            )


def is_regular(path: Path) -> bool:
    """Return True if the path is a regular file, and not a link."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
