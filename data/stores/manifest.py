"""Manifests of stores, which record the tokenizer, the model and the inputs that a store was built from.

A history store is appended to, so its manifest has no counts and no checksums. Files get new names whenever they are
rewritten, and the manifest that names them is replaced atomically.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hdtool.data import demo
from hdtool.data.artifact import Artifact
from hdtool.data.conversation import lone_surrogate
from hdtool.data.durable_files import file_lock
from hdtool.data.errors import ModelError, StoreError
from hdtool.data.stores.store_files import (
    CORPUS_KIND,
    HISTORY_KIND,
    LOCK_FILE,
    MANIFEST,
    MODEL_KIND,
    NEW_MANIFEST,
    OPTIONAL_PARTS,
    STORE_PARTS,
    is_part_name,
    is_regular,
    manifest_bytes,
    printable,
    refuse_other_files,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hdtool.data.documents import Source

T = TypeVar("T")

MAX_NUMBER = 2**63 - 1
MAX_FIELD_NAME = 64


def mapping_field(row: Any, name: str) -> dict[str, Any]:
    """Return the JSON object in a field. Raises ValueError if it is missing or has another type."""
    return _typed_field(row, name, dict, "an object")


def list_field(row: Any, name: str) -> list[Any]:
    """Return the JSON array in a field. Raises ValueError if it is missing or has another type."""
    return _typed_field(row, name, list, "a list")


def flag_field(row: Any, name: str) -> bool:
    """Return the boolean in a field. Raises ValueError if it is missing or has another type."""
    return _typed_field(row, name, bool, "true or false")


def text_field(row: Any, name: str) -> str:
    """Return the string in a field. Raises ValueError if it is missing, has another type, or is not valid Unicode."""
    text = _typed_field(row, name, str, "a text")
    if lone_surrogate(text):
        raise ValueError(f"{name} is not valid Unicode")
    return text


def check_name(name: str) -> None:
    """Raise ValueError unless the name of a field is a short identifier."""
    if not name.isidentifier() or len(name) > MAX_FIELD_NAME:
        raise ValueError(f"{ascii(name)[:MAX_FIELD_NAME]} is no name of a field")


def number_field(row: Any, name: str, minimum: int = 0, maximum: int = MAX_NUMBER) -> int:
    """Return the integer in a field. Raises ValueError unless it lies between ``minimum`` and ``maximum``."""
    number = _typed_field(row, name, int, "an integer")
    if not minimum <= number <= maximum:
        raise ValueError(f"{name} is out of range")
    return number


def _typed_field(row: Any, name: str, kind: type[T], needed: str) -> T:
    if not isinstance(row, Mapping):
        raise ValueError(f"the place of {name} holds no object")
    if name not in row:
        raise ValueError(f"{name} is missing")
    if type(row[name]) is not kind:  # isinstance would accept a bool as an int
        raise ValueError(f"{name} is not {needed}")
    value: T = row[name]
    return value


STORE_FORMATS = {CORPUS_KIND: 1, MODEL_KIND: 2}
"""Format version of each kind of store."""
MAX_VOCABULARY = 2**31 - 1
"""Maximum vocabulary size, because token ids are stored as signed 32-bit integers."""
NUMERIC_OPTIONS = ("token_bytes", "shard_bytes", "top_k", "per_key")
SHOWN_HASH_DIGITS = 12
"""Number of digits shown of an input's hash."""
_FINGERPRINT = re.compile("[0-9a-f]{16}")
TOKENIZER_DETAIL = "tokenizer"
"""Name of an artifact's detail with the hash of its tokenizer, and what the hash was computed for."""


