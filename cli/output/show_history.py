"""A history store in words, as ``hdtool inspect`` shows it."""

from __future__ import annotations

from typing import Any

from hdtool.data.stores.store_files import printable


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
