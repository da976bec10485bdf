"""Manifests of stores and histories: what was built from which tokenizer, model and data.

A history store is appended to, so its manifest has no counts and no checksums: the number of tokens is kept with the
conversations. The files get new names whenever they are made anew, and the manifest that names them is replaced
atomically. No other command writes to the folder of a history store, because it could not be built again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hdtool.data.conversation import lone_surrogate
from hdtool.data.errors import StoreError
from hdtool.data.kept_records import exclusive
from hdtool.data.stores.store_files import (
    CORPUS,
    HISTORY,
    LOCK,
    MANIFEST,
    MODEL,
    NEW_MANIFEST,
    OPTIONAL_PARTS,
    PARTS,
    is_name_of,
    is_regular,
    manifest_bytes,
    printable,
    refuse_other_files,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hdtool.data.stores.store_files import Source

T = TypeVar("T")

LARGEST = 2**63 - 1
LONGEST_NAME = 64


def mapping_of(row: Any, name: str) -> dict[str, Any]:
    """The JSON object in a field."""
    return _typed(row, name, dict, "an object")


def list_of(row: Any, name: str) -> list[Any]:
    """The JSON array in a field."""
    return _typed(row, name, list, "a list")


def flag_of(row: Any, name: str) -> bool:
    """The boolean in a field."""
    return _typed(row, name, bool, "true or false")


def text_of(row: Any, name: str) -> str:
    """The text in a field; it must be valid Unicode."""
    text = _typed(row, name, str, "a text")
    if lone_surrogate(text):
        raise ValueError(f"{name} is not valid Unicode")
    return text


def check_name(name: str) -> None:
    """Raise unless the name of a field is a short identifier."""
    if not name.isidentifier() or len(name) > LONGEST_NAME:
        raise ValueError(f"{ascii(name)[:LONGEST_NAME]} is no name of a field")


def number_of(row: Any, name: str, least: int = 0, most: int = LARGEST) -> int:
    """The integer in a field, from ``least`` to ``most``."""
    number = _typed(row, name, int, "an integer")
    if not least <= number <= most:
        raise ValueError(f"{name} is out of range")
    return number


def _typed(row: Any, name: str, kind: type[T], needed: str) -> T:
    if not isinstance(row, Mapping):
        raise ValueError(f"the place of {name} holds no object")
    if name not in row:
        raise ValueError(f"{name} is missing")
    if type(row[name]) is not kind:  # a bool is an int by inheritance
        raise ValueError(f"{name} is not {needed}")
    found: T = row[name]
    return found


FORMATS = {CORPUS: 1, MODEL: 2}
"""The version of the layout of each kind of store."""
LARGEST_VOCABULARY = 2**31 - 1
"""Tokens are stored in signed 32-bit numbers."""
NUMBERS_AMONG_OPTIONS = ("token_bytes", "shard_bytes", "top_k", "per_key")
SHOWN_DIGITS = 12
"""Digits of an input's hash that are shown."""
_FINGERPRINT = re.compile("[0-9a-f]{16}")


@dataclass(frozen=True)
class TokenizerFingerprint:
    """Equal for tokenizers that give the same ids."""

    fingerprint: str
    vocab_size: int

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> TokenizerFingerprint:
        vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
        # Tokenizers with the same vocabulary may split a text differently.
        cut = tokenizer("Hello, world! 12345\n\tdéjà vu 世界", add_special_tokens=False)["input_ids"]
        words = json.dumps([vocabulary, cut], ensure_ascii=True).encode()
        return cls(hashlib.sha256(words).hexdigest()[:16], len(tokenizer))


@dataclass(frozen=True)
class Checkpoint:
    """The files of weights that a model is loaded from; equal for copies of them, whatever they are called."""

    fingerprint: str
    name: str = field(compare=False)
    """The model as its user named it."""

    @property
    def label(self) -> str:
        """The name and the fingerprint, in one line."""
        return f"{printable(self.name)} ({printable(self.fingerprint)[:40]})"


@dataclass(frozen=True)
class InputShare:
    """The contribution of one input."""

    name: str
    sha256: str
    records: int
    tokens: int

    @property
    def label(self) -> str:
        """The name and the start of the hash, either of which selects the input, in one line."""
        return f"{printable(self.name)} (sha256 {printable(self.sha256[:SHOWN_DIGITS])})"


