"""A store on disk: a folder of flat files that a manifest names, with sizes and checksums."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, TypeVar

from hdtool.data.errors import StoreError
from hdtool.data.stores.manifest import (
    FORMATS,
    Checkpoint,
    InputShare,
    Manifest,
    StoredFile,
    TokenizerFingerprint,
    shares_of,
)
from hdtool.data.stores.store_files import (
    HISTORY,
    MANIFEST,
    check_destination,
    manifest_bytes,
    printable,
)

__all__ = [
    "MANIFEST",
    "Checkpoint",
    "InputShare",
    "Manifest",
    "StoredFile",
    "TokenizerFingerprint",
    "check_destination",
    "checksum",
    "damaged",
    "read_manifest",
    "read_store",
    "require",
    "shares_of",
]

BUILD_COMMANDS = {"corpus": "hdtool build-corpus-db", "model": "hdtool build-model-db"}
OPENINGS = 10
"""Attempts to open a store that is replaced again and again."""

T = TypeVar("T")


def read_manifest(folder: Path, *, check: bool = True) -> Manifest:
    """The manifest of a store; with ``check`` its files must exist in their full size."""
    return read_store(folder, lambda manifest: manifest, check=check)


def read_store(folder: Path, read: Callable[[Manifest], T], *, check: bool = True) -> T:
    """The result of ``read`` for a store's manifest; repeated if the store is replaced meanwhile.

    ``read`` opens files and raises a ``StoreError`` if it cannot.
    """
    for _ in range(OPENINGS):
        text = manifest_bytes(folder)
        try:
            return read(parse_manifest(folder, text, check=check))
        except StoreError:
            if manifest_bytes(folder) == text:
                raise
    raise StoreError(f"{folder} was replaced {OPENINGS} times while it was opened: wait for the builds to end")


def parse_manifest(folder: Path, text: bytes, *, check: bool) -> Manifest:
    """The manifest in these bytes, which can be used."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{folder / MANIFEST} cannot be read ({error}): build the store again") from None
    found, kind = (row.get("format"), str(row.get("kind"))) if isinstance(row, dict) else (None, "")
    if kind == HISTORY:
        raise StoreError(
            f"{folder} is a history store, a model store or a corpus index is needed: name another folder, "
            "or make a model store of it with hdtool build-model-db --from"
        )
    needed = FORMATS.get(kind)
    if needed and (type(found) is not int or found != needed):
        raise StoreError(
            f"{folder} is a store of format {ascii(found)[:20]}, this hdtool reads format {needed}: "
            f"build it again with {BUILD_COMMANDS[kind]}"
        )
    try:
        manifest = Manifest.from_json(row)
    except ValueError as error:
        raise StoreError(f"{folder / MANIFEST} is damaged ({error}): build the store again") from None
    if check:
        for file in manifest.files.values():
            _check_size(folder, file, manifest.kind)
    return manifest


def _check_size(folder: Path, file: StoredFile, kind: str) -> None:
    path = folder / file.name
    try:
        found = os.stat(path)
    except OSError:
        raise StoreError(f"{path} is missing: build the store again with {BUILD_COMMANDS[kind]}") from None
    if not stat.S_ISREG(found.st_mode) or found.st_size != file.bytes:
        state = f"has {found.st_size:,} bytes instead of {file.bytes:,}"
        raise StoreError(f"{path} {state}: build the store again with {BUILD_COMMANDS[kind]}")


def require(manifest: Manifest, folder: Path, kind: str, tokenizer: TokenizerFingerprint | None = None) -> None:
    """Raise unless a store is of this kind and, if given, of this tokenizer."""
    if manifest.kind != kind:
        raise StoreError(f"{folder} is a {manifest.kind} store, a {kind} store is needed: name another folder")
    if tokenizer and manifest.tokenizer != tokenizer:
        raise StoreError(
            f"{folder} was built with another tokenizer ({printable(manifest.tokenizer.fingerprint)[:40]}, "
            f"{manifest.tokenizer.vocab_size:,} tokens; the model has {tokenizer.fingerprint}, "
            f"{tokenizer.vocab_size:,}): give the model that it was built for with --model, or build it again with "
            f"{BUILD_COMMANDS[kind]} --model MODEL"
        )


def damaged(folder: Path, manifest: Manifest) -> list[str]:
    """The files whose checksums do not match; reads every byte."""
    with ExitStack() as opened:
        # Reading takes long, and the store may be replaced meanwhile: open all files first.
        streams = [(file, opened.enter_context(_stream_of(folder / file.name))) for file in manifest.files.values()]
        return [file.name for file, stream in streams if _hash_of(stream) != file.sha256]


def _stream_of(path: Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise StoreError(f"{path} cannot be read ({error.strerror or error}): build the store again") from None


def _hash_of(stream: BinaryIO) -> str:
    return hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]


def checksum(path: Path) -> str:
    with open(path, "rb") as stream:
        return _hash_of(stream)
