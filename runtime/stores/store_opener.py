"""Opens the stores and the history that belong to a model and a tenant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from hdtool.data.errors import StoreError
from hdtool.data.stores.manifest import Checkpoint
from hdtool.data.stores.stores_at_home import NO_STORE
from hdtool.data.stores.tenant import Tenant
from hdtool.runtime.settings.decoding import DecodeConfig, StoresConfig
from hdtool.runtime.settings.draft_sources import SOURCE_LETTERS
from hdtool.runtime.stores.history_store import HistoryStore
from hdtool.runtime.stores.store_set import StoreSet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class StoreOpener:
    """Opens the stores and the history from which a tenant's answers are drafted; see also ``Loaded.store_opener``."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    checkpoint: Checkpoint | None
    config: StoresConfig
    """The stores that the user named; for others, the tenant's stores in hdtool's home are opened."""
    tenant: Tenant | None = None
    """Tenant to draft for; None for the tenant of the configured namespace."""
    weights: Callable[[], str] | None = None
    """Computes the fingerprint of weights in memory, which identifies a model without a checkpoint."""

    def check_named(self, databases: str) -> None:
        """Raise StoreError if a store that the configuration names for one of ``databases`` cannot be used."""
        named = StoresConfig(self.config.model_db or NO_STORE, self.config.corpus_db or NO_STORE)
        StoreSet.for_tokenizer(self.tokenizer, named, databases)

    def open(self, databases: str = SOURCE_LETTERS, *, identified: bool = True) -> StoreSet:
        """Open the stores of ``databases``; raise StoreError if one cannot be used.

        With ``identified``, the tokenizer's fingerprint is computed even if no store is opened.
        """
        tenant = self.tenant or Tenant(self.config.namespace or "", self.config.namespace)
        config = replace(self.config, namespace=tenant.namespace)
        opened = StoreSet.for_tokenizer(self.tokenizer, config, databases, model=self.checkpoint, identified=identified)
        return replace(opened, namespace=tenant.name or None)

    def open_for(self, decoding: DecodeConfig, *, read_only: bool = False) -> StoreSet:
        """Open the stores and the history that ``decoding`` drafts from; a ``read_only`` history is not written."""
        opened = self.open(decoding.databases, identified=decoding.identifies_tokenizer)
        return opened.with_history(decoding, partial(self._identity, decoding.history), read_only=read_only)

    def open_history(self, named: str, opened: StoreSet, *, read_only: bool = False) -> HistoryStore:
        """Open the history store that ``named`` selects for the tenant of ``opened``; create it if it is missing."""
        return opened.open_history(named, partial(self._identity, named), read_only=read_only, created=True)

    def _identity(self, named: str) -> str:
        if self.weights:
            return self.weights()
        raise StoreError(
            f"the history of {self.name} cannot be kept in {named}, because its weights are not on this machine and a "
            "history is known by them: download the model first"
        )