@dataclass(frozen=True)
class TokenizerFingerprint:
    """Identity of a tokenizer, equal for all tokenizers that encode texts to the same ids."""

    fingerprint: str
    vocab_size: int
    folder: str = field(default="", compare=False)
    """Folder from which the tokenizer was loaded; empty if unknown."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> TokenizerFingerprint:
        # Tokenizers with the same vocabulary may still split a text differently.
        cut = tokenizer("Hello, world! 12345\n\tdéjà vu 世界", add_special_tokens=False)["input_ids"]
        folder = str(getattr(tokenizer, "name_or_path", ""))
        return cls(_kept_hash(tokenizer, cut, folder), len(tokenizer), _recorded_folder(folder))

    @classmethod
    def from_json(cls, row: Any) -> TokenizerFingerprint:
        """Parse the field of a manifest. Raises ValueError, with the reason, if it is damaged."""
        vocab_size = number_field(row, "vocab_size", 1, MAX_VOCABULARY)
        folder = text_field(row, "folder") if "folder" in row else ""
        return cls(text_field(row, "fingerprint"), vocab_size, folder)

    def to_json(self) -> dict[str, Any]:
        row = asdict(self)
        return row if self.folder else {name: value for name, value in row.items() if name != "folder"}


def _kept_hash(tokenizer: PreTrainedTokenizerBase, cut: list[int], folder: str) -> str:
    """Return ``_hash_of`` a tokenizer, which is kept with the artifact that holds its files, if any.

    The kept hash counts while the files are unchanged and the tokenizer has the same size and still makes the same cut.
    """
    artifact = Artifact.read(Path(folder)) if folder else None
    artifact = artifact and artifact.kept()
    if artifact is None or "tokenizer.json" not in artifact.files:
        return _hash_of(tokenizer, cut)
    kept, circumstances = artifact.details.get(TOKENIZER_DETAIL), [len(tokenizer), cut]
    if isinstance(kept, list) and kept[1:] == circumstances and _FINGERPRINT.fullmatch(str(kept[0])):
        return str(kept[0])
    computed = _hash_of(tokenizer, cut)
    with suppress(ModelError, OSError):
        replace(artifact, details=artifact.details | {TOKENIZER_DETAIL: [computed, *circumstances]}).write()
    return computed


def _hash_of(tokenizer: PreTrainedTokenizerBase, cut: list[int]) -> str:
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    words = json.dumps([vocabulary, cut], ensure_ascii=True).encode()
    return hashlib.sha256(words).hexdigest()[:16]


def _recorded_folder(name: str) -> str:
    """Return the absolute path of a local folder; an empty string for the embedded model's, which every machine has."""
    folder = Path(name).absolute()
    return "" if not name or folder == demo.MODEL or not folder.is_dir() or lone_surrogate(str(folder)) else str(folder)


@dataclass(frozen=True)
class Checkpoint:
    """Identity of a model's weights, equal for all copies of the weight files, whatever the copies are named."""

    fingerprint: str
    name: str = field(compare=False)
    """Name under which the user loaded the model."""

    @property
    def label(self) -> str:
        """Name and fingerprint, on one line."""
        return f"{printable(self.name)} ({printable(self.fingerprint)[:40]})"


@dataclass(frozen=True)
class InputShare:
    """Contribution of one input to a store."""

    name: str
    sha256: str
    records: int
    tokens: int

    @property
    def label(self) -> str:
        """Name and first digits of the hash, on one line. ``hdtool drop --source`` accepts either of them."""
        return f"{printable(self.name)} (sha256 {printable(self.sha256[:SHOWN_HASH_DIGITS])})"


