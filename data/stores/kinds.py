"""The kinds of stores: their files, and how they are built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

MODEL_KIND, CORPUS_KIND, HISTORY_KIND = "model", "corpus", "history"


class StoreKind(NamedTuple):
    """Format, files and build command of one kind of store."""

    format: int
    """Version of the format."""
    parts: Mapping[str, str]
    """Required parts, each with the suffix of its file."""
    optional: Mapping[str, str] = {}
    """Further parts, which a store may lack."""
    command: str = ""
    """Command that builds a store; empty for a history, which is appended to and never built."""
    options: tuple[str, ...] = ()
    """Options of the build command that the manifest records and that every rebuild reuses."""

    @property
    def rebuild_advice(self) -> str:
        return f"build the store again with {self.command}"


BUILT_KINDS = {
    CORPUS_KIND: StoreKind(
        1,
        {"documents": "bin", "suffixes": "bin", "heads": "bin", "signposts": "bin", "shards": "bin"},
        command="hdtool build-corpus-db",
        options=("shard_bytes",),
    ),
    MODEL_KIND: StoreKind(
        2,
        {"record": "mdb", "slots": "bin", "keys": "bin", "rows": "bin", "heads": "bin", "phrases": "bin"},
        {"rankings": "bin"},
        "hdtool build-model-db",
        ("top_k", "per_key"),
    ),
}
"""Kinds of stores that are built from inputs."""
HISTORY = StoreKind(1, {"conversations": "mdb", "ring": "bin", "chains": "bin"})
"""Kind of a history store; see ``HistoryManifest``."""
KINDS = {**BUILT_KINDS, HISTORY_KIND: HISTORY}
