"""Edits stores: merges them, adds documents, and drops a source or conversations.

Stores keep their documents as tokens, so an edit rebuilds the store without the original texts and gives the same
result as a build from the remaining texts. Conversations of history stores and documents of model stores can also be
inputs of a build.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path, PurePath
from typing import NamedTuple

from hdtool.builders.stores.build_stores import BUILDS
from hdtool.data import demo
from hdtool.data.documents import Document, InputFile, Tokens, stored_documents, with_sources
from hdtool.data.errors import ModelError, StoreError, did_you_mean
from hdtool.data.progress import count_of
from hdtool.data.stores.history_manifest import require_history
from hdtool.data.stores.kinds import BUILT_KINDS, MODEL_KIND
from hdtool.data.stores.manifest import Checkpoint, InputShare, Manifest, TokenizerFingerprint
from hdtool.data.stores.store_file_names import check_destination, holds_history, holds_manifest, printable
from hdtool.data.stores.store_folder import (
    FolderCheck,
    delete_old_builds,
    read_store,
    recorded_name,
    require_store,
    require_unchanged,
)
from hdtool.runtime.kernels.compiled import Ints
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.stores.history_metadata import StoredConversation
from hdtool.runtime.stores.history_store import HistoryStore
from hdtool.runtime.stores.mapped_files import documents_of
from hdtool.runtime.stores.model_store import rankings_in
from hdtool.runtime.stores.model_store_lmdb import ModelRecord

MAX_MODELS_SHOWN = 3


def note_on_models(
    models: Mapping[str, int], config: ModelConfig, checkpoint: Checkpoint | None, command: str = ""
) -> str | None:
    """Return a one-line note if records were answered by models other than the store's, else None.

    ``models`` counts the records per model name. ``command`` is the command line that rebuilds the store for another
    model, with ``MODEL`` as a placeholder for its name; pass it if the user gave no ``--model``.
    """
    other_models = {name: count for name, count in models.items() if not _is_named(name, config, checkpoint)}
    if not other_models:
        return None
    every = "all " if len(other_models) == len(models) else ""
    shown_names = ", ".join(printable(name) for name in list(other_models)[:MAX_MODELS_SHOWN])
    more = (
        f" and {count_of(len(other_models) - MAX_MODELS_SHOWN, 'other model')}"
        if len(other_models) > MAX_MODELS_SHOWN
        else ""
    )
    records = count_of(sum(other_models.values()), "record")
    verb = "names" if sum(other_models.values()) == 1 else "name"
    own_name = checkpoint.name if checkpoint else config.name
    named = f"{every}{records} {verb} {shown_names}{more}"
    note = f"note: {named} as the model that answered, and the store is for {printable(own_name)}"
    if not command:
        return f"{note}: a model's own answers make the best drafts"
    (first, *rest) = other_models
    if rest or not _is_loadable_name(first):
        return f"{note}, because no --model is given: {command}, where MODEL is its folder or hub name, rebuilds it"
    command_line = command.replace("MODEL", shlex.quote(printable(first)), 1)
    return f"{note}, because no --model is given: {command_line} builds one for that model"


def _is_named(name: str, config: ModelConfig, checkpoint: Checkpoint | None) -> bool:
    """Return True if ``name``, taken from a record, may refer to the model that ``config`` describes."""
    try:
        place, own_place = demo.located(name), config.place
    except ModelError:  # the package that contains the demo's model is not installed
        return name == config.name
    own_names = {config.name, own_place or demo.NAME, *([checkpoint.name] if checkpoint else [])}
    if place is None:
        return own_place is None or Path(own_place).expanduser() == demo.MODEL
    if _last_part(place) in map(_last_part, own_names):
        return True
    try:
        path, own_path = Path(place).expanduser(), demo.MODEL if own_place is None else Path(own_place).expanduser()
        return path.exists() and own_path.exists() and path.samefile(own_path)
    except (OSError, RuntimeError, ValueError):  # not a valid path
        return False


def _last_part(name: str) -> str:
    """Return a model name in lower case, without its owner or folder and without ``.gguf``."""
    return name.rstrip("/").rpartition("/")[2].lower().removesuffix(".gguf")


def _is_loadable_name(name: str) -> bool:
    try:
        return name in demo.NAMES or "/" in name or Path(name).exists()
    except (OSError, ValueError):  # not a valid path
        return False


HASH_PREFIX = re.compile("[0-9a-f]{8,64}", re.IGNORECASE)
"""Matches the SHA-256 of a source, or a prefix of it that is long enough to select the source."""


@dataclass(frozen=True)
class StoreContents:
    """Documents and sources of a store; the documents stay readable after the store is replaced on disk."""

    folder: Path
    manifest: Manifest
    texts: Callable[[], Iterator[Tokens]]

    @classmethod
    def of(cls, folder: Path) -> StoreContents:
        return read_store(folder, lambda manifest: cls(folder, manifest, _texts(folder, manifest)))

    @property
    def sources(self) -> list[InputFile]:
        return [InputFile(share.name, share.sha256) for share in self.manifest.sources]

    def documents(self) -> Iterator[Document]:
        return with_sources(self.texts(), [share.records for share in self.manifest.sources])


def _texts(folder: Path, manifest: Manifest) -> Callable[[], Iterator[Tokens]]:
    if manifest.kind == MODEL_KIND:
        return ModelRecord.of(folder, manifest).documents
    return partial(stored_documents, documents_of(folder, manifest), manifest.tokenizer.vocab_size)


class DropResult(NamedTuple):
    manifest: Manifest
    removed: tuple[InputShare, ...]


def merge(folders: Sequence[Path], out: Path, check: FolderCheck | None = None) -> Manifest:
    """Merge several stores into one at ``out``; sources with equal content are included once.

    If the stores belong to different models, the result names no model. ``check`` raises if ``out`` holds a store that
    is not one of ``folders`` and must not be replaced. Stores of different kinds or tokenizers raise a ``StoreError``.
    """
    check_destination(out)
    parts = [StoreContents.of(folder) for folder in folders]
    first = parts[0].manifest
    for part in parts[1:]:
        require_store(part.manifest, part.folder, first.kind, first.tokenizer)
    sources: dict[str, InputFile] = {}
    chosen: list[Iterator[Document]] = []
    for part in parts:
        places = {}
        for number, source in enumerate(part.sources):
            if source.sha256 not in sources:
                places[number] = len(sources)
                sources[source.sha256] = source
        chosen.append(_renumbered(part.documents(), places))
    replaced = next((part.manifest for part in parts if out.exists() and out.samefile(part.folder)), None)
    if any(part.manifest.model != first.model for part in parts):
        first = replace(first, model=None)
    check = require_unchanged(replaced) if replaced else check
    known = (rankings_in(part.folder, part.manifest) for part in parts if first.model)
    rankings = next((rankings_found for rankings_found in known if rankings_found is not None), None)
    return _rebuild(out, first, chain.from_iterable(chosen), list(sources.values()), check, rankings)


def add(
    folder: Path,
    documents: Iterable[Document],
    sources: Sequence[InputFile],
    tokenizer: TokenizerFingerprint,
    kind: str | None = None,
    rankings: Ints | None = None,
) -> Manifest:
    """Append documents to a store and return its new manifest.

    ``kind`` is the kind of store that the documents are for. A store of another kind or tokenizer, or one that already
    holds a source, raises a ``StoreError``. ``rankings`` replace a model store's vocabulary rankings; None keeps them.
    """
    old = StoreContents.of(folder)
    require_store(old.manifest, folder, kind or old.manifest.kind, tokenizer)
    known = {source.sha256: source.name for source in old.sources}
    for source in sources:
        if source.sha256 in known:
            raise StoreError(
                f"{printable(source.name)} is in {folder} already, as {printable(known[source.sha256])}: leave it out"
            )
    before = len(old.sources)
    added = (Document(document.ids, before + document.source) for document in documents)
    documents, check = chain(old.documents(), added), require_unchanged(old.manifest)
    rankings = rankings_in(folder, old.manifest) if rankings is None else rankings
    return _rebuild(folder, old.manifest, documents, [*old.sources, *sources], check, rankings)


def drop(folder: Path, name: str) -> DropResult:
    """Rebuild a store without one source, so that no file keeps content that only this source had.

    ``name`` selects the source by its recorded name, by a file name that is unique among the sources, or by at least 8
    digits of its hash. Raise a ``StoreError`` unless exactly one source is selected and others remain.
    """
    delete_old_builds(folder)  # a killed drop may have left the files of a source that the manifest no longer names
    old = StoreContents.of(folder)
    shares = old.manifest.sources
    removed = _selected(folder, shares, name)
    places = {
        number: new_index for new_index, number in enumerate(n for n in range(len(shares)) if shares[n] not in removed)
    }
    if not places:
        raise StoreError(f"{name} is all that {folder} holds: delete the store instead")
    kept_shares = [source for number, source in enumerate(old.sources) if number in places]
    documents, check = _renumbered(old.documents(), places), require_unchanged(old.manifest)
    manifest = _rebuild(folder, old.manifest, documents, kept_shares, check, rankings_in(folder, old.manifest))
    return DropResult(manifest, removed)


def _selected(folder: Path, shares: Sequence[InputShare], name: str) -> tuple[InputShare, ...]:
    """Return the shares of the source that ``name`` selects; raise a StoreError if it selects none or several."""
    recorded = recorded_name(name)
    selected = [share for share in shares if share.name == recorded]
    advice = "by its hash"
    if not selected:
        selected = [share for share in shares if PurePath(share.name).name == recorded]
        advice = "by its whole path or by its hash"
    if not selected and HASH_PREFIX.fullmatch(name):
        selected = [share for share in shares if share.sha256.startswith(name.lower())]
        advice = "by its whole path or by more of its hash"
    if not selected:
        names = ", ".join(share.label for share in shares)
        meant = did_you_mean(recorded, [PurePath(share.name).name for share in shares])
        raise StoreError(f"{folder} has no source {printable(recorded)}{printable(meant)}: it holds {names}")
    if len({(share.name, share.sha256) for share in selected}) > 1:
        names = ", ".join(share.label for share in selected)
        raise StoreError(f"{folder} has several sources {printable(recorded)}: {names}: name one {advice}")
    return tuple(selected)


def _renumbered(documents: Iterable[Document], places: dict[int, int]) -> Iterator[Document]:
    """Yield the documents whose sources are in ``places``, which maps old source numbers to new ones."""
    return (Document(document.ids, places[document.source]) for document in documents if document.source in places)


def _rebuild(
    folder: Path,
    template: Manifest,
    documents: Iterable[Document],
    sources: Sequence[InputFile],
    check: FolderCheck | None,
    rankings: Ints | None,
) -> Manifest:
    """Build a store with the kind, tokenizer, options and model of the manifest ``template``."""
    options = {name: template.options[name] for name in BUILT_KINDS[template.kind].options if name in template.options}
    if template.model:
        options["model"] = template.model
    if rankings is not None:
        options["rankings"] = rankings
    return BUILDS[template.kind](folder, documents, template.tokenizer, sources, check=check, **options)


def history_folders(inputs: Sequence[str | Path]) -> tuple[list[Path], list[str]]:
    """Split inputs into folders that hold a store (a history or another kind) and all other inputs."""
    folders, other_inputs = [], []
    for name in inputs:
        path = Path(name).expanduser()
        if path.is_dir() and (holds_history(path) or holds_manifest(path)):
            folders.append(path)
        else:
            other_inputs.append(str(name))
    return folders, other_inputs


class HistoryDocuments:
    """Iterates over the conversations of history stores and the documents of model stores."""

    def __init__(self, folders: Sequence[Path], tokenizer: TokenizerFingerprint) -> None:
        """Open the stores; conversations appended later are not included.

        Raise a ``StoreError`` if a store is of another kind or tokenizer, or if a history holds no conversations.
        """
        self.sources: list[InputFile] = []
        self.tokens = 0
        """Number of tokens of all documents."""
        self._parts: list[tuple[int, Callable[[], Iterator[Document]]]] = []
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
        for name in sorted({conversation.source for conversation in held}):
            of_source = [conversation for conversation in held if conversation.source == name]
            digest = hashlib.sha256(b"".join(conversation.hash for conversation in of_source)).hexdigest()
            self._parts.append((len(self.sources), partial(_answers, store, of_source)))
            self.tokens += sum(conversation.tokens for conversation in of_source)
            self.sources.append(InputFile(f"{folder / name}", digest))

    def _add_model_store(self, folder: Path, tokenizer: TokenizerFingerprint) -> None:
        contents = StoreContents.of(folder)
        require_store(contents.manifest, folder, MODEL_KIND, tokenizer)
        self._parts.append((len(self.sources), contents.documents))
        self.tokens += contents.manifest.counts["tokens"]
        self.sources += contents.sources

    def __iter__(self) -> Iterator[Document]:
        for first_source, documents in self._parts:
            for document in documents():
                yield Document(document.ids, first_source + document.source)

    def with_others(self, documents: Iterator[Document]) -> Iterator[Document]:
        """Yield the stores' documents, then ``documents`` with source numbers that follow those of the stores."""
        yield from self
        for document in documents:
            yield Document(document.ids, document.source + len(self.sources))


def _answers(store: HistoryStore, conversations: list[StoredConversation]) -> Iterator[Document]:
    return (Document(tokens) for _, tokens in store.answers(conversations))


def drop_conversations(
    folder: Path, *, source: str | None = None, older_than: timedelta | None = None
) -> list[StoredConversation]:
    """Remove and return the conversations of one source, those older than an age, or those that are both.

    The store is rewritten, so no file keeps the removed tokens; processes that have the store open notice when they
    begin their next answer. Raise a ``StoreError`` if neither is given, or if the store has no such source.
    """
    if source is None and older_than is None:
        raise StoreError(f"nothing to drop from {folder}: name a source, or an age from which conversations go")
    until = None if older_than is None else time.time() - older_than.total_seconds()
    store = HistoryStore(folder)
    names = sorted({conversation.source for conversation in store.conversations()})
    if source is not None and source not in names:
        held = ", ".join(printable(name) for name in names) or "no conversations"
        meant = printable(did_you_mean(source, names))
        raise StoreError(f"{folder} has no source {printable(source)}{meant}: it holds {held}")

    def stays(conversation: StoredConversation) -> bool:
        return (source is not None and conversation.source != source) or (
            until is not None and conversation.time >= until
        )

    return store.keep(stays)
