"""The manifest of a history store: whose answers it holds, and its files.

A history store is appended to, so its manifest has no counts and no checksums: the number of tokens is kept with the
conversations. The files get new names whenever they are made anew, and the manifest that names them is replaced
atomically. No other command writes to the folder of a history store, because it could not be built again.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hdtool.data.errors import StoreError
from hdtool.data.files.locking import exclusive
from hdtool.data.stores.manifest import LARGEST_VOCABULARY, TokenizerFingerprint
from hdtool.data.stores.manifest_fields import mapping_of, number_of, text_of
from hdtool.data.stores.store_files import (
    HISTORY,
    LOCK,
    MANIFEST,
    NEW_MANIFEST,
    is_regular,
    manifest_bytes,
    printable,
    refuse_other_files,
)

FORMAT = 1
ANSWERS = "answers"
"""The source of conversations unless another one is given."""
FILES = {"conversations": "mdb", "ring": "bin", "chains": "bin"}
"""The parts of a history store, with the endings of their files."""
LOCK_ENDING = "-lock"
"""LMDB keeps its readers in a file with this ending."""
DIGITS = re.compile("[0-9a-f]{8}")
LARGEST_BYTES = 1 << 33
"""Places of the ring have numbers below 2**31."""
LONGEST_WAIT = 10
"""Seconds, for the lock of a folder."""

_OURS = re.compile("|".join(rf"{part}-[0-9a-f]{{8}}\.{ending}({LOCK_ENDING})?" for part, ending in FILES.items()))


@dataclass(frozen=True)
class HistoryManifest:
    """The description of a history store."""

    tokenizer: TokenizerFingerprint
    model: str
    """The fingerprint of the model that gave the answers."""
    most_bytes: int
    size: int
    """Places of the ring."""
    build: str
    """Eight hexadecimal digits in the names of the files."""

    def path(self, folder: Path, part: str) -> Path:
        return folder / f"{part}-{self.build}.{FILES[part]}"

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": HISTORY,
            "format": FORMAT,
            "tokenizer": asdict(self.tokenizer),
            "model": self.model,
            "options": {"most_bytes": self.most_bytes, "size": self.size},
            "files": {part: self.path(Path(), part).name for part in FILES},
        }

    @classmethod
    def from_json(cls, row: Any) -> HistoryManifest:
        """The manifest in a JSON object; a ``ValueError`` describes any damage."""
        tokenizer, options, files = (mapping_of(row, name) for name in ("tokenizer", "options", "files"))
        vocab_size = number_of(tokenizer, "vocab_size", 1, LARGEST_VOCABULARY)
        size = number_of(options, "size", 2, LARGEST_BYTES)
        if size & (size - 1):
            raise ValueError("size is no power of two")
        found = cls(
            TokenizerFingerprint(text_of(tokenizer, "fingerprint"), vocab_size),
            text_of(row, "model"),
            number_of(options, "most_bytes", 1, LARGEST_BYTES),
            size,
            text_of(files, "ring")[5:13],
        )
        if not DIGITS.fullmatch(found.build) or files != found.to_json()["files"]:
            raise ValueError("its files have other names than those of a history store")
        return found


def new_build() -> str:
    return secrets.token_hex(4)


def stamp_of(path: Path | str) -> tuple[int, int]:
    """Differs when the manifest at a path was replaced; raises an OSError if there is none."""
    found = os.stat(path)
    return found.st_ino, found.st_mtime_ns


def read_history_manifest(folder: Path) -> HistoryManifest:
    """The manifest of a history store; anything else there raises a ``StoreError``."""
    path = folder / MANIFEST
    try:
        row = json.loads(manifest_bytes(folder, "history store", "name the folder of one"))
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} cannot be read ({error}): {_advice(folder)}") from None
    kind, form = (row.get("kind"), row.get("format")) if isinstance(row, dict) else (None, None)
    if kind != HISTORY:
        found = printable(kind)[:40] if isinstance(kind, str) else "unknown"
        raise StoreError(f"{folder} is of the kind {found}, a history store is needed: name another folder")
    if type(form) is not int or form != FORMAT:
        raise StoreError(
            f"{folder} is a history store of format {ascii(form)[:20]}, this hdtool reads format {FORMAT}: "
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
    """Raise unless a history store is of this tokenizer and, if given, of this model."""
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


def is_new(folder: Path) -> bool:
    """Whether a history store may be created in a folder; other files there are a ``StoreError``."""
    if not os.path.lexists(folder):
        return True
    if not folder.is_dir():
        raise StoreError(f"{folder} is not a folder, one is needed: choose another place")
    if MANIFEST in os.listdir(folder):
        return False
    refuse_other_files(folder, "history store", _OURS)
    return True


def sweep_history(folder: Path, manifest: HistoryManifest) -> None:
    """Delete the files of a history store that its manifest does not name: replaced ones and those of killed commands.

    Readers keep the files that they have opened. The caller holds the lock of the folder.
    """
    for path in leftovers(folder, manifest):
        # Where an open file cannot be deleted, a later command deletes it.
        with suppress(FileNotFoundError, PermissionError):
            path.unlink()


def leftovers(folder: Path, manifest: HistoryManifest) -> list[Path]:
    """The files of a history store that its manifest does not name."""
    others = (name for name in os.listdir(folder) if _OURS.fullmatch(name) and manifest.build not in name)
    names = (*others, *(name for name in os.listdir(folder) if NEW_MANIFEST.fullmatch(name)))
    return [folder / name for name in names if is_regular(folder / name)]


def folder_lock(folder: Path) -> AbstractContextManager[None]:
    """Hold the lock of a folder, for making files anew; wait for another holder."""
    busy = StoreError(f"another command makes the history store {folder} anew: wait for it")
    return exclusive(folder / LOCK, busy, seconds=LONGEST_WAIT)
