"""Print stores for the commands that build, list or show them, and open the inputs of builds."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from hdtool.cli.result_tables import as_columns, shortened
from hdtool.data.errors import StoreError
from hdtool.data.input_files import find_inputs
from hdtool.data.notes import tell
from hdtool.data.progress import abbreviated, count_of
from hdtool.data.record_counts import Tally
from hdtool.data.stores.kinds import CORPUS_KIND, MODEL_KIND
from hdtool.data.stores.manifest import Manifest, TokenizerFingerprint
from hdtool.data.stores.store_file_names import printable
from hdtool.runtime.settings.building import BuildConfig
from hdtool.runtime.settings.model import ModelConfig

if TYPE_CHECKING:
    from hdtool.builders.stores.local_executor import BuildExecutor
    from hdtool.data.documents import Document, InputFile
    from hdtool.data.stores.stores_at_home import StoredItem
    from hdtool.runtime.kernels.compiled import Ints
    from hdtool.runtime.stores.history_store import HistoryStore

TABLE_HEAD = ("name", "model", "tokenizer", "sources", "tokens", "size", "age")
MODEL_COLUMN, SOURCES_COLUMN = TABLE_HEAD.index("model"), TABLE_HEAD.index("sources")
MIN_CELL_WIDTH = 12
"""Smallest width to which a cell is cut, in characters."""
COLUMN_GAP = 2
AGE_UNITS = ((86400 * 365, "y"), (86400, "d"), (3600, "h"), (60, "min"))
UNNAMED_MODEL = {CORPUS_KIND: "any", MODEL_KIND: "unknown"}
"""What the model column shows, by kind of store, if the store names no model."""
MAX_SHOWN_SOURCES = 12
"""Maximum number of sources that ``inspect`` lists, so that the description fits on a screen."""


def store_table(items: list[StoredItem], home: str) -> str:
    """Format a table of stores; on a terminal, cells are cut so that the rows fit its width."""
    if not items:
        return f"{home} holds no stores: hdtool build-model-db and hdtool build-corpus-db make them"
    rows = [TABLE_HEAD, *(_cells(item) for item in items)]
    if sys.stdout.isatty():
        rows = _fitted(rows, shutil.get_terminal_size().columns)
    faults = [f"\n{item.name}: {item.fault}" for item in items if item.fault]
    unnamed = [item for item in items if item.kind == MODEL_KIND and not item.model and not item.fault]
    advice = [
        f"\n{item.name} names no model, so none finds it: hdtool build-model-db MODEL --from {item.folder}"
        for item in unnamed
    ]
    total = f"\n{len(items)} in {home}, {abbreviated(sum(item.bytes for item in items))}B in total"
    return as_columns(rows, left=4, gap=COLUMN_GAP) + "".join(faults + advice) + total


def store_in_words(item: StoredItem) -> str:
    """Return one line with the store's name, kind, model, size and folder."""
    whose = f" of {printable(item.model.name)}" if item.model else ""
    tokens = f", {count_of(item.tokens, 'token')}" if item.tokens is not None else ""
    return f"{item.name}: {item.kind}{whose}{tokens}, {abbreviated(item.bytes)}B in {item.folder}"


def store_record(item: StoredItem) -> dict[str, Any]:
    """Return the record of a store in the ``--json`` output of ``hdtool stores``."""
    shown = asdict(item)
    del shown["shared_name"]  # only used to reject ambiguous names
    return {**shown, "folder": str(item.folder), "age": round(time.time() - item.changed)}


def age_in_words(seconds: float) -> str:
    for size, unit in AGE_UNITS:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return "now"


def _cells(item: StoredItem) -> tuple[str, ...]:
    model = printable(item.model.name) if item.model else UNNAMED_MODEL.get(item.kind, "")
    sources = [printable(PurePath(share.name).name) for share in item.sources]
    shown = ", ".join(sources[:1]) + (f" +{len(sources) - 1}" if len(sources) > 1 else "")
    return (
        item.name,
        model,
        (item.tokenizer or "")[:8],
        "cannot be opened" if item.fault else shown,
        "" if item.tokens is None else abbreviated(item.tokens),
        f"{abbreviated(item.bytes)}B",
        age_in_words(time.time() - item.changed),
    )


def _fitted(rows: list[tuple[str, ...]], width: int) -> list[tuple[str, ...]]:
    """Shorten the names of models, then those of sources, so that the rows fit the width."""
    for place in (MODEL_COLUMN, SOURCES_COLUMN):
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        excess = sum(widths) + COLUMN_GAP * (len(widths) - 1) - width
        if excess > 0:
            max_width = max(MIN_CELL_WIDTH, widths[place] - excess)
            rows = [(*row[:place], shortened(row[place], max_width), *row[place + 1 :]) for row in rows]
    return rows


def verify_conversations(store: HistoryStore) -> int:
    """Check a history store's conversations and return their number; raise StoreError if any is damaged."""
    held = store.conversations()
    intact = [each for each, _ in store.answers(held)]
    if len(intact) < len(held):
        # Another process may have replaced the oldest conversations since they were listed.
        damaged = set(held).difference(intact).intersection(store.conversations())
        if damaged:
            raise StoreError(
                f"{store.folder} is damaged ({len(damaged):,} of {len(held):,} conversations changed since they were "
                "written): delete it, or go on without them"
            )
    return len(intact)


