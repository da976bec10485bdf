"""Manifests of history stores, which name the files that a history is appended to.

The manifests hold no counts and no checksums. Files get new names whenever they are rewritten, and the manifest that
names them is replaced atomically.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hdtool.data.durable_files import file_lock
from hdtool.data.errors import StoreError
from hdtool.data.stores.fields import field_of, number_of
from hdtool.data.stores.kinds import HISTORY, HISTORY_KIND
from hdtool.data.stores.manifest import TokenizerFingerprint
from hdtool.data.stores.store_file_names import (
    HISTORY_FILES,
    LMDB_LOCK_ENDING,
    LOCK_FILE,
    MANIFEST,
    manifest_bytes,
    printable,
    refuse_other_files,
    sweep,
)

DEFAULT_SOURCE = "answers"
"""Default source name of the conversations in a history store."""
BUILD_DIGITS = re.compile("[0-9a-f]{8}")
MAX_HISTORY_BYTES = 1 << 33
"""Maximum size of a history store, so that positions in its ring stay below 2**31."""
LOCK_TIMEOUT = 10
"""Seconds to wait for the lock of a folder."""


@dataclass(frozen=True)
class HistoryManifest:
    """Description of a history store."""

    tokenizer: TokenizerFingerprint
    model: str
    """Fingerprint of the model that gave the answers."""
    max_bytes: int
    size: int
    """Number of token positions in the ring, a power of two."""
    build: str
    """Eight hexadecimal digits in the names of the files."""

    def path(self, folder: Path, part: str) -> Path:
        return folder / self._names[part]

    @property
    def _names(self) -> dict[str, str]:
        return {part: f"{part}-{self.build}.{ending}" for part, ending in HISTORY.parts.items()}

    @property
    def file_names(self) -> set[str]:
        """Names of all files of the store, including the file in which LMDB registers readers."""
        return {name + ending for name in self._names.values() for ending in ("", LMDB_LOCK_ENDING)}

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": HISTORY_KIND,
            "format": HISTORY.format,
            "tokenizer": self.tokenizer.to_json(),
            "model": self.model,
            "options": {"most_bytes": self.max_bytes, "size": self.size},
            "files": self._names,
        }

    @classmethod
    def from_json(cls, row: Any) -> HistoryManifest:
        """Parse a manifest; raise ValueError, with the reason, if the manifest is damaged."""
        tokenizer, options, files = (field_of(row, name, dict) for name in ("tokenizer", "options", "files"))
        size = number_of(options, "size", 2, MAX_HISTORY_BYTES)
        if size & (size - 1):
            raise ValueError("size is no power of two")
        manifest = cls(
            TokenizerFingerprint.from_json(tokenizer),
            field_of(row, "model", str),
            number_of(options, "most_bytes", 1, MAX_HISTORY_BYTES),
            size,
            field_of(files, "ring", str)[5:13],
        )
        if not BUILD_DIGITS.fullmatch(manifest.build) or files != manifest._names:
            raise ValueError("its files have other names than those of a history store")
        return manifest


def manifest_stamp(path: Path | str) -> tuple[int, int]:
    """Return a value that changes when the manifest at ``path`` is replaced; raise OSError if there is no manifest."""
    status = os.stat(path)
    return status.st_ino, status.st_mtime_ns


def read_history_manifest(folder: Path) -> HistoryManifest:
    """Read the manifest of a history store; raise StoreError if the folder holds no readable history store."""
    path = folder / MANIFEST
    try:
        row = json.loads(manifest_bytes(folder, "history store", "name the folder of one"))
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} cannot be read ({error}): {_advice(folder)}") from None
    kind, form = (row.get("kind"), row.get("format")) if isinstance(row, dict) else (None, None)
    if kind != HISTORY_KIND:
        shown_kind = printable(kind)[:40] if isinstance(kind, str) else "unknown"
        raise StoreError(f"{folder} is of the kind {shown_kind}, a history store is needed: name another folder")
    if type(form) is not int or form != HISTORY.format:
        raise StoreError(
            f"{folder} is a history store of format {ascii(form)[:20]}, this hdtool reads format {HISTORY.format}: "
            f"{_advice(folder)}"
        )
    try:
        return HistoryManifest.from_json(row)
    except ValueError as error:
        raise StoreError(f"{path} is damaged ({error}): {_advice(folder)}") from None


def _advice(folder: Path) -> str:
    return f"delete {folder} to begin a new history, or name another folder"


def require_history(
    manifest: HistoryManifest, folder: Path, tokenizer: TokenizerFingerprint, model: str | None = None
) -> None:
    """Raise StoreError unless a history store was written with ``tokenizer`` and, if given, for ``model``."""
    if manifest.tokenizer != tokenizer:
        raise StoreError(
            f"{folder} holds answers in another tokenizer ({printable(manifest.tokenizer.fingerprint)[:40]}, "
            f"{manifest.tokenizer.vocab_size:,} tokens; {tokenizer.fingerprint}, {tokenizer.vocab_size:,} is needed): "
            "name another folder"
        )
    if model is not None and manifest.model != model:
        raise StoreError(
            f"{folder} holds answers of another model ({printable(manifest.model)[:40]}; {model} is needed): "
            "name another folder"
        )


def is_new_history(folder: Path) -> bool:
    """Return True if a history store may be created in a folder, and False if the folder already has a manifest.

    Raise StoreError if it is not a folder, or holds other files and no manifest.
    """
    if not os.path.lexists(folder):
        return True
    if not folder.is_dir():
        raise StoreError(f"{folder} is not a folder, one is needed: choose another place")
    try:
        refuse_other_files(folder, "history store", HISTORY_FILES)
    except StoreError:
        # Looking for the manifest last finds one that another process has just written.
        if not os.path.lexists(folder / MANIFEST):
            raise
        return False
    return True


def sweep_history(folder: Path) -> None:
    """Delete the files of a history store that its manifest does not name; see ``sweep``."""
    sweep(folder, lambda: read_history_manifest(folder).file_names, HISTORY_FILES)


def history_lock(folder: Path, *, remove: bool = False) -> AbstractContextManager[None]:
    """Return a context manager that holds a history store's lock.

    It waits up to ``LOCK_TIMEOUT`` seconds for the lock, then raises StoreError. ``remove`` deletes the lock file at
    the end of the block.
    """
    busy = StoreError(f"another command makes the history store {folder} anew: wait for it")
    return file_lock(folder / LOCK_FILE, busy, seconds=LOCK_TIMEOUT, remove=remove)
