"""Processes that append to a history store."""

from __future__ import annotations

from pathlib import Path

from hdtool.runtime.stores.history_store import HistoryStore


def write(folder: Path, name: int, count: int, size: int) -> None:
    """Append answers that begin with a name and their number; a line is printed after each."""
    store = HistoryStore(folder)
    print("begun", flush=True)
    for number in range(count):
        assert store.append([name, number, *range(2, size)], [name])
        print(number, flush=True)
