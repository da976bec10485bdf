"""Default folders of stores in hdtool's home, and the stores in these folders.

A folder may hold other files besides a store. hdtool deletes only files that belong to the store by name and kind.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote

from hdtool.data.durable_files import file_lock
from hdtool.data.errors import StoreError, did_you_mean, os_errors_as
from hdtool.data.home import home
from hdtool.data.stores.history_manifest import history_lock, read_history_manifest
from hdtool.data.stores.kinds import CORPUS_KIND, HISTORY_KIND, KINDS, MODEL_KIND
from hdtool.data.stores.manifest import Checkpoint, InputShare, TokenizerFingerprint
from hdtool.data.stores.store_file_names import (
    BUILT_FILES,
    HISTORY_FILES,
    LOCK_FILE,
    MANIFEST,
    holds_history,
    holds_manifest,
    leftovers,
    printable,
)
from hdtool.data.stores.store_folder import read_manifest
from hdtool.data.stores.tenant import namespace_folder

NO_STORE = "none"
"""Value of options and settings that stands for no store."""


def store_at_home(kind: str, tokenizer: TokenizerFingerprint, namespace: str | None = None) -> Path:
    """Return the folder for stores of one kind and tokenizer, inside the namespace's folder if one is given."""
    return (home() / "stores" if namespace is None else namespace_folder(namespace)) / tokenizer.fingerprint / kind


def corpus_index_at_home(tokenizer: TokenizerFingerprint, namespace: str | None = None) -> Path:
    """Return the folder of a corpus index, which all models with the same tokenizer share."""
    return store_at_home(CORPUS_KIND, tokenizer, namespace)


def model_store_at_home(model: Checkpoint, tokenizer: TokenizerFingerprint, namespace: str | None = None) -> Path:
    """Return the folder of a model's store. A fine-tune has its own store, because it answers differently."""
    return store_at_home(MODEL_KIND, tokenizer, namespace) / model.fingerprint


def model_stores_at_home(
    tokenizer: TokenizerFingerprint, namespace: str | None = None
) -> list[tuple[Path, Checkpoint | None]]:
    """Return ``(folder, model)`` for each readable model store of a tokenizer; the model is None if it is unknown."""
    folder = store_at_home(MODEL_KIND, tokenizer, namespace)
    stores = []
    for path in sorted([folder / MANIFEST, *folder.glob(f"*/{MANIFEST}")]):
        with suppress(StoreError):
            stores.append((path.parent, read_manifest(path.parent, check=False).model))
    return stores


def history_at_home(model: str, tokenizer: TokenizerFingerprint, namespace: str | None = None) -> Path:
    """Return the folder of a model's history store. Each model has its own, because a model repeats its own answers."""
    return store_at_home(HISTORY_KIND, tokenizer, namespace) / model


SHOWN_FINGERPRINT_DIGITS = 8
"""Number of fingerprint digits in the name of a store."""
STORE_PATTERNS = (
    "stores/*/{kind}",
    "stores/*/{kind}/*",
    "namespaces/*/*/{kind}",
    "namespaces/*/*/{kind}/*",
    "demo/*/{kind}",
)
_FINGERPRINT = re.compile("[0-9a-f]{16}")
_STORE_NAME = re.compile(f"(.*/)?({'|'.join(KINDS)})-[0-9a-f]{{{SHOWN_FINGERPRINT_DIGITS},}}.*")
"""Pattern of store names. Other names are paths, and are not looked up in hdtool's home."""


@dataclass(frozen=True)
class StoredItem:
    """Store, artifact of a model, or set-up in hdtool's home."""

    name: str
    """Unique name by which the user selects the item, usually its kind and the first digits of a fingerprint."""
    kind: str
    folder: Path
    changed: float
    """Time of the build or of the last write, in seconds since 1970."""
    bytes: int
    tokenizer: str | None = None
    model: Checkpoint | None = None
    tokens: int | None = None
    sources: tuple[InputShare, ...] = ()
    fault: str | None = None
    """Why the item cannot be opened; None if it can be opened."""
    shared_name: str | None = None
    """Short name that several items share, which is why ``name`` is longer; None if the short name is unique."""


def stored_items() -> list[StoredItem]:
    """Return all stores in hdtool's home, with unique names."""
    folders = {
        path.parent
        for kind in KINDS
        for place in STORE_PATTERNS
        for path in home().glob(f"{place.format(kind=kind)}/{MANIFEST}")
    }
    items = [_item(folder) for folder in sorted(folders) if holds_manifest(folder) or holds_history(folder)]
    return with_unique_names(items)


