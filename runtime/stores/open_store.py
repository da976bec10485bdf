"""Open a store of either kind."""

from __future__ import annotations

from pathlib import Path

from hdtool.data.stores.store import Manifest, read_store
from hdtool.runtime.stores.corpus_index import KIND, CorpusIndex
from hdtool.runtime.stores.model_store import ModelStore


def open_store(folder: str | Path) -> CorpusIndex | ModelStore:
    """The corpus index or model store in a folder; anything else there raises a ``StoreError``."""
    place = Path(folder).expanduser()
    return read_store(place, lambda manifest: store_of(place, manifest))


def store_of(folder: Path, manifest: Manifest) -> CorpusIndex | ModelStore:
    """The store with this manifest, which was read already."""
    return (CorpusIndex if manifest.kind == KIND else ModelStore)(folder, manifest=manifest)
