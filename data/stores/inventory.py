"""The stores that hdtool's home holds, and the removal of one of them.

A folder may hold other files beside a store. Only files whose names and kinds are those of a store are deleted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote

from hdtool.data.errors import StoreError
from hdtool.data.files.locking import exclusive
from hdtool.data.stores.history_manifest import FILES, LOCK_ENDING, folder_lock, leftovers, read_history_manifest
from hdtool.data.stores.home import home
from hdtool.data.stores.manifest import Checkpoint, InputShare
from hdtool.data.stores.store import read_manifest
from hdtool.data.stores.store_files import (
    CORPUS,
    HISTORY,
    LOCK,
    MANIFEST,
    MODEL,
    delete_leftovers,
    holds_history,
    holds_manifest,
    printable,
)

DIGITS = 8
"""Digits of a fingerprint in the name of a store."""
PLACES = ("stores/*/{kind}", "stores/*/{kind}/*", "namespaces/*/*/{kind}", "namespaces/*/*/{kind}/*", "demo/*/{kind}")
_FINGERPRINT = re.compile("[0-9a-f]{16}")
_NAME = re.compile(f"(.*/)?({MODEL}|{CORPUS}|{HISTORY})-[0-9a-f]{{{DIGITS},}}.*")
"""What every name of a store matches, so that other paths are not looked up."""


@dataclass(frozen=True)
class StoredItem:
    """A store at home."""

    name: str
    """By which it is removed: its kind and the first digits of the fingerprint that it is kept by."""
    kind: str
    folder: Path
    changed: float
    """When it was built or last written to, in seconds since 1970."""
    bytes: int
    tokenizer: str | None = None
    model: Checkpoint | None = None
    tokens: int | None = None
    sources: tuple[InputShare, ...] = ()
    fault: str | None = None
    """Why it cannot be opened."""
    shared_name: str | None = None
    """A shorter name that it would have if no other one had it."""


def stored_items() -> list[StoredItem]:
    """All stores at home, each with a name that no other one has."""
    kinds = (MODEL, CORPUS, HISTORY)
    folders = {
        path.parent
        for kind in kinds
        for place in PLACES
        for path in home().glob(f"{place.format(kind=kind)}/{MANIFEST}")
    }
    items = [_item(folder) for folder in sorted(folders) if holds_manifest(folder) or holds_history(folder)]
    return with_single_names(items)


def found_item(name: str, items: Iterable[StoredItem]) -> StoredItem:
    """The store of this name or in this folder; a name that several share is a ``StoreError``."""
    known = list(items)
    if sharing := [item for item in known if item.shared_name == name]:
        raise _ambiguous(name, sharing)
    for item in known:
        if name == item.name or Path(name).expanduser().resolve() == item.folder.resolve():
            return item
    names = ", ".join(item.name for item in known) or "none"
    raise StoreError(f"there is no store {name} in {home()}: it holds {names}")


def store_folder(name: str) -> Path:
    """The folder of that path, or else that of the store at home with that name."""
    folder = Path(name).expanduser()
    if folder.exists():
        return folder
    if (home() / name / MANIFEST).is_file():  # as it is listed where several would have the same name
        return home() / name
    if not _NAME.fullmatch(name):
        return folder
    items = stored_items()
    if sharing := [item for item in items if item.shared_name == name]:
        raise _ambiguous(name, sharing)
    return next((item.folder for item in items if item.name == name), folder)


def _ambiguous(name: str, sharing: list[StoredItem]) -> StoreError:
    candidates = ", ".join(printable(item.name) for item in sharing)
    return StoreError(f"{name} could be any of {len(sharing)}: {candidates}: give one of these names instead")


def remove_store(item: StoredItem) -> None:
    """Delete the files of a store, the manifest first, and its folder if nothing else is in it."""
    folder = item.folder
    try:
        if item.kind == HISTORY:
            _remove_history(folder)
        else:
            busy = StoreError(f"a build of {folder} is running: wait for it")
            with exclusive(folder / LOCK, busy):
                (folder / MANIFEST).unlink()
                delete_leftovers(folder, ())
        (folder / LOCK).unlink(missing_ok=True)
        remove_empty(folder)
    except OSError as error:
        raise StoreError(f"{folder} cannot be removed ({error.strerror or error}): correct the permissions") from error


def _remove_history(folder: Path) -> None:
    with folder_lock(folder):
        manifest = read_history_manifest(folder)
        own = [manifest.path(folder, part) for part in FILES]
        others = leftovers(folder, manifest)
        (folder / MANIFEST).unlink()
        for path in [*own, *(path.with_name(path.name + LOCK_ENDING) for path in own), *others]:
            path.unlink(missing_ok=True)


def remove_empty(folder: Path) -> None:
    """Remove a folder and those above it that become empty, up to hdtool's home."""
    with suppress(OSError):
        for place in (folder, *folder.parents):
            if place == home():
                return
            place.rmdir()


def _item(folder: Path) -> StoredItem:
    parts = folder.relative_to(home()).parts
    kind = next(part for part in parts if part in (MODEL, CORPUS, HISTORY))
    changed = (folder / MANIFEST).stat().st_mtime
    files = [path for path in folder.iterdir() if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    kept_by = parts[-1] if _FINGERPRINT.fullmatch(parts[-1]) else parts[-2]
    owner = {"namespaces": f"{unquote(parts[1])}/", "demo": "demo/"}.get(parts[0], "")
    plain = StoredItem(f"{owner}{kind}-{kept_by[:DIGITS]}", kind, folder, changed, size)
    try:
        return _history(plain, files) if kind == HISTORY else _built(plain)
    except StoreError as error:
        return replace(plain, fault=str(error))


def _built(item: StoredItem) -> StoredItem:
    manifest = read_manifest(item.folder)
    return replace(
        item,
        bytes=manifest.bytes,
        tokenizer=manifest.tokenizer.fingerprint,
        model=manifest.model,
        tokens=manifest.counts["tokens"],
        sources=manifest.sources,
    )


def _history(item: StoredItem, files: list[Path]) -> StoredItem:
    manifest = read_history_manifest(item.folder)
    changed = max(path.stat().st_mtime for path in files)
    model = Checkpoint(manifest.model, manifest.model)  # a history records no name
    return replace(item, tokenizer=manifest.tokenizer.fingerprint, model=model, changed=changed)


def with_single_names(items: list[StoredItem]) -> list[StoredItem]:
    """The items, named by their folders where several would have the same name."""
    names = Counter(item.name for item in items)
    return [
        item
        if names[item.name] == 1
        else replace(item, name=item.folder.relative_to(home()).as_posix(), shared_name=item.name)
        for item in items
    ]
