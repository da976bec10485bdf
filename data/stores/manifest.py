"""Manifests of stores, which record the tokenizer, the model and the inputs that a store was built from."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hdtool.data import demo
from hdtool.data.artifact import Artifact
from hdtool.data.errors import ModelError, lone_surrogate
from hdtool.data.stores.fields import check_name, field_of, number_of
from hdtool.data.stores.kinds import BUILT_KINDS
from hdtool.data.stores.store_file_names import is_part_name, printable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_VOCABULARY = 2**31 - 1
"""Maximum vocabulary size, because token ids are stored as signed 32-bit integers."""
NUMERIC_OPTIONS = {"token_bytes", *(name for kind in BUILT_KINDS.values() for name in kind.options)}
SHOWN_HASH_DIGITS = 12
"""Number of digits shown of an input's hash."""
_FINGERPRINT = re.compile("[0-9a-f]{16}")
TOKENIZER_DETAIL = "tokenizer"
"""Key of the artifact detail ``[hash, size, ids]``: a tokenizer's hash, vocabulary size, and ids of a sample text."""


@dataclass(frozen=True)
class TokenizerFingerprint:
    """Identity of a tokenizer, equal for tokenizers with the same vocabulary and the same ids for a sample text."""

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
        """Parse a manifest's field ``tokenizer``; raise ValueError, with the reason, if the field is damaged."""
        vocab_size = number_of(row, "vocab_size", 1, MAX_VOCABULARY)
        folder = field_of(row, "folder", str) if "folder" in row else ""
        return cls(field_of(row, "fingerprint", str), vocab_size, folder)

    def to_json(self) -> dict[str, Any]:
        row = asdict(self)
        return row if self.folder else {name: value for name, value in row.items() if name != "folder"}


def _kept_hash(tokenizer: PreTrainedTokenizerBase, cut: list[int], folder: str) -> str:
    """Return a tokenizer's hash, cached in the artifact that holds the tokenizer's files, if any.

    The cached hash is used if neither the files, nor the tokenizer's size, nor ``cut`` (ids of a sample text) changed.
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
    """Return a local folder's absolute path; empty for other names, the embedded model and paths outside UTF-8."""
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
        return BUILT_KINDS[self.kind].format

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
        """Parse a manifest; raise ValueError, with the reason, if the manifest is damaged."""
        kind = field_of(row, "kind", str)
        if kind not in BUILT_KINDS:
            raise ValueError(f"kind is none of {', '.join(BUILT_KINDS)}")
        tokenizer = TokenizerFingerprint.from_json(field_of(row, "tokenizer", dict))
        counts = _counts_of(row)
        sources = tuple(
            InputShare(
                field_of(source, "name", str),
                field_of(source, "sha256", str),
                number_of(source, "records"),
                number_of(source, "tokens"),
            )
            for source in field_of(row, "sources", list)
        )
        if number_of(counts, "tokens") != sum(share.tokens for share in sources):
            raise ValueError("its count of tokens is not the sum over its sources")
        if number_of(counts, "documents") != sum(share.records for share in sources):
            raise ValueError("its count of documents is not the sum over its sources")
        return cls(
            kind=kind,
            tokenizer=tokenizer,
            counts=counts,
            options=_options_of(row),
            sources=sources,
            files=_files_of(row, BUILT_KINDS[kind].parts, BUILT_KINDS[kind].optional),
            model=_model_of(row) if row.get("model") is not None else None,
        )


def _model_of(row: Any) -> Checkpoint:
    model = field_of(row, "model", dict)
    fingerprint = field_of(model, "fingerprint", str)
    if not _FINGERPRINT.fullmatch(fingerprint):
        raise ValueError("the fingerprint of its model is none")
    return Checkpoint(fingerprint, field_of(model, "name", str))


def _options_of(row: Any) -> dict[str, Any]:
    """Validate the options of a build, of which unknown ones are kept; raise ValueError for an invalid value."""
    options = field_of(row, "options", dict)
    for name in options:
        check_name(name)
        if name in NUMERIC_OPTIONS:
            number_of(options, name, 1)
        elif name == "once_per_document":
            field_of(options, name, bool)
        elif isinstance(options[name], str):
            field_of(options, name, str)
        elif isinstance(options[name], (list, dict)):
            raise ValueError(f"{name} is not a single value")
    return options


def _counts_of(row: Any) -> dict[str, int]:
    counts = field_of(row, "counts", dict)
    for name in counts:
        check_name(name)
        number_of(counts, name)
    return counts


def _files_of(row: Any, parts: Iterable[str], optional: Iterable[str]) -> dict[str, StoredFile]:
    """Validate a manifest's files; raise ValueError for unknown or missing parts and for invalid file names."""
    files = field_of(row, "files", dict)
    parts = [*parts, *(part for part in optional if part in files)]
    if unknown := files.keys() - set(parts):
        raise ValueError(f"it has a part {printable(min(unknown))[:40]!r}, which is unknown")
    found = {}
    for part in parts:
        file = field_of(files, part, dict)
        name = field_of(file, "name", str)
        if not is_part_name(part, name):
            raise ValueError(f"{printable(name)[:80]!r} is no file name of the part {part}")
        found[part] = StoredFile(name, number_of(file, "bytes"), field_of(file, "sha256", str))
    return found
