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
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hdtool.data.errors import StoreError
from hdtool.data.files.atomic_write import to_disk
from hdtool.data.files.locking import exclusive, foreign_lock
from hdtool.data.stores.manifest import LARGEST_VOCABULARY, TokenizerFingerprint
from hdtool.data.stores.manifest_fields import mapping_of, number_of, text_of
from hdtool.data.stores.store_files import HISTORY, LOCK, MANIFEST, create, is_regular, printable

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
WAITS, PAUSE = 500, 0.02
"""How often, and in how many seconds, the lock of a folder is tried again."""

_OURS = re.compile("|".join(rf"{part}-[0-9a-f]{{8}}\.{ending}({LOCK_ENDING})?" for part, ending in FILES.items()))
_TEMPORARY = re.compile(re.escape(MANIFEST) + "-[0-9a-f]{8}")


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
        if path.exists() and not path.is_file():
            raise StoreError(f"{path} is not a file: name the folder of a history store")
        row = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise StoreError(f"{folder} holds no history store: name the folder of one") from None
    except OSError as error:
        raise StoreError(f"{path} cannot be read ({error.strerror or error}): correct the permissions") from None
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


def write_history_manifest(folder: Path, manifest: HistoryManifest) -> None:
    """Replace the manifest in one step."""
    new = folder / f"{MANIFEST}-{manifest.build}"
    try:
        new.unlink(missing_ok=True)  # of a process that was killed; the caller holds the lock
        create(new)
        with open(new, "w", encoding="utf-8", newline="\n") as stream:
            stream.write(json.dumps(manifest.to_json(), indent=1, ensure_ascii=False) + "\n")
        to_disk(new)
        new.replace(folder / MANIFEST)
        to_disk(folder)
    finally:
        new.unlink(missing_ok=True)


def is_new(folder: Path) -> bool:
    """Whether a history store may be created in a folder; other files there are a ``StoreError``."""
    if not os.path.lexists(folder):
        return True
    if not folder.is_dir():
        raise StoreError(f"{folder} is not a folder, one is needed: choose another place")
    names = sorted(os.listdir(folder))
    if MANIFEST in names:
        return False
    for name in names:
        if not _is_ours(folder / name):
            raise StoreError(
                f"{folder} holds no history store, but other files, such as {printable(name)}: "
                "choose an empty or a new folder"
            )
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
    names = (*others, *(name for name in os.listdir(folder) if _TEMPORARY.fullmatch(name)))
    return [folder / name for name in names if is_regular(folder / name)]


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, for making files anew; wait for another holder."""
    busy = StoreError(f"another command makes the history store {folder} anew: wait for it")
    with ExitStack() as held:
        for attempt in range(1, WAITS + 1):
            try:
                held.enter_context(exclusive(folder / LOCK, busy))
                break
            except StoreError as error:
                if error is not busy or attempt == WAITS:
                    raise
                time.sleep(PAUSE)
        yield


def _is_ours(path: Path) -> bool:
    if path.name == LOCK:
        return foreign_lock(path) is None
    return bool(_OURS.fullmatch(path.name) or _TEMPORARY.fullmatch(path.name)) and is_regular(path)
