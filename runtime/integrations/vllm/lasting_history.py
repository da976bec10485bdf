"""The history store of a server: found again by the tokenizer and the files of its model."""

from __future__ import annotations

from typing import Any

from hdtool.data.errors import StoreError
from hdtool.runtime.stores.history.history_store import HistoryStore
from hdtool.runtime.stores.history.open_history import open_history
from hdtool.runtime.stores.store_set import StoreSet


def lasting_history(
    named: str, store_set: StoreSet, model: str, tenant: str, *, read_only: bool = False
) -> HistoryStore:
    """The store that ``named`` stands for, created unless it exists; a StoreError if it cannot be used."""
    if store_set.checkpoint is None or store_set.tokenizer is None:
        raise StoreError(
            f"the history of {model} cannot be kept in {named}, because its weights are not on this machine and a "
            "history is known by them: download the model first"
        )
    identity = store_set.tokenizer, store_set.checkpoint.fingerprint
    return open_history(named, *identity, tenant=tenant, read_only=read_only, created=True)


def appends(parallel: Any) -> bool:
    """Whether a worker of vLLM appends to the history: the one whose drafts count, of those that run one model.

    All tensor parallel workers of the last pipeline stage draft for the same requests, and vLLM takes the drafts of the
    first one.
    """
    stage = parallel.tensor_parallel_size * getattr(parallel, "prefill_context_parallel_size", 1)
    last = stage * (parallel.pipeline_parallel_size - 1)
    return bool(parallel.rank % (stage * parallel.pipeline_parallel_size) == last)