def input_shares(sources: Sequence[Source], counted: Iterable[Sequence[int]]) -> tuple[InputShare, ...]:
    """Return each input's contribution. ``counted`` has a pair per input: its numbers of documents and tokens."""
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
    """Description of a store, readable without opening the store's other files."""

    kind: str
    tokenizer: TokenizerFingerprint
    counts: dict[str, int]
    options: dict[str, Any]
    sources: tuple[InputShare, ...]
    files: dict[str, StoredFile] = field(default_factory=dict)
    """Files by part. Their names change with every build."""
    model: Checkpoint | None = None
    """Model whose answers a model store holds; None if unknown."""

    @property
    def format(self) -> int:
        return STORE_FORMATS[self.kind]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    @property
    def holds_rankings_alone(self) -> bool:
        """True if a model store was built without answers and therefore holds only rankings."""
        return not self.counts["documents"] and "rankings" in self.files

    def to_json(self) -> dict[str, Any]:
        row = asdict(self) | {"tokenizer": self.tokenizer.to_json(), "format": self.format}
        return row if self.model else {name: value for name, value in row.items() if name != "model"}

    @classmethod
    def from_json(cls, row: Any) -> Manifest:
        """Parse a manifest. Raises ValueError, with the reason, if the manifest is damaged."""
        kind = text_field(row, "kind")
        if kind not in STORE_PARTS:
            raise ValueError(f"kind is none of {', '.join(STORE_PARTS)}")
        tokenizer = TokenizerFingerprint.from_json(mapping_field(row, "tokenizer"))
        counts = _counts_of(row)
        sources = tuple(
            InputShare(
                text_field(source, "name"),
                text_field(source, "sha256"),
                number_field(source, "records"),
                number_field(source, "tokens"),
            )
            for source in list_field(row, "sources")
        )
        if number_field(counts, "tokens") != sum(share.tokens for share in sources):
            raise ValueError("its count of tokens is not the sum over its sources")
        if number_field(counts, "documents") != sum(share.records for share in sources):
            raise ValueError("its count of documents is not the sum over its sources")
        return cls(
            kind=kind,
            tokenizer=tokenizer,
            counts=counts,
            options=_options_of(row),
            sources=sources,
            files=_files_of(row, STORE_PARTS[kind], OPTIONAL_PARTS[kind]),
            model=_model_of(row) if row.get("model") is not None else None,
        )


def _model_of(row: Any) -> Checkpoint:
    model = mapping_field(row, "model")
    fingerprint = text_field(model, "fingerprint")
    if not _FINGERPRINT.fullmatch(fingerprint):
        raise ValueError("the fingerprint of its model is none")
    return Checkpoint(fingerprint, text_field(model, "name"))


def _options_of(row: Any) -> dict[str, Any]:
    """Validate the options of a build. Unknown options are kept."""
    options = mapping_field(row, "options")
    for name in options:
        check_name(name)
        if name in NUMERIC_OPTIONS:
            number_field(options, name, 1)
        elif name == "once_per_document":
            flag_field(options, name)
        elif isinstance(options[name], str):
            text_field(options, name)
        elif isinstance(options[name], (list, dict)):
            raise ValueError(f"{name} is not a single value")
    return options


def _counts_of(row: Any) -> dict[str, int]:
    counts = mapping_field(row, "counts")
    for name in counts:
        check_name(name)
        number_field(counts, name)
    return counts


def _files_of(row: Any, parts: Iterable[str], optional: Iterable[str]) -> dict[str, StoredFile]:
    """Validate a manifest's files. Raises ValueError for unknown or missing parts and for invalid file names."""
    files = mapping_field(row, "files")
    parts = [*parts, *(part for part in optional if part in files)]
    if unknown := files.keys() - set(parts):
        raise ValueError(f"it has a part {printable(min(unknown))[:40]!r}, which is unknown")
    found = {}
    for part in parts:
        file = mapping_field(files, part)
        name = text_field(file, "name")
        if not is_part_name(part, name):
            raise ValueError(f"{printable(name)[:80]!r} is no file name of the part {part}")
        found[part] = StoredFile(name, number_field(file, "bytes"), text_field(file, "sha256"))
    return found


HISTORY_FORMAT = 1
DEFAULT_SOURCE = "answers"
"""Default source name of the conversations in a history store."""
HISTORY_FILES = {"conversations": "mdb", "ring": "bin", "chains": "bin"}
"""Parts of a history store, with the suffixes of their files."""
LMDB_LOCK_ENDING = "-lock"
"""Suffix of the file in which LMDB registers its readers."""
BUILD_DIGITS = re.compile("[0-9a-f]{8}")
MAX_HISTORY_BYTES = 1 << 33
"""Maximum size of a history store, so that positions in its ring stay below 2**31."""
LOCK_TIMEOUT = 10
"""Seconds to wait for the lock of a folder."""

