"""The stores that an answer is drafted from: those that were named, else those that fit the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from hdtool.data import demo
from hdtool.data.stores.home import store_at_home
from hdtool.data.stores.store import MANIFEST, TokenizerFingerprint, read_manifest
from hdtool.runtime.config import SOURCE_LETTERS, StoresConfig
from hdtool.runtime.stores.corpus_index import KIND as CORPUS
from hdtool.runtime.stores.corpus_index import CorpusIndex
from hdtool.runtime.stores.history.history import History
from hdtool.runtime.stores.model_store import KIND as MODEL
from hdtool.runtime.stores.model_store import ModelStore

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NONE = "none"
EMBEDDED = {MODEL: demo.MODEL_STORE, CORPUS: demo.CORPUS_INDEX}

Place = tuple[Path, TokenizerFingerprint]
AnyStore = TypeVar("AnyStore", ModelStore, CorpusIndex)


@dataclass(frozen=True)
class StoreSet:
    """A model store and a corpus index, as far as there are any."""

    model: ModelStore | None = None
    corpus: CorpusIndex | None = None
    databases: str = SOURCE_LETTERS
    """The letters of those that are drafted from; for others no store is opened."""
    history: History | None = None
    """Earlier answers; without it, the drafters of a model begin with an empty one."""
    tokenizer: TokenizerFingerprint | None = None
    """Of the tokenizer, if a store was opened or it was asked for."""

    @classmethod
    def for_tokenizer(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        config: StoresConfig,
        databases: str = SOURCE_LETTERS,
        *,
        identified: bool = False,
    ) -> StoreSet:
        """The stores that ``config`` names; a store of another tokenizer is refused.

        With ``identified``, the fingerprint of the tokenizer is computed even if no store is opened.
        """
        model_db = config.model_db if "M" in databases else NONE
        corpus_db = config.corpus_db if "S" in databases else NONE
        if model_db == corpus_db == NONE and not identified:
            return cls(databases=databases)
        fingerprint = TokenizerFingerprint.of(tokenizer)
        model = _open(model_db or _fitting(MODEL, fingerprint, config.namespace), ModelStore, fingerprint)
        corpus = _open(corpus_db or _fitting(CORPUS, fingerprint, config.namespace), CorpusIndex, fingerprint)
        return cls(model, corpus, databases, tokenizer=fingerprint)

    def __reduce__(self) -> tuple[Callable[..., StoreSet], tuple[object, ...]]:
        """Sent to another process, it opens its stores anew: they are mapped, not copied."""
        places = [(store.folder, store.manifest.tokenizer) if store else None for store in self._both]
        return _reopened, (*places, self.databases)

    @property
    def _both(self) -> tuple[ModelStore | None, CorpusIndex | None]:
        return self.model, self.corpus

    def __str__(self) -> str:
        stores = [store for store in self._both if store]
        if stores:
            return " and ".join(f"{store.folder} ({store.manifest.counts['tokens']:,} tokens)" for store in stores)
        if self.databases == "C":
            return "the conversation itself"
        return "no stores, only the conversation itself" if "C" in self.databases else "no stores"


def _reopened(model: Place | None, corpus: Place | None, databases: str) -> StoreSet:
    return StoreSet(ModelStore(*model) if model else None, CorpusIndex(*corpus) if corpus else None, databases)


def _open(
    place: Path | str | None,
    opened: Callable[[Path, TokenizerFingerprint], AnyStore],
    fingerprint: TokenizerFingerprint,
) -> AnyStore | None:
    return opened(Path(place).expanduser(), fingerprint) if place and place != NONE else None


def _fitting(kind: str, fingerprint: TokenizerFingerprint, namespace: str | None) -> Path | None:
    """The store at home that is filed under this tokenizer, else the embedded one if it is the demo's."""
    if namespace:
        own = store_at_home(kind, fingerprint, namespace)
        if kind == MODEL or (own / MANIFEST).exists():
            # Answers to one tenant are never mixed with answers to others.
            return own if (own / MANIFEST).exists() else None
    at_home = store_at_home(kind, fingerprint)
    if (at_home / MANIFEST).exists():
        return at_home
    return EMBEDDED[kind] if read_manifest(EMBEDDED[kind], check=False).tokenizer == fingerprint else None
