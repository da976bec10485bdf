"""Default folders below hdtool's home, and the stores in it.

A folder may hold other files beside a store. Only files that a store's name and kind account for are deleted.
"""

from __future__ import annotations

import errno
import os
import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote

from hdtool.data.errors import OptionError, StoreError
from hdtool.data.kept_records import file_lock
from hdtool.data.stores.manifest import (
    HISTORY_FILES,
    LMDB_LOCK_ENDING,
    Checkpoint,
    InputShare,
    TokenizerFingerprint,
    history_leftovers,
    history_lock,
    read_history_manifest,
)
from hdtool.data.stores.store import read_manifest
from hdtool.data.stores.store_files import (
    CORPUS_KIND,
    HISTORY_KIND,
    LOCK_FILE,
    MANIFEST,
    MODEL_KIND,
    delete_leftovers,
    holds_history,
    holds_manifest,
    printable,
)

NO_STORE = "none"
"""The name that stands for no store, in options and settings."""
MAX_FOLDER_NAME = 200
"""Characters of a namespace's folder name: file systems allow 255, and some of them fewer."""
MAX_MODEL_NAME = 100
"""Characters of a model's name in the name of a folder."""
UNESCAPED_BYTES = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789-_")
"""Bytes that a folder name keeps; all others are percent-encoded."""
WINDOWS_DEVICE = re.compile(r"(con|prn|aux|nul|(com|lpt)[0-9])")
"""Names that Windows reserves for devices, as far as a folder name could equal one."""


def home() -> Path:
    """``HDTOOL_HOME``, else the platform's folder for a program's data."""
    if chosen := os.environ.get("HDTOOL_HOME"):
        return Path(chosen).expanduser()
    from platformdirs import user_data_path

    return user_data_path("hdtool", appauthor=False)


def cost_at_home(fingerprint: str, device: str, dtype: str, threads: int) -> Path:
    """The file of a model's cost curve on this machine, per device name, dtype and number of threads."""
    words = re.sub(r"\W+", "-", device).strip("-")
    return home() / "costs" / fingerprint / f"{words}-{dtype}-{threads}.json"


def quick_costs_at_home() -> Path:
    """The folder of quick measurements, which are made again after a while."""
    return home() / "costs" / "quick"


def proofs_at_home() -> Path:
    """The folder of what was proved of models on this machine."""
    return home() / "proofs"


def import_structure_at_home() -> Path:
    """The folder of the names that the packages of transformers have."""
    return home() / "imports"


def converted_models_at_home() -> Path:
    """The folder of models converted from GGUF files."""
    return home() / "gguf"


def quantized_models_at_home() -> Path:
    """The folder of checkpoints whose weights were quantized to blocks."""
    return home() / "quantized"


def quantized_at_home(name: str, fingerprint: str) -> Path:
    """The folder of a quantized checkpoint: the name is for people, the fingerprint is of its content."""
    return quantized_models_at_home() / f"{_folder_name(name)}-{fingerprint}".lstrip("-")


def setups_at_home(model: str) -> Path:
    """The folder of a model's set-ups."""
    return home() / "setups" / _folder_name(model)


def converted_at_home(name: str, fingerprint: str) -> Path:
    """The folder of a converted model: the name is for people, the fingerprint is of the file's content."""
    return converted_models_at_home() / f"{_folder_name(name)}-{fingerprint}".lstrip("-")


def _folder_name(name: str) -> str:
    """A name for people as a part of a folder's name; different names may become equal."""
    return re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII).strip(".-")[:MAX_MODEL_NAME]


def store_at_home(kind: str, tokenizer: TokenizerFingerprint, namespace: str | None = None) -> Path:
    """The folder of a tokenizer's stores of a kind; tenants have their own."""
    return (home() / "stores" if namespace is None else _namespace(namespace)) / tokenizer.fingerprint / kind


def corpus_index_at_home(tokenizer: TokenizerFingerprint, namespace: str | None = None) -> Path:
    """The folder of a corpus index: models with the same tokenizer share it."""
    return store_at_home(CORPUS_KIND, tokenizer, namespace)


def model_store_at_home(model: Checkpoint, tokenizer: TokenizerFingerprint, namespace: str | None = None) -> Path:
    """The folder of a model's store; a fine-tune has another one than its base, as it gives other answers."""
    return store_at_home(MODEL_KIND, tokenizer, namespace) / model.fingerprint


def model_stores_at_home(
    tokenizer: TokenizerFingerprint, namespace: str | None = None
) -> list[tuple[Path, Checkpoint | None]]:
    """The model stores of a tokenizer with their models; a store of an earlier version names none."""
    folder = store_at_home(MODEL_KIND, tokenizer, namespace)
    stores = []
    for path in sorted([folder / MANIFEST, *folder.glob(f"*/{MANIFEST}")]):
        with suppress(StoreError):
            stores.append((path.parent, read_manifest(path.parent, check=False).model))
    return stores


