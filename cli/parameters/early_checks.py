"""What the command line checks before libraries and models are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STORES = ("model_db", "corpus_db")
NO_STORE = "none"


def require_stores(parameters: Mapping[str, Any]) -> None:
    """Raise StoreError if a store that was named is not there."""
    named = [value for name in STORES if isinstance(value := parameters.get(name), str) and value != NO_STORE]
    if named:
        from hdtool.data.stores.inventory import store_folder
        from hdtool.data.stores.store import read_manifest

        for name in named:
            read_manifest(store_folder(name))
