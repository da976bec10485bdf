"""Stores as an external corpus of SGLang: JSON Lines, each a string, which its NGRAM algorithm drafts from.

SGLang encodes the strings when it starts, so what counts is which tokens come back. They differ where a document was
cut inside a character, where the model chose other tokens than the tokenizer would for the same text, and where the
tokenizer begins every text with a space.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hdtool.builders.stores.edit_store import HistoryDocuments, StoreContents
from hdtool.builders.stores.sequences import TOKENIZER_BATCH, encode_texts
from hdtool.data.errors import OptionError, StoreError
from hdtool.data.output_files import OutputFile
from hdtool.data.progress import ProgressBar, progress_bar
from hdtool.data.stores.documents import Document, Tokens
from hdtool.data.stores.home import history_at_home
from hdtool.data.stores.manifest import Checkpoint, TokenizerFingerprint
from hdtool.data.stores.store_files import holds_history
from hdtool.runtime.config import HOME, MEMORY, ModelConfig, StoresConfig
from hdtool.runtime.config.decoding import NO_HISTORY
from hdtool.runtime.model.checkpoint_identity import checkpoint_of
from hdtool.runtime.model.load import load_tokenizer
from hdtool.runtime.stores.store_set import StoreSet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SEPARATOR = 1
"""Tokens that SGLang puts between two documents; they count against its limit."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer makes of bytes that are no whole character."""


class Written(NamedTuple):
    """A document as SGLang will read it."""

    text: str
    tokens: int
    lost: int
    """Tokens of the document that do not come back."""


@dataclass
class ExportedCorpus:
    """What a corpus file holds."""

    stores: list[Path]
    documents: int = 0
    tokens: int = 0
    """As SGLang counts them, separators included."""
    changed_documents: int = 0
    """Documents of which some tokens do not come back."""
    lost_tokens: int = 0
    empty_documents: int = 0
    """Documents of which no text is left."""

    def count(self, written: Written) -> None:
        if written.lost:
            self.changed_documents += 1
            self.lost_tokens += written.lost
        if not written.tokens:
            self.empty_documents += 1
            return
        self.tokens += written.tokens + SEPARATOR * (self.documents > 0)
        self.documents += 1


def export_corpus(model: ModelConfig, out: Path, stores: StoresConfig, history: str = MEMORY) -> ExportedCorpus:
    """Write the documents of the stores that fit a model, or that are named, as one file; it must be new."""
    file = OutputFile(out, "an empty file", lambda path: False, StoreError)
    file.check()
    tokenizer = load_tokenizer(model)
    folders, documents, size = _documents(tokenizer, checkpoint_of(model), stores, history)
    exported = ExportedCorpus(folders)
    with file.replaced() as stream, progress_bar(size, "export", unit="tokens") as shown:
        for written in _texts(documents, tokenizer, shown):
            exported.count(written)
            if written.tokens:
                stream.write((json.dumps(written.text, ensure_ascii=False) + "\n").encode())
        if not exported.documents:
            raise StoreError(f"no text is in {_listed(folders)}: name a store with documents")
    return exported


def _documents(
    tokenizer: PreTrainedTokenizerBase, model: Checkpoint | None, stores: StoresConfig, history: str
) -> tuple[list[Path], Iterator[Document], int]:
    """The folders to export, their documents, and how many tokens these have."""
    found = StoreSet.for_tokenizer(tokenizer, stores, model=model, identified=True)
    fingerprint = found.tokenizer or TokenizerFingerprint.of(tokenizer)
    contents = [StoreContents.of(store.folder) for store in (found.model, found.corpus) if store]
    kept = _history_folder(history, fingerprint, model)
    answers = HistoryDocuments([kept] if kept else [], fingerprint)
    folders = [*([kept] if kept else []), *(one.folder for one in contents)]
    if not folders:
        raise StoreError(
            "no store of this model is in hdtool's home: build one with hdtool build-model-db or build-corpus-db, or "
            "name one with --model-db, --corpus-db or --history"
        )

    def documents() -> Iterator[Document]:
        yield from answers
        for one in contents:
            yield from one.documents()

    return folders, documents(), sum(one.manifest.counts["tokens"] for one in contents)


def _history_folder(history: str, tokenizer: TokenizerFingerprint, model: Checkpoint | None) -> Path | None:
    """The folder of the history store that ``--history`` names."""
    if history in (MEMORY, NO_HISTORY):
        return None
    if history != HOME:
        folder = Path(history).expanduser()
    elif model:
        folder = history_at_home(model.fingerprint, tokenizer)
    else:
        raise OptionError("--history home needs the model's weights on this machine: name the history's folder instead")
    if not holds_history(folder):
        raise StoreError(f"{folder} holds no history store: name another folder with --history, or leave it out")
    return folder


def _texts(documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase, shown: ProgressBar) -> Iterator[Written]:
    remaining, done = iter(documents), 0
    while batch := [document.ids for document in islice(remaining, TOKENIZER_BATCH)]:
        texts = [text_of(tokenizer, ids) for ids in batch]
        for ids, text, back in zip(batch, texts, encode_texts(texts, tokenizer), strict=True):
            yield Written(text, len(back), len(ids) - kept_tokens(ids, back))
            done += len(ids)
        shown.to(done)


def text_of(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int] | Tokens) -> str:
    """The text of a document, special tokens included, without parts of characters at its ends."""
    text = tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return str(text).strip(REPLACEMENT)


def kept_tokens(ids: Sequence[int] | Tokens, back: Sequence[int] | Tokens) -> int:
    """The number of tokens that two sequences have in common at their starts and at their ends."""
    one, other = np.asarray(ids, np.int64), np.asarray(back, np.int64)
    shorter = min(len(one), len(other))
    start = _equal_before(one[:shorter] == other[:shorter])
    end = _equal_before((one[len(one) - shorter :] == other[len(other) - shorter :])[::-1])
    return min(shorter, start + end)


def _equal_before(equal: Tokens) -> int:
    """The number of leading true values."""
    different = np.flatnonzero(~equal)
    return int(different[0]) if len(different) else len(equal)


def _listed(folders: Sequence[Path]) -> str:
    return " and ".join(os.fspath(folder) for folder in folders)