_HISTORY_FILE = re.compile(
    "|".join(rf"{part}-[0-9a-f]{{8}}\.{ending}({LMDB_LOCK_ENDING})?" for part, ending in HISTORY_FILES.items())
)


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
        return folder / f"{part}-{self.build}.{HISTORY_FILES[part]}"

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": HISTORY_KIND,
            "format": HISTORY_FORMAT,
            "tokenizer": self.tokenizer.to_json(),
            "model": self.model,
            "options": {"most_bytes": self.max_bytes, "size": self.size},
            "files": {part: self.path(Path(), part).name for part in HISTORY_FILES},
        }

    @classmethod
    def from_json(cls, row: Any) -> HistoryManifest:
        """Parse a manifest. Raises ValueError, with the reason, if the manifest is damaged."""
        tokenizer, options, files = (mapping_field(row, name) for name in ("tokenizer", "options", "files"))
        size = number_field(options, "size", 2, MAX_HISTORY_BYTES)
        if size & (size - 1):
            raise ValueError("size is no power of two")
        manifest = cls(
            TokenizerFingerprint.from_json(tokenizer),
            text_field(row, "model"),
            number_field(options, "most_bytes", 1, MAX_HISTORY_BYTES),
            size,
            text_field(files, "ring")[5:13],
        )
        if not BUILD_DIGITS.fullmatch(manifest.build) or files != manifest.to_json()["files"]:
            raise ValueError("its files have other names than those of a history store")
        return manifest


def new_build() -> str:
    return secrets.token_hex(4)


def manifest_stamp(path: Path | str) -> tuple[int, int]:
    """Return a value that changes when the manifest at ``path`` is replaced. Raises OSError if there is no manifest."""
    status = os.stat(path)
    return status.st_ino, status.st_mtime_ns


def read_history_manifest(folder: Path) -> HistoryManifest:
    """Read the manifest of a history store. Raises StoreError if the folder holds no readable history store."""
    path = folder / MANIFEST
    try:
        row = json.loads(manifest_bytes(folder, "history store", "name the folder of one"))
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} cannot be read ({error}): {_advice(folder)}") from None
    kind, form = (row.get("kind"), row.get("format")) if isinstance(row, dict) else (None, None)
    if kind != HISTORY_KIND:
        shown_kind = printable(kind)[:40] if isinstance(kind, str) else "unknown"
        raise StoreError(f"{folder} is of the kind {shown_kind}, a history store is needed: name another folder")
    if type(form) is not int or form != HISTORY_FORMAT:
        raise StoreError(
            f"{folder} is a history store of format {ascii(form)[:20]}, this hdtool reads format {HISTORY_FORMAT}: "
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

    Raises StoreError if the folder holds other files.
    """
    if not os.path.lexists(folder):
        return True
    if not folder.is_dir():
        raise StoreError(f"{folder} is not a folder, one is needed: choose another place")
    try:
        refuse_other_files(folder, "history store", _HISTORY_FILE)
    except StoreError:
        # Looking for the manifest last finds one that another process has just written.
        if not os.path.lexists(folder / MANIFEST):
            raise
        return False
    return True


def sweep_history(folder: Path) -> None:
    """Delete files that the manifest does not name: replaced files, and leftovers of killed or failed commands.

    Readers can still use the files that they have opened. The caller must hold the folder's lock.
    """
    try:
        manifest = read_history_manifest(folder) if os.path.lexists(folder / MANIFEST) else None
    except StoreError:
        return  # damaged: nobody knows which files it names
    for path in history_leftovers(folder, manifest):
        # If the system cannot delete an open file, a later command does it.
        with suppress(FileNotFoundError, PermissionError):
            path.unlink()


def history_leftovers(folder: Path, manifest: HistoryManifest | None) -> list[Path]:
    """Return the files of a history store that its manifest does not name; without a manifest, all files."""
    names = os.listdir(folder)
    others = [name for name in names if _HISTORY_FILE.fullmatch(name) and not (manifest and manifest.build in name)]
    others += [name for name in names if NEW_MANIFEST.fullmatch(name)]
    return [folder / name for name in others if is_regular(folder / name)]


def history_lock(folder: Path, *, remove: bool = False) -> AbstractContextManager[None]:
    """Hold a history store's lock in a ``with`` block. Waits up to ``LOCK_TIMEOUT`` seconds, then raises StoreError.

    ``remove`` deletes the lock file at the end of the block.
    """
    busy = StoreError(f"another command makes the history store {folder} anew: wait for it")
    return file_lock(folder / LOCK_FILE, busy, seconds=LOCK_TIMEOUT, remove=remove)