def history_in_words(shown: dict[str, Any]) -> list[str]:
    """Format the description of a history store as lines."""
    lines = [
        f"{shown['store']}: {shown['kind']} store, format {shown['format']}",
        f"model      {printable(shown['model'])}",
        f"tokenizer  {printable(shown['tokenizer'])}, {shown['vocab_size']:,} tokens",
        f"holds      {count_of(shown['entries'], 'conversation')}, {count_of(shown['tokens'], 'token')}",
        f"on disk    {shown['bytes']:,} bytes, at most {shown['options']['most_bytes']:,}",
    ]
    lines += source_lines(shown["sources"], _conversations_in_words)
    if "verified" in shown:
        lines.append(f"verified   {count_of(shown['verified'], 'conversation')}, as written")
    return lines


def _conversations_in_words(row: dict[str, Any]) -> str:
    held = f"{count_of(row['records'], 'conversation')}, {count_of(row['tokens'], 'token')}"
    return f"{printable(row['name'])}: {held}, {row['oldest']} to {row['newest']}"


def source_lines(rows: Sequence[dict[str, Any]], in_words: Callable[[dict[str, Any]], str]) -> list[str]:
    """Return a line for each of the first ``MAX_SHOWN_SOURCES`` sources, and one that counts the others."""
    lines = [f"source     {in_words(row)}" for row in rows[:MAX_SHOWN_SOURCES]]
    if others := rows[MAX_SHOWN_SOURCES:]:
        held = count_of(sum(row["tokens"] for row in others), "token")
        lines.append(f"           and {len(others):,} more, {held}: --json lists them")
    return lines


@contextmanager
def executor_for(config: BuildConfig) -> Iterator[BuildExecutor]:
    """Yield the build executor that the settings select, and close it on exit."""
    if config.engine == "local":
        from hdtool.builders.stores.local_executor import BuildExecutor

        yield BuildExecutor(config.workers)
        return
    from hdtool.builders.stores.ray_executor import ray_executor

    with ray_executor(config.address, config.workers) as executor:
        yield executor


@contextmanager
def open_documents(
    inputs: list[str],
    tokenizer: Any,
    fingerprint: TokenizerFingerprint,
    executor: BuildExecutor,
    kind: str,
    tolerance: float,
    *,
    on_models: Callable[[Mapping[str, int]], str | None] | None = None,
) -> Iterator[tuple[list[InputFile], Iterator[Document]]]:
    """Yield ``(sources, documents)`` of the inputs; iterating over the documents of files shows a progress bar.

    On exit, print the records that could not be used and, if ``on_models`` returns one, a note on the models that the
    records name.
    """
    from hdtool.builders.stores.edit_store import HistoryDocuments, history_folders
    from hdtool.data.texts_and_traces import RecordReader

    folders, others = history_folders(inputs)
    history = HistoryDocuments(folders, fingerprint)
    if not others:
        yield history.sources, iter(history)
        return
    source = RecordReader(find_inputs(others), answers_only=kind == MODEL_KIND, tolerance=tolerance)
    executor.prepare(source)
    documents = history.with_others(executor.documents(source, tokenizer))
    yield [*history.sources, *source.sources], documents
    print_left_out(source.tally)
    if on_models and (note := on_models(source.tally.models)):
        tell(note)


def rankings_for(loading: ModelConfig, tokenizer: TokenizerFingerprint) -> Ints:
    """Load the model, and return the tokens that it ranks highest after each token of its vocabulary."""
    from hdtool.builders.stores.build_stores import vocabulary_rankings
    from hdtool.runtime.target.load import load

    return vocabulary_rankings(load(loading), tokenizer.vocab_size)


def print_left_out(tally: Tally, tolerance: float = 1.0) -> None:
    """Print the records that could not be used; raise RecordError if their share exceeds the tolerance."""
    tally.check(tolerance)
    tell(*tally.left_out())


def print_built(folder: Path, manifest: Manifest, *, as_json: bool) -> None:
    """Print the store that a command built, as text or as JSON."""
    if as_json:
        print(json.dumps(store_description(folder, manifest), ensure_ascii=False))
        return
    whose = f" of {manifest.model.label}" if manifest.model else ""
    print(f"{folder}: {manifest.kind} store{whose}, {counts_in_words(manifest.counts)}, {manifest.bytes:,} bytes")


def counts_in_words(counts: Mapping[str, int]) -> str:
    """Format a store's counts, whose keys must be plurals, as a list such as "2 documents, 1 token"."""
    return ", ".join(count_of(count, name.removesuffix("s")) for name, count in counts.items())


def store_description(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Return the ``--json`` record of a store that was built or inspected."""
    return {
        "store": str(folder),
        "kind": manifest.kind,
        "format": manifest.format,
        "tokenizer": manifest.tokenizer.fingerprint,
        "vocab_size": manifest.tokenizer.vocab_size,
        "model": asdict(manifest.model) if manifest.model else None,
        "tokens": manifest.counts["tokens"],
        "entries": manifest.counts.get("continuations", manifest.counts["tokens"]),
        "bytes": manifest.bytes,
        "counts": manifest.counts,
        "options": manifest.options,
        "sources": [asdict(share) for share in manifest.sources],
        "files": {part: asdict(file) for part, file in manifest.files.items()},
    }