def history_at_home(model: str, tokenizer: TokenizerFingerprint, namespace: str | None = None) -> Path:
    """The folder of a model's history store; models do not share it, as each repeats its own answers."""
    return store_at_home(HISTORY_KIND, tokenizer, namespace) / model


def history_of_tenant(folder: Path, tenant: str) -> Path:
    """The folder of a tenant's history in a folder that the user named; without a tenant it is that folder."""
    return folder / _folder_of(tenant) if tenant else folder


def namespace_among(names: Iterable[str]) -> str | None:
    """The first of these names that has stores; a name that cannot be a namespace has none."""
    return next((name for name in names if _is_possible(name) and has_stores(name)), None)


def has_stores(namespace: str) -> bool:
    """Return True if any store was built for this namespace; raises if the name cannot be one.

    A history is none of these: a server that keeps one for a tenant drafts from the same stores when it starts again.
    """
    folder = _namespace(namespace)
    try:
        return folder.is_dir() and {path.name for path in folder.glob("*/*")} != {HISTORY_KIND}
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return False  # a file system with shorter names cannot hold this folder


def _namespace(name: str) -> Path:
    """The folder of a tenant's stores, which never lies outside hdtool's home."""
    return home() / "namespaces" / _folder_of(name)


def _folder_of(name: str) -> str:
    """The name of a namespace's folder; two namespaces never share one."""
    if not _is_possible(name):
        raise OptionError(
            f"namespace {name!r} cannot name a folder: its encoded name has {len(_encoded(name))} characters and must "
            f"have 1 to {MAX_FOLDER_NAME}, where each byte other than a to z, 0 to 9, - and _ counts as 3: "
            f"take {'a shorter one' if name else 'another one'}"
        )
    return _encoded(name)


def _is_possible(name: str) -> bool:
    return 0 < len(_encoded(name)) <= MAX_FOLDER_NAME


def _encoded(name: str) -> str:
    """A folder name that is valid on every file system, and different for different names even without case."""
    written = "".join(
        chr(byte) if byte in UNESCAPED_BYTES else f"%{byte:02x}" for byte in name.encode("utf-8", "surrogatepass")
    )
    return f"%{ord(written[0]):02x}{written[1:]}" if WINDOWS_DEVICE.fullmatch(written) else written


SHOWN_FINGERPRINT_DIGITS = 8
"""Digits of a fingerprint in the name of a store."""
STORE_PATTERNS = (
    "stores/*/{kind}",
    "stores/*/{kind}/*",
    "namespaces/*/*/{kind}",
    "namespaces/*/*/{kind}/*",
    "demo/*/{kind}",
)
_FINGERPRINT = re.compile("[0-9a-f]{16}")
_STORE_NAME = re.compile(f"(.*/)?({MODEL_KIND}|{CORPUS_KIND}|{HISTORY_KIND})-[0-9a-f]{{{SHOWN_FINGERPRINT_DIGITS},}}.*")
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
    kinds = (MODEL_KIND, CORPUS_KIND, HISTORY_KIND)
    folders = {
        path.parent
        for kind in kinds
        for place in STORE_PATTERNS
        for path in home().glob(f"{place.format(kind=kind)}/{MANIFEST}")
    }
    items = [_item(folder) for folder in sorted(folders) if holds_manifest(folder) or holds_history(folder)]
    return with_unique_names(items)


def find_item(name: str, items: Iterable[StoredItem]) -> StoredItem:
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
    if not _STORE_NAME.fullmatch(name):
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
        if item.kind == HISTORY_KIND:
            _remove_history(folder)
        else:
            busy = StoreError(f"a build of {folder} is running: wait for it")
            with file_lock(folder / LOCK_FILE, busy):
                (folder / MANIFEST).unlink()
                delete_leftovers(folder, ())
        (folder / LOCK_FILE).unlink(missing_ok=True)
        remove_empty(folder)
    except OSError as error:
        raise StoreError(f"{folder} cannot be removed ({error.strerror or error}): correct the permissions") from error


def _remove_history(folder: Path) -> None:
    with history_lock(folder):
        manifest = read_history_manifest(folder)
        history_files = [manifest.path(folder, part) for part in HISTORY_FILES]
        leftover_files = history_leftovers(folder, manifest)
        (folder / MANIFEST).unlink()
        for path in [
            *history_files,
            *(path.with_name(path.name + LMDB_LOCK_ENDING) for path in history_files),
            *leftover_files,
        ]:
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
    kind = next(part for part in parts if part in (MODEL_KIND, CORPUS_KIND, HISTORY_KIND))
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
    model = Checkpoint(manifest.model, manifest.model)  # a history records no name
    return replace(item, tokenizer=manifest.tokenizer.fingerprint, model=model, changed=changed)


def with_unique_names(items: list[StoredItem]) -> list[StoredItem]:
    """The items, named by their folders where several would have the same name."""
    names = Counter(item.name for item in items)
    return [
        item
        if names[item.name] == 1
        else replace(item, name=item.folder.relative_to(home()).as_posix(), shared_name=item.name)
        for item in items
    ]
