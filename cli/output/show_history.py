"""What ``hdtool inspect`` shows of a history store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hdtool.data.errors import StoreError
from hdtool.data.stores.store_files import printable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokenize = Callable[[], tuple["PreTrainedTokenizerBase", list[int]]]
"""Loads the model's tokenizer; with the ids of the text to look up."""


def history_shown(folder: Path, tokenize: Tokenize | None, *, latency: bool, verify: bool) -> dict[str, Any]:
    """A history store as ``--json`` prints it."""
    from hdtool.data.stores.history_manifest import require_history
    from hdtool.data.stores.manifest import TokenizerFingerprint
    from hdtool.runtime.stores.history_store import HistoryStore
    from hdtool.runtime.stores.inspect_history import description, history_continuations, history_latency

    store = HistoryStore(folder)
    shown = description(store)
    if verify:
        shown["verified"] = _verified(store)
    if tokenize:
        tokenizer, ids = tokenize()
        require_history(store.manifest, folder, TokenizerFingerprint.of(tokenizer))
        shown["after"] = [
            {"matched": matched, "text": tokenizer.decode(path), "ids": path, "count": count}
            for matched, path, count in history_continuations(store, ids)
        ]
    return shown | (history_latency(store) if latency else {})


def _verified(store: Any) -> int:
    """The number of conversations, whose tokens are all as they were written."""
    held = store.conversations()
    whole = sum(1 for _ in store.answers(held))
    if whole < len(held):
        raise StoreError(
            f"{store.folder} is damaged ({len(held) - whole:,} of {len(held):,} conversations changed since they were "
            "written): delete it, or go on without them"
        )
    return whole


def history_in_words(shown: dict[str, Any]) -> list[str]:
    """The lines that only a history store has."""
    lines = [
        f"{shown['store']}: {shown['kind']} store, format {shown['format']}",
        f"model      {printable(shown['model'])}",
        f"tokenizer  {printable(shown['tokenizer'])}, {shown['vocab_size']:,} tokens",
        f"holds      {shown['entries']:,} conversations, {shown['tokens']:,} tokens",
        f"on disk    {shown['bytes']:,} bytes, at most {shown['options']['most_bytes']:,}",
    ]
    for row in shown["sources"]:
        spoken = f"{row['records']:,} conversations, {row['tokens']:,} tokens, {row['oldest']} to {row['newest']}"
        lines.append(f"source     {printable(row['name'])}: {spoken}")
    if "verified" in shown:
        lines.append(f"verified   all {shown['verified']:,} conversations are as they were written")
    return lines
