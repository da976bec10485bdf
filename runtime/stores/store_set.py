"""Chooses and opens the stores to draft from: those named in the settings, else those that fit the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hdtool.data import demo
from hdtool.data.errors import OptionError
from hdtool.data.notes import note
from hdtool.data.stores.manifest import Checkpoint, Manifest, TokenizerFingerprint
from hdtool.data.stores.store_file_names import MANIFEST
from hdtool.data.stores.store_folder import read_manifest, read_store
from hdtool.data.stores.stores_at_home import (
    NO_STORE,
    corpus_index_at_home,
    history_at_home,
    model_store_at_home,
    model_stores_at_home,
    store_folder,
)
from hdtool.data.stores.tenant import history_of_tenant
from hdtool.runtime.settings.decoding import HOME, DecodeConfig, StoresConfig
from hdtool.runtime.settings.draft_sources import SOURCE_LETTERS, SOURCE_NAMES
from hdtool.runtime.stores.corpus_index import CorpusIndex
from hdtool.runtime.stores.history_ring import create_if_new
from hdtool.runtime.stores.history_store import History, HistoryStore
from hdtool.runtime.stores.model_store import ModelStore

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def open_store(folder: str | Path) -> CorpusIndex | ModelStore:
    """Open the corpus index or model store in a folder; raise StoreError if there is none or it can't be used."""
    path = Path(folder).expanduser()
    return read_store(path, lambda manifest: store_of(path, manifest))


def store_of(folder: Path, manifest: Manifest) -> CorpusIndex | ModelStore:
    """Open the store in a folder whose manifest has already been read."""
    return STORE_CLASSES[manifest.kind](folder, manifest=manifest)


STORE_CLASSES: dict[str, type[ModelStore | CorpusIndex]] = {each.kind: each for each in (ModelStore, CorpusIndex)}
"""Classes of opened stores by kind, which is also the name of their field in ``StoreSet``."""
AnyStore = TypeVar("AnyStore", ModelStore, CorpusIndex)


@dataclass(frozen=True)
class StoreSet:
    """The stores that a model drafts from; a store that is missing or not wanted is None."""

    model: ModelStore | None = None
    corpus: CorpusIndex | None = None
    databases: str = SOURCE_LETTERS
    """Letters of the databases to draft from; stores of other databases are not opened."""
    history: History | None = None
    """Earlier answers; if None, the model's drafters start with an empty history."""
    tokenizer: TokenizerFingerprint | None = None
    """Fingerprint of the tokenizer; None if no store needed it and the caller didn't request it."""
    checkpoint: Checkpoint | None = None
    """The model's checkpoint; None if its files are unknown."""
    namespace: str | None = None
    """Name of the tenant whose history on disk is used; None for the shared tenant."""

    @classmethod
    def for_tokenizer(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        config: StoresConfig,
        databases: str = SOURCE_LETTERS,
        *,
        model: Checkpoint | None = None,
        identified: bool = False,
    ) -> StoreSet:
        """Open the stores that ``config`` names, else those that ``model_store_for`` and ``corpus_index_for`` find.

        Print a note if a model store belongs to another model than ``model``. With ``identified``, the fingerprint of
        the tokenizer is computed even if no store is opened. Raise StoreError if a store can't be used or has another
        tokenizer.
        """
        model_db = config.model_db if "M" in databases else NO_STORE
        corpus_db = config.corpus_db if "S" in databases else NO_STORE
        if model_db == corpus_db == NO_STORE and not identified:
            return cls(databases=databases)
        fingerprint = TokenizerFingerprint.of(tokenizer)
        model_store = _open(model_db or model_store_for(model, fingerprint, config.namespace), ModelStore, fingerprint)
        corpus = _open(corpus_db or corpus_index_for(fingerprint, config.namespace), CorpusIndex, fingerprint)
        _note_other_models(model_store, model_db, model, fingerprint, config.namespace)
        return cls(model_store, corpus, databases, tokenizer=fingerprint, checkpoint=model, namespace=config.namespace)

    def with_history(self, config: DecodeConfig, weights: Callable[[], str], *, read_only: bool = False) -> StoreSet:
        """Return the stores with the history that ``config`` drafts from, if any; see ``open_history``."""
        if not config.has_history:
            return self
        store = self.open_history(config.history, weights, read_only=read_only) if config.keeps_history else None
        return replace(self, history=History(prompts=config.history_prompts, store=store))

    def open_history(
        self, named: str, weights: Callable[[], str], *, read_only: bool = False, created: bool = False
    ) -> HistoryStore:
        """Open the tenant's history store in the folder ``named``; ``HOME`` means hdtool's home.

        A missing store is created if ``created`` is set or ``read_only`` is not. ``weights`` returns a fingerprint that
        identifies a model without a checkpoint. Raise OptionError without a tokenizer, StoreError for an unfit store.
        """
        if not self.tokenizer:
            raise OptionError(f"--history {named} needs the tokenizer: open the stores for a tokenizer first")
        # An engine that loads the model itself knows only the model's files; where known, these identify the model.
        model = self.checkpoint.fingerprint if self.checkpoint else weights()
        if named == HOME:
            folder = history_at_home(model, self.tokenizer, self.namespace)
        else:
            folder = history_of_tenant(Path(named).expanduser(), self.namespace or "")
        if created:
            create_if_new(folder, self.tokenizer, model)
        return HistoryStore.open(folder, self.tokenizer, model, read_only=read_only)

    def __reduce__(self) -> tuple[Callable[..., StoreSet], tuple[object, ...]]:
        """Pickle the stores' paths instead of the stores, so that the other process opens and memory-maps the files.

        The history is dropped, because it is in this process's memory.
        """
        places = {kind: (store.folder, store.manifest.tokenizer) for kind, store in self.opened.items()}
        return _reopened, ({**vars(self), **places, "history": None},)

    @property
    def opened(self) -> dict[str, ModelStore | CorpusIndex]:
        """The opened stores by kind."""
        return {kind: store for kind in STORE_CLASSES if (store := getattr(self, kind))}

    @property
    def letters(self) -> str:
        """Letters of the sources that can be drafted from without a history: the conversation and the stores."""
        return "".join(one for one in SOURCE_LETTERS if one == "C" or SOURCE_NAMES[one] in self.opened)

    def __str__(self) -> str:
        if self.opened:
            return " and ".join(f"{store.folder} ({_size(store.manifest)})" for store in self.opened.values())
        if self.databases == "C":
            return "the conversation itself"
        return "no stores, only the conversation itself" if "C" in self.databases else "no stores"


