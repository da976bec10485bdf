"""The table of what hdtool's home holds."""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import asdict
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from hdtool.cli.output.tables import table
from hdtool.data.stores.store_files import printable
from hdtool.data.tally import counted

if TYPE_CHECKING:
    from hdtool.data.stores.inventory import StoredItem

HEAD = ("name", "model", "tokenizer", "sources", "tokens", "size", "age")
MODEL, SOURCES = HEAD.index("model"), HEAD.index("sources")
LEAST = 12
"""Columns of a cut cell."""
GAP = 2
UNITS = ((86400 * 365, "y"), (86400, "d"), (3600, "h"), (60, "min"))
ANY = "any"
"""The model of a corpus index."""
UNKNOWN = "unknown"
"""The model of a store that does not name one."""


def listed(items: list[StoredItem], home: str) -> str:
    """A table that fits a terminal, and is whole where there is none."""
    if not items:
        return f"{home} holds no stores: hdtool build-model-db and hdtool build-corpus-db make them"
    rows = [HEAD, *(_cells(item) for item in items)]
    if sys.stdout.isatty():
        rows = _fitted(rows, shutil.get_terminal_size().columns)
    faults = [f"\n{item.name}: {item.fault}" for item in items if item.fault]
    unnamed = [item for item in items if item.kind == "model" and not item.model and not item.fault]
    advice = [
        f"\n{item.name} names no model, so none finds it: hdtool build-model-db --model MODEL --from {item.folder}"
        for item in unnamed
    ]
    total = f"\n{len(items)} in {home}, {amount(sum(item.bytes for item in items))}B in total"
    return table(rows, left=4, gap=GAP) + "".join(faults + advice) + total


def in_words(item: StoredItem) -> str:
    """One line about a store."""
    whose = f" of {printable(item.model.name)}" if item.model else ""
    tokens = f", {counted(item.tokens, 'token')}" if item.tokens is not None else ""
    return f"{item.name}: {item.kind}{whose}{tokens}, {amount(item.bytes)}B in {item.folder}"


def as_row(item: StoredItem) -> dict[str, Any]:
    """A store as ``--json`` prints it."""
    shown = asdict(item)
    del shown["shared_name"]  # serves to refuse it
    return {**shown, "folder": str(item.folder), "age": round(time.time() - item.changed)}


def amount(number: int) -> str:
    """Three digits with a prefix: 1.2M."""
    value, prefix = float(number), ""
    for larger in "kMGT":
        if value < 999.5:
            break
        value, prefix = value / 1000, larger
    return f"{value:.0f}{prefix}" if value >= 9.95 or not prefix else f"{value:.1f}{prefix}"


def age(seconds: float) -> str:
    for size, unit in UNITS:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return "now"


def _cells(item: StoredItem) -> tuple[str, ...]:
    model = printable(item.model.name) if item.model else {"corpus": ANY, "model": UNKNOWN}.get(item.kind, "")
    sources = [printable(PurePath(share.name).name) for share in item.sources]
    shown = ", ".join(sources[:1]) + (f" +{len(sources) - 1}" if len(sources) > 1 else "")
    return (
        item.name,
        model,
        (item.tokenizer or "")[:8],
        "cannot be opened" if item.fault else shown,
        "" if item.tokens is None else amount(item.tokens),
        f"{amount(item.bytes)}B",
        age(time.time() - item.changed),
    )


def _fitted(rows: list[tuple[str, ...]], width: int) -> list[tuple[str, ...]]:
    """The rows with the models and then the sources cut as far as a line is too long."""
    for place in (MODEL, SOURCES):
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        excess = sum(widths) + GAP * (len(widths) - 1) - width
        if excess > 0:
            most = max(LEAST, widths[place] - excess)
            rows = [(*row[:place], _cut(row[place], most), *row[place + 1 :]) for row in rows]
    return rows


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