def find_item(name: str, items: Iterable[StoredItem]) -> StoredItem:
    """Return the item with this name or folder; raise StoreError unless exactly one matches."""
    known = list(items)
    if found := _named(name, known):
        return found
    for item in known:
        if Path(name).expanduser().resolve() == item.folder.resolve():
            return item
    names = [item.name for item in known]
    meant = did_you_mean(name, names)
    raise StoreError(f"there is no store {name} in {home()}{meant}: it holds {', '.join(names) or 'none'}")


def store_folder(name: str) -> Path:
    """Return the folder of a store that is given by its path or by its name in hdtool's home.

    An unknown name is returned as a path, unless it is similar to a store's name. Raise StoreError if it is, or if
    several stores share the name.
    """
    folder = Path(name).expanduser()
    if folder.exists():
        return folder
    if (home() / name / MANIFEST).is_file():  # the name of a store whose short name is not unique
        return home() / name
    items = stored_items()
    if _STORE_NAME.fullmatch(name) and (found := _named(name, items)):
        return found.folder
    if meant := did_you_mean(name, [item.name for item in items]):
        raise StoreError(f"{name} holds no store{meant}: name a folder, or a store that hdtool stores lists")
    return folder


def _named(name: str, items: list[StoredItem]) -> StoredItem | None:
    if sharing := [printable(item.name) for item in items if item.shared_name == name]:
        candidates = ", ".join(sharing)
        raise StoreError(f"{name} could be any of {len(sharing)}: {candidates}: give one of these names instead")
    return next((item for item in items if item.name == name), None)


def remove_store(item: StoredItem) -> None:
    """Delete a store's files, and then the folder if nothing else is in it.

    The manifest is deleted last, so that a killed removal can be found and repeated.
    """
    folder, is_history = item.folder, item.kind == HISTORY_KIND
    busy = StoreError(f"a build of {folder} is running: wait for it")
    with os_errors_as(StoreError, f"{folder} cannot be removed", "correct the permissions"):
        with history_lock(folder, remove=True) if is_history else file_lock(folder / LOCK_FILE, busy, remove=True):
            for path in leftovers(folder, (), HISTORY_FILES if is_history else BUILT_FILES):
                path.unlink(missing_ok=True)
            (folder / MANIFEST).unlink(missing_ok=True)
        remove_empty(folder)


def remove_empty(folder: Path) -> None:
    """Remove a folder and then its parents as long as they are empty, but not hdtool's home itself."""
    with suppress(OSError):
        for place in (folder, *folder.parents):
            if place == home():
                return
            place.rmdir()


def _item(folder: Path) -> StoredItem:
    parts = folder.relative_to(home()).parts
    kind = next(part for part in parts if part in KINDS)
    changed = (folder / MANIFEST).stat().st_mtime
    files = [path for path in folder.iterdir() if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    kept_by = parts[-1] if _FINGERPRINT.fullmatch(parts[-1]) else parts[-2]
    owner = {"namespaces": f"{unquote(parts[1])}/", "demo": "demo/"}.get(parts[0], "")
    plain = StoredItem(f"{owner}{kind}-{kept_by[:SHOWN_FINGERPRINT_DIGITS]}", kind, folder, changed, size)
    try:
        return _history_item(plain, files) if kind == HISTORY_KIND else _built_item(plain)
    except StoreError as error:
        return replace(plain, fault=str(error))


def _built_item(item: StoredItem) -> StoredItem:
    manifest = read_manifest(item.folder)
    return replace(
        item,
        bytes=manifest.bytes,
        tokenizer=manifest.tokenizer.fingerprint,
        model=manifest.model,
        tokens=manifest.counts["tokens"],
        sources=manifest.sources,
    )


def _history_item(item: StoredItem, files: list[Path]) -> StoredItem:
    manifest = read_history_manifest(item.folder)
    changed = max(path.stat().st_mtime for path in files)
    model = Checkpoint(manifest.model, manifest.model)  # a history store does not record the model's name
    return replace(item, tokenizer=manifest.tokenizer.fingerprint, model=model, changed=changed)


def with_unique_names(items: list[StoredItem]) -> list[StoredItem]:
    """Return the items; an item whose name is not unique gets its folder's path in hdtool's home as its name."""
    names = Counter(item.name for item in items)
    return [
        item
        if names[item.name] == 1
        else replace(item, name=item.folder.relative_to(home()).as_posix(), shared_name=item.name)
        for item in items
    ]
