"""Evidence of the model store at a node of a growing tree."""

from __future__ import annotations

from hdtool.runtime.stores.model_store import MODEL, fetch, known_as, model_record, rows_of

__all__ = ["MODEL", "fetch", "known_as", "model_record", "rows_of"]
