"""Opens the history store that the option ``--history`` names."""

from __future__ import annotations

from pathlib import Path

from hdtool.data.stores.home import history_at_home, history_of_tenant
from hdtool.data.stores.manifest import TokenizerFingerprint
from hdtool.runtime.config import HOME
from hdtool.runtime.stores.history.history_files import MOST_BYTES, create_if_new
from hdtool.runtime.stores.history.history_store import HistoryStore


def open_history(
    named: str,
    tokenizer: TokenizerFingerprint,
    model: str,
    *,
    tenant: str = "",
    read_only: bool = False,
    created: bool = False,
) -> HistoryStore:
    """The store of a model in a folder or at home; each tenant has a folder of its own there.

    A new store is created by those who append to it, and with ``created`` by those who only read it, too.
    """
    folder = (
        history_at_home(model, tokenizer, tenant or None)
        if named == HOME
        else history_of_tenant(Path(named).expanduser(), tenant)
    )
    if created:
        create_if_new(folder, tokenizer, model, MOST_BYTES)
    return HistoryStore.open(folder, tokenizer, model, read_only=read_only)
