"""Edit stores: merge several, add sources to one, drop a source from one.

Stores keep their documents as tokens, so they are rebuilt without the texts that the documents came from. The result
is the store that a build from all remaining texts would have given.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path, PurePath
from typing import NamedTuple

from hdtool.builders.stores.build_corpus_index import build_corpus_index
from hdtool.builders.stores.build_model_store import build_model_store
from hdtool.data.errors import StoreError
from hdtool.data.stores.documents import Document, Source, Tokens, stored_documents, with_sources
from hdtool.data.stores.store import InputShare, Manifest, TokenizerFingerprint, check_destination, read_store, require
from hdtool.data.stores.store_files import printable
from hdtool.data.stores.store_replacement import FolderCheck, recorded_name, unchanged
from hdtool.runtime.stores.corpus_index import KIND as CORPUS
from hdtool.runtime.stores.mapped_file import documents_of
from hdtool.runtime.stores.model_record import ModelRecord
from hdtool.runtime.stores.model_store import KIND as MODEL
from hdtool.runtime.stores.model_store import Ints, rankings_in

CORPUS_OPTIONS = ("shard_bytes",)
MODEL_OPTIONS = ("top_k", "per_key", "once_per_document")
"""Options of a build that the manifest records and that a store made from a store keeps."""
HASH_PREFIX = re.compile("[0-9a-f]{8,64}", re.IGNORECASE)
"""The hash of a source, or enough of its start to select one."""


@dataclass(frozen=True)
class Contents:
    """The documents of a store and where they are from; they stay readable when the store is replaced."""

    folder: Path
    manifest: Manifest
    texts: Callable[[], Iterator[Tokens]]

    @classmethod
    def of(cls, folder: Path) -> Contents:
        return read_store(folder, lambda manifest: cls(folder, manifest, _texts(folder, manifest)))

    @property
    def sources(self) -> list[Source]:
        return [Source(share.name, share.sha256) for share in self.manifest.sources]

    def documents(self) -> Iterator[Document]:
        return with_sources(self.texts(), [share.records for share in self.manifest.sources])


def _texts(folder: Path, manifest: Manifest) -> Callable[[], Iterator[Tokens]]:
    if manifest.kind == MODEL:
        return ModelRecord.of(folder, manifest).documents
    return partial(stored_documents, documents_of(folder, manifest), manifest.tokenizer.vocab_size)


class Dropped(NamedTuple):
    """The result of ``drop``."""

    manifest: Manifest
    removed: tuple[InputShare, ...]


def merge(folders: Sequence[Path], out: Path, check: FolderCheck | None = None) -> Manifest:
    """Build one store of several; sources with the same content are taken once.

    Of model stores of different models, the result names no model. ``check`` raises if a store at ``out`` that is
    none of them must stay.
    """
    check_destination(out)
    parts = [Contents.of(folder) for folder in folders]
    first = parts[0].manifest
    for part in parts[1:]:
        require(part.manifest, part.folder, first.kind, first.tokenizer)
    sources: dict[str, Source] = {}
    chosen: list[Iterator[Document]] = []
    for part in parts:
        places = {}
        for number, source in enumerate(part.sources):
            if source.sha256 not in sources:
                places[number] = len(sources)
                sources[source.sha256] = source
        chosen.append(_moved(part.documents(), places))
    replaced = next((part.manifest for part in parts if out.exists() and out.samefile(part.folder)), None)
    if any(part.manifest.model != first.model for part in parts):
        first = replace(first, model=None)
    check = unchanged(replaced) if replaced else check
    known = (rankings_in(part.folder, part.manifest) for part in parts if first.model)
    rankings = next((found for found in known if found is not None), None)
    return _build(out, first, chain.from_iterable(chosen), list(sources.values()), check, rankings)


def add(
    folder: Path,
    documents: Iterable[Document],
    sources: Sequence[Source],
    tokenizer: TokenizerFingerprint,
    kind: str | None = None,
    rankings: Ints | None = None,
) -> Manifest:
    """Add documents to a store, after those it has; they were read for a store of ``kind``, if it is given.

    To a model store, ``rankings`` of the vocabulary are added in the place of those it has.
    """
    old = Contents.of(folder)
    require(old.manifest, folder, kind or old.manifest.kind, tokenizer)
    known = {source.sha256: source.name for source in old.sources}
    for source in sources:
        if source.sha256 in known:
            raise StoreError(
                f"{printable(source.name)} is in {folder} already, as {printable(known[source.sha256])}: leave it out"
            )
    before = len(old.sources)
    added = (Document(document.ids, before + document.source) for document in documents)
    documents, check = chain(old.documents(), added), unchanged(old.manifest)
    rankings = rankings_in(folder, old.manifest) if rankings is None else rankings
    return _build(folder, old.manifest, documents, [*old.sources, *sources], check, rankings)


def drop(folder: Path, name: str) -> Dropped:
    """Rebuild a store without one source: nothing that only this source contained is left in any file.

    ``name`` is the recorded name, a file name that only one source has, or 8 or more digits of the hash.
    """
    old = Contents.of(folder)
    shares = old.manifest.sources
    removed = _selected(folder, shares, name)
    places = {number: place for place, number in enumerate(n for n in range(len(shares)) if shares[n] not in removed)}
    if not places:
        raise StoreError(f"{name} is all that {folder} holds: delete the store instead")
    kept = [source for number, source in enumerate(old.sources) if number in places]
    documents, check = _moved(old.documents(), places), unchanged(old.manifest)
    manifest = _build(folder, old.manifest, documents, kept, check, rankings_in(folder, old.manifest))
    return Dropped(manifest, removed)


def _selected(folder: Path, shares: Sequence[InputShare], name: str) -> tuple[InputShare, ...]:
    """The shares of the source that ``name`` selects; several only if their names and hashes are equal."""
    recorded = recorded_name(name)
    found = [share for share in shares if share.name == recorded]
    advice = "by its hash"
    if not found:
        found = [share for share in shares if PurePath(share.name).name == recorded]
        advice = "by its whole path or by its hash"
    if not found and HASH_PREFIX.fullmatch(name):
        found = [share for share in shares if share.sha256.startswith(name.lower())]
        advice = "by its whole path or by more of its hash"
    if not found:
        names = ", ".join(share.label for share in shares)
        raise StoreError(f"{folder} has no source {printable(recorded)}: it holds {names}")
    if len({(share.name, share.sha256) for share in found}) > 1:
        names = ", ".join(share.label for share in found)
        raise StoreError(f"{folder} has several sources {printable(recorded)}: {names}: name one {advice}")
    return tuple(found)


def _moved(documents: Iterable[Document], places: dict[int, int]) -> Iterator[Document]:
    """The documents of the sources that have a new place, numbered by it."""
    return (Document(document.ids, places[document.source]) for document in documents if document.source in places)


def _build(
    folder: Path,
    like: Manifest,
    documents: Iterable[Document],
    sources: Sequence[Source],
    check: FolderCheck | None,
    rankings: Ints | None,
) -> Manifest:
    """A store with the kind, the tokenizer and the options of another."""
    build, names = (build_corpus_index, CORPUS_OPTIONS) if like.kind == CORPUS else (build_model_store, MODEL_OPTIONS)
    options = {name: like.options[name] for name in names if name in like.options}
    if like.model:
        options["model"] = like.model
    if rankings is not None:
        options["rankings"] = rankings
    return build(folder, documents, like.tokenizer, sources, check=check, **options)
