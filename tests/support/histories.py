"""Append to a history store from other processes."""

from __future__ import annotations

from pathlib import Path

from hdtool.runtime.stores.history_store import HistoryStore


def write(folder: Path, name: int, count: int, size: int) -> None:
    """Append answers that begin with ``name`` and their number. Prints a line before the first and after each."""
    store = HistoryStore(folder)
    print("begun", flush=True)
    for number in range(count):
        assert store.append([name, number, *range(2, size)], [name])
        print(number, flush=True)
