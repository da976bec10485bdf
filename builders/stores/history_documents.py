"""Stores among the inputs of a build, and conversations that are dropped from a history store.

The conversations of a history store and the documents of a model store are tokens already: a build takes them next to
the texts of other inputs. Each name under which answers were kept is a source of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

from hdtool.builders.stores.edit_store import Contents
from hdtool.data.errors import StoreError
from hdtool.data.stores.documents import Document, Source
from hdtool.data.stores.history_manifest import require_history
from hdtool.data.stores.manifest import TokenizerFingerprint
from hdtool.data.stores.store import require
from hdtool.data.stores.store_files import MODEL, holds_history, holds_manifest, printable
from hdtool.runtime.stores.history.history_records import Conversation
from hdtool.runtime.stores.history.history_store import HistoryStore


class DroppedConversations(NamedTuple):
    """The result of ``drop_conversations``."""

    conversations: int
    tokens: int
    sources: tuple[str, ...]


def history_folders(inputs: Sequence[str | Path]) -> tuple[list[Path], list[str]]:
    """The history stores and model stores among inputs, and the inputs that are none."""
    folders, others = [], []
    for name in inputs:
        place = Path(name).expanduser()
        if place.is_dir() and (holds_history(place) or holds_manifest(place)):
            folders.append(place)
        else:
            others.append(str(name))
    return folders, others


class HistoryDocuments:
    """The conversations of history stores, and the documents of model stores, as documents."""

    def __init__(self, folders: Sequence[Path], tokenizer: TokenizerFingerprint) -> None:
        """A store of another tokenizer is a ``StoreError``; what is appended from now on is left out."""
        self.sources: list[Source] = []
        self._parts: list[Callable[[], Iterator[Document]]] = []
        for folder in folders:
            if holds_history(folder):
                self._add_history(folder, tokenizer)
            else:
                self._add_model_store(folder, tokenizer)

    def _add_history(self, folder: Path, tokenizer: TokenizerFingerprint) -> None:
        store = HistoryStore(folder, read_only=True)
        require_history(store.manifest, folder, tokenizer)
        held = store.conversations()
        if not held:
            raise StoreError(f"{folder} holds no conversations: leave it out")
        for name in sorted({each.source for each in held}):
            own = [each for each in held if each.source == name]
            digest = hashlib.sha256(b"".join(each.hash for each in own)).hexdigest()
            self._parts.append(partial(_answers, store, own, len(self.sources)))
            self.sources.append(Source(f"{folder / name}", digest))

    def _add_model_store(self, folder: Path, tokenizer: TokenizerFingerprint) -> None:
        contents = Contents.of(folder)
        require(contents.manifest, folder, MODEL, tokenizer)
        self._parts.append(partial(_stored, contents, len(self.sources)))
        self.sources += contents.sources

    def __iter__(self) -> Iterator[Document]:
        for part in self._parts:
            yield from part()

    def with_others(self, documents: Iterator[Document]) -> Iterator[Document]:
        """The documents of other inputs after those of the stores; their sources come after ``sources``."""
        yield from self
        for document in documents:
            yield Document(document.ids, document.source + len(self.sources))


def _answers(store: HistoryStore, conversations: list[Conversation], source: int) -> Iterator[Document]:
    for _, tokens in store.answers(conversations):
        yield Document(tokens, source)


def _stored(contents: Contents, before: int) -> Iterator[Document]:
    for document in contents.documents():
        yield Document(document.ids, before + document.source)


def drop_conversations(
    folder: Path, *, source: str | None = None, before: timedelta | datetime | None = None
) -> DroppedConversations:
    """Remove the conversations of a source, or those before a time or older than an age; with both, those of both.

    The store is made anew without them: no file holds a token of theirs. Processes that have it open notice that when
    they next begin an answer.
    """
    if source is None and before is None:
        raise StoreError(f"nothing to drop from {folder}: name a source, or a time before which conversations go")
    until = datetime.now(UTC) - before if isinstance(before, timedelta) else before
    store = HistoryStore(folder)
    names = sorted({each.source for each in store.conversations()})
    if source is not None and source not in names:
        held = ", ".join(printable(name) for name in names) or "no conversations"
        raise StoreError(f"{folder} has no source {printable(source)}: it holds {held}")

    def stays(each: Conversation) -> bool:
        return (source is not None and each.source != source) or (until is not None and each.time >= until.timestamp())

    removed = store.keep(stays)
    sources = tuple(sorted({each.source for each in removed}))
    return DroppedConversations(len(removed), sum(each.tokens for each in removed), sources)