def shares_of(sources: Sequence[Source], counted: Iterable[Sequence[int]]) -> tuple[InputShare, ...]:
    """The shares of inputs whose documents and tokens were counted while they were written."""
    return tuple(
        InputShare(source.name, source.sha256, int(records), int(tokens))
        for source, (records, tokens) in zip(sources, counted, strict=True)
    )


@dataclass(frozen=True)
class StoredFile:
    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The description of a store; reading it opens no other file."""

    kind: str
    tokenizer: TokenizerFingerprint
    counts: dict[str, int]
    options: dict[str, Any]
    sources: tuple[InputShare, ...]
    files: dict[str, StoredFile] = field(default_factory=dict)
    """The files by part; their names change with every build."""
    model: Checkpoint | None = None
    """Of a model store, the model whose answers it holds, if that is known."""

    @property
    def format(self) -> int:
        return FORMATS[self.kind]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    @property
    def holds_rankings_alone(self) -> bool:
        """Whether a model store was built without answers: all parts but its rankings are empty."""
        return not self.counts["documents"] and "rankings" in self.files

    def to_json(self) -> dict[str, Any]:
        row = asdict(self) | {"format": self.format}
        return row if self.model else {name: value for name, value in row.items() if name != "model"}

    @classmethod
    def from_json(cls, row: Any) -> Manifest:
        """The manifest in a JSON object; a ``ValueError`` describes any damage."""
        kind = text_of(row, "kind")
        if kind not in PARTS:
            raise ValueError(f"kind is none of {', '.join(PARTS)}")
        tokenizer = mapping_of(row, "tokenizer")
        vocab_size = number_of(tokenizer, "vocab_size", 1, LARGEST_VOCABULARY)
        counts = _counts_of(row)
        sources = tuple(
            InputShare(
                text_of(one, "name"), text_of(one, "sha256"), number_of(one, "records"), number_of(one, "tokens")
            )
            for one in list_of(row, "sources")
        )
        if number_of(counts, "tokens") != sum(share.tokens for share in sources):
            raise ValueError("its count of tokens is not the sum over its sources")
        if number_of(counts, "documents") != sum(share.records for share in sources):
            raise ValueError("its count of documents is not the sum over its sources")
        return cls(
            kind=kind,
            tokenizer=TokenizerFingerprint(text_of(tokenizer, "fingerprint"), vocab_size),
            counts=counts,
            options=_options_of(row),
            sources=sources,
            files=_files_of(row, PARTS[kind], OPTIONAL_PARTS[kind]),
            model=_model_of(row) if row.get("model") is not None else None,
        )


def _model_of(row: Any) -> Checkpoint:
    model = mapping_of(row, "model")
    fingerprint = text_of(model, "fingerprint")
    if not _FINGERPRINT.fullmatch(fingerprint):
        raise ValueError("the fingerprint of its model is none")
    return Checkpoint(fingerprint, text_of(model, "name"))


def _options_of(row: Any) -> dict[str, Any]:
    """The options of a build; unknown ones are kept."""
    options = mapping_of(row, "options")
    for name in options:
        check_name(name)
        if name in NUMBERS_AMONG_OPTIONS:
            number_of(options, name, 1)
        elif name == "once_per_document":
            flag_of(options, name)
        elif isinstance(options[name], str):
            text_of(options, name)
        elif isinstance(options[name], (list, dict)):
            raise ValueError(f"{name} is not a single value")
    return options


def _counts_of(row: Any) -> dict[str, int]:
    counts = mapping_of(row, "counts")
    for name in counts:
        check_name(name)
        number_of(counts, name)
    return counts


def _files_of(row: Any, parts: Iterable[str], optional: Iterable[str]) -> dict[str, StoredFile]:
    """The files by part: the parts of the kind, with names that hdtool gives."""
    files = mapping_of(row, "files")
    parts = [*parts, *(part for part in optional if part in files)]
    if unknown := files.keys() - set(parts):
        raise ValueError(f"it has a part {printable(min(unknown))[:40]!r}, which is unknown")
    found = {}
    for part in parts:
        file = mapping_of(files, part)
        name = text_of(file, "name")
        if not is_name_of(part, name):
            raise ValueError(f"{printable(name)[:80]!r} is no file name of the part {part}")
        found[part] = StoredFile(name, number_of(file, "bytes"), text_of(file, "sha256"))
    return found


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
