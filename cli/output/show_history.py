"""What ``hdtool inspect`` shows of a history store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hdtool.data.errors import StoreError
from hdtool.data.stores.store_files import printable
from hdtool.data.tally import counted

if TYPE_CHECKING:
    from hdtool.runtime.stores.history.history_store import HistoryStore


def verified(store: HistoryStore) -> int:
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
        f"holds      {counted(shown['entries'], 'conversation')}, {counted(shown['tokens'], 'token')}",
        f"on disk    {shown['bytes']:,} bytes, at most {shown['options']['most_bytes']:,}",
    ]
    for row in shown["sources"]:
        held = f"{counted(row['records'], 'conversation')}, {counted(row['tokens'], 'token')}"
        spoken = f"{held}, {row['oldest']} to {row['newest']}"
        lines.append(f"source     {printable(row['name'])}: {spoken}")
    if "verified" in shown:
        lines.append(f"verified   {counted(shown['verified'], 'conversation')}, as written")
    return lines
