"""The manifest of a store: its content, files and inputs, checked when it is read."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from hdtool.data.stores.manifest_fields import check_name, flag_of, list_of, mapping_of, number_of, text_of
from hdtool.data.stores.store_files import CORPUS, MODEL, OPTIONAL_PARTS, PARTS, is_name_of, printable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hdtool.data.stores.documents import Source

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