def _reopened(fields: dict[str, Any]) -> StoreSet:
    opened = {kind: opened(*fields[kind]) for kind, opened in STORE_CLASSES.items() if fields[kind]}
    return StoreSet(**{**fields, **opened})


def _open(
    location: Path | str | None,
    opened: Callable[[Path, TokenizerFingerprint], AnyStore],
    fingerprint: TokenizerFingerprint,
) -> AnyStore | None:
    return opened(store_folder(str(location)), fingerprint) if location and location != NO_STORE else None


def model_store_for(
    model: Checkpoint | None, tokenizer: TokenizerFingerprint, namespace: str | None = None
) -> Path | None:
    """Return the folder of a model's store, or None if there is none.

    The store is in hdtool's home or, for the demo model, in the package. With a ``namespace``, only that tenant's store
    is considered: answers are never shared between tenants.
    """
    if model is None:
        return None
    at_home = model_store_at_home(model, tokenizer, namespace)
    if (at_home / MANIFEST).exists():
        return at_home
    embedded = read_manifest(demo.MODEL_STORE, check=False)
    fits = (embedded.model, embedded.tokenizer) == (model, tokenizer)
    return demo.MODEL_STORE if fits and not namespace else None


def corpus_index_for(tokenizer: TokenizerFingerprint, namespace: str | None = None) -> Path | None:
    """Return the folder of a tokenizer's corpus index, or None if there is none.

    The index of ``namespace`` in hdtool's home comes first, then the common one there, then the embedded one.
    """
    for owner in {namespace: None, None: None}:
        if ((at_home := corpus_index_at_home(tokenizer, owner)) / MANIFEST).exists():
            return at_home
    embedded = read_manifest(demo.CORPUS_INDEX, check=False)
    return demo.CORPUS_INDEX if embedded.tokenizer == tokenizer else None


def _note_other_models(
    opened: ModelStore | None,
    named: str | None,
    model: Checkpoint | None,
    tokenizer: TokenizerFingerprint,
    namespace: str | None,
) -> None:
    """Print a note if the named model store is another model's, or if hdtool's home has only other models' stores."""
    if opened:
        store_model = opened.manifest.model
        if named and store_model and model and store_model != model:
            note(f"{opened.folder} holds answers of {store_model.label}, not of {model.label}")
    elif not named and (others := model_stores_at_home(tokenizer, namespace)):
        folder, store_model = others[0]
        more = f", and {len(others) - 1} more" if len(others) > 1 else ""
        whose = f"of {store_model.label}" if store_model else "of a model that it does not name"
        wanted = model.label if model else "this model, whose files are not known"
        note(
            f"there is no model store of {wanted}; {folder} holds answers {whose}{more}: hdtool build-model-db makes "
            f"its own, --model-db {folder} drafts from that one, --model-db none from none"
        )


def _size(manifest: Manifest) -> str:
    if manifest.holds_rankings_alone:
        return f"{manifest.counts['rankings']:,} rankings"
    return f"{manifest.counts['tokens']:,} tokens"
