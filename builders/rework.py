"""Stores made from stores: united, added to, or freed of what one source brought.

A store keeps its documents as tokens, so it can be built anew without the texts that they came
from; the result is the store that a build from all the texts that remain would have given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hdtool.builders.corpus_index import build_corpus_index
from hdtool.builders.model_store import build_model_store
from hdtool.data.documents import Document, Source, stored_documents, with_sources
from hdtool.data.errors import StoreError
from hdtool.data.store import Manifest, TokenizerMark, read_manifest, require
from hdtool.runtime.stores import documents_of


@dataclass(frozen=True)
class Contents:
    """The documents of a store and where they are from."""

    folder: Path
    manifest: Manifest

    @classmethod
    def of(cls, folder: Path) -> Contents:
        return cls(folder, read_manifest(folder))

    @property
    def sources(self) -> list[Source]:
        return [Source(share.name, share.sha256) for share in self.manifest.sources]

    def documents(self) -> Iterator[Document]:
        tokens = documents_of(self.folder, self.manifest)
        documents = stored_documents(tokens, self.manifest.tokenizer.vocab_size)
        return with_sources(documents, [share.records for share in self.manifest.sources])


def merge(folders: Sequence[Path], out: Path) -> Manifest:
    """One store of all; a source that several hold, told by its content, is taken once."""
    parts = [Contents.of(folder) for folder in folders]
    first = parts[0].manifest
    for part in parts[1:]:
        require(part.manifest, part.folder, first.kind, first.tokenizer)
    sources: list[Source] = []
    seen: set[str] = set()

    def documents() -> Iterator[Document]:
        for part, places in zip(parts, chosen, strict=True):
            yield from _moved(part.documents(), places)

    chosen: list[dict[int, int]] = []
    for part in parts:
        places = {}
        for number, source in enumerate(part.sources):
            if source.sha256 not in seen:
                seen.add(source.sha256)
                places[number] = len(sources)
                sources.append(source)
        chosen.append(places)
    return _build(out, first, documents(), sources)


def add(folder: Path, documents: Iterable[Document], sources: Sequence[Source], tokenizer: TokenizerMark) -> Manifest:
    """The store with more documents behind those it has."""
    old = Contents.of(folder)
    require(old.manifest, folder, old.manifest.kind, tokenizer)
    known = {source.sha256: source.name for source in old.sources}
    for source in sources:
        if source.sha256 in known:
            raise StoreError(f"{source.name} is in {folder} already, as {known[source.sha256]}: leave it out")
    before = len(old.sources)

    def all_documents() -> Iterator[Document]:
        yield from old.documents()
        yield from (Document(document.ids, before + document.source) for document in documents)

    return _build(folder, old.manifest, all_documents(), [*old.sources, *sources])


def drop(folder: Path, name: str) -> Manifest:
    """The store without one source: nothing that only it brought is left in any file."""
    old = Contents.of(folder)
    places: dict[int, int] = {}
    for number, source in enumerate(old.sources):
        if name not in (source.name, Path(source.name).name):
            places[number] = len(places)
    if len(places) == len(old.sources):
        names = ", ".join(source.name for source in old.sources)
        raise StoreError(f"{folder} has no source {name}: it holds {names}")
    if not places:
        raise StoreError(f"{name} is all that {folder} holds: delete the folder instead")
    kept = [source for number, source in enumerate(old.sources) if number in places]
    return _build(folder, old.manifest, _moved(old.documents(), places), kept)


def _moved(documents: Iterable[Document], places: dict[int, int]) -> Iterator[Document]:
    """The documents of the sources that have a new place, numbered by it."""
    return (Document(document.ids, places[document.source]) for document in documents if document.source in places)


def _build(folder: Path, like: Manifest, documents: Iterable[Document], sources: Sequence[Source]) -> Manifest:
    options = {name: value for name, value in like.options.items() if name != "token_bytes"}
    if like.kind == "corpus":
        return build_corpus_index(folder, documents, like.tokenizer, sources, **options)
    return build_model_store(folder, documents, like.tokenizer, sources, **options)
