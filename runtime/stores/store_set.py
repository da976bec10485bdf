"""Chooses and opens the stores to draft from: those named in the settings, else those that fit the model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from hdtool.data import demo
from hdtool.data.errors import StoreError
from hdtool.data.stores.home import (
    NO_STORE,
    corpus_index_at_home,
    first_namespace_with_stores,
    model_store_at_home,
    model_stores_at_home,
    store_folder,
)
from hdtool.data.stores.manifest import Checkpoint, Manifest, TokenizerFingerprint
from hdtool.data.stores.store import read_manifest, read_store
from hdtool.data.stores.store_files import MANIFEST
from hdtool.runtime.config import SOURCE_LETTERS, StoresConfig
from hdtool.runtime.stores.corpus_index import KIND, CorpusIndex
from hdtool.runtime.stores.history_store import History, HistoryStore, open_history
from hdtool.runtime.stores.model_store import ModelStore

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def open_store(folder: str | Path) -> CorpusIndex | ModelStore:
    """Open the corpus index or model store in a folder; raise StoreError if it contains neither."""
    path = Path(folder).expanduser()
    return read_store(path, lambda manifest: store_of(path, manifest))


def store_of(folder: Path, manifest: Manifest) -> CorpusIndex | ModelStore:
    """Open the store in a folder whose manifest has already been read."""
    return (CorpusIndex if manifest.kind == KIND else ModelStore)(folder, manifest=manifest)


StoreLocation = tuple[Path, TokenizerFingerprint]
AnyStore = TypeVar("AnyStore", ModelStore, CorpusIndex)


@dataclass(frozen=True)
class StoreSet:
    """The stores that a model drafts from; None stands for a store that doesn't exist."""

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
    """Tenant to which the stores belong; each tenant also has its own history on disk."""

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
        """Open the stores that ``config`` names, else those in hdtool's home.

        A model store in hdtool's home is used only if it belongs to ``model``. With ``identified``, the fingerprint of
        the tokenizer is computed even if no store is opened. Raises StoreError if a store has another tokenizer.
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

    def __reduce__(self) -> tuple[Callable[..., StoreSet], tuple[object, ...]]:
        """Pickle the stores' paths instead of the stores, so that the other process opens and memory-maps the files.

        The history is dropped, because it is in this process's memory.
        """
        model, corpus = [(store.folder, store.manifest.tokenizer) if store else None for store in self._both]
        return _reopened, (model, corpus, self.databases, self.tokenizer, self.checkpoint, self.namespace)

    @property
    def _both(self) -> tuple[ModelStore | None, CorpusIndex | None]:
        return self.model, self.corpus

    def __str__(self) -> str:
        stores = [store for store in self._both if store]
        if stores:
            return " and ".join(f"{store.folder} ({_size(store.manifest)})" for store in stores)
        if self.databases == "C":
            return "the conversation itself"
        return "no stores, only the conversation itself" if "C" in self.databases else "no stores"


def _reopened(
    model: StoreLocation | None,
    corpus: StoreLocation | None,
    databases: str,
    tokenizer: TokenizerFingerprint | None,
    checkpoint: Checkpoint | None,
    namespace: str | None,
) -> StoreSet:
    return StoreSet(
        ModelStore(*model) if model else None,
        CorpusIndex(*corpus) if corpus else None,
        databases,
        tokenizer=tokenizer,
        checkpoint=checkpoint,
        namespace=namespace,
    )


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

    A tenant's index in hdtool's home comes first, then the common one there, then the embedded one.
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
            print(f"note: {opened.folder} holds answers of {store_model.label}, not of {model.label}", file=sys.stderr)
    elif not named and (others := model_stores_at_home(tokenizer, namespace)):
        folder, store_model = others[0]
        more = f", and {len(others) - 1} more" if len(others) > 1 else ""
        whose = f"of {store_model.label}" if store_model else "of a model that it does not name"
        of = model.label if model else "this model, whose files are not known"
        print(
            f"note: there is no model store of {of}; {folder} holds answers {whose}{more}: hdtool build-model-db makes "
            f"its own, --model-db {folder} drafts from that one, --model-db none from none",
            file=sys.stderr,
        )


def _size(manifest: Manifest) -> str:
    if manifest.holds_rankings_alone:
        return f"{manifest.counts['rankings']:,} rankings"
    return f"{manifest.counts['tokens']:,} tokens"


def lasting_history(
    named: str, store_set: StoreSet, model: str, tenant: str, *, read_only: bool = False
) -> HistoryStore:
    """Open the history store that ``named`` selects, creating it if missing; raise StoreError if it can't be used."""
    if store_set.checkpoint is None or store_set.tokenizer is None:
        raise StoreError(
            f"the history of {model} cannot be kept in {named}, because its weights are not on this machine and a "
            "history is known by them: download the model first"
        )
    identity = store_set.tokenizer, store_set.checkpoint.fingerprint
    return open_history(named, *identity, tenant=tenant, read_only=read_only, created=True)


def tenant_among(served_as: Sequence[str], model: str) -> str:
    """Return the tenant for whom a server keeps answers, chosen from ``served_as`` and ``model``.

    It is the first name that has stores; ``model`` is tried last. If no name has stores, it is the first served name
    other than ``model``, or an empty string if the model is served only under its own name.
    """
    return first_namespace_with_stores([*served_as, model]) or next((name for name in served_as if name != model), "")
