"""Output of the commands that build or show stores."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hdtool.data.inputs import find_inputs
from hdtool.data.progress import bar
from hdtool.data.stores.store import Manifest, TokenizerFingerprint
from hdtool.data.tally import Tally, counted
from hdtool.runtime.config import BuildConfig, ModelConfig

if TYPE_CHECKING:
    from hdtool.builders.stores.engine import Engine
    from hdtool.data.stores.documents import Document, Source
    from hdtool.runtime.stores.model_store import Ints


@contextmanager
def engine_for(config: BuildConfig, *, quiet: bool) -> Iterator[Engine]:
    """The build backend, open for the length of a build."""
    if config.engine == "local":
        from hdtool.builders.stores.engine import LocalEngine

        yield LocalEngine(config.workers, quiet=quiet)
        return
    from hdtool.builders.stores.ray_engine import ray_engine

    with ray_engine(config.address, config.workers, quiet=quiet) as engine:
        yield engine


@contextmanager
def reading(
    inputs: list[str],
    tokenizer: Any,
    fingerprint: TokenizerFingerprint,
    engine: Engine,
    kind: str,
    tolerance: float,
    *,
    quiet: bool,
    on_models: Callable[[Mapping[str, int]], str | None] | None = None,
) -> Iterator[tuple[list[Source], Iterator[Document]]]:
    """The sources of inputs for a kind of store, and their documents, which are read with a progress bar.

    At the end, what could not be used is printed, and a note on the models that the records name.
    """
    from hdtool.builders.stores.history_documents import HistoryDocuments, history_folders
    from hdtool.data.records import Reading

    folders, others = history_folders(inputs)
    history = HistoryDocuments(folders, fingerprint)
    if not others:
        yield history.sources, iter(history)
        return
    source = Reading(find_inputs(others), answers_only=kind == "model", tolerance=tolerance)
    with bar(source.total_bytes, "reading", unit="B", quiet=quiet) as shown:
        engine.prepare(source)
        documents = history.with_others(engine.documents(source, tokenizer, shown))
        yield [*history.sources, *source.sources], documents
    print_left_out(source.tally)
    if on_models and (note := on_models(source.tally.models)):
        print(note, file=sys.stderr)


def rankings_for(loading: ModelConfig, tokenizer: TokenizerFingerprint, *, quiet: bool) -> Ints:
    """What a model ranks highest after each token of its vocabulary."""
    from hdtool.builders.stores.vocabulary_rankings import vocabulary_rankings
    from hdtool.runtime.model.load import load

    return vocabulary_rankings(load(loading), tokenizer.vocab_size, quiet=quiet)


def print_left_out(tally: Tally, tolerance: float = 1.0) -> None:
    """Print the records that cannot be used; more than the tolerance allows are an error."""
    tally.check(tolerance)
    for line in tally.left_out():
        print(line, file=sys.stderr)


def report(folder: Path, manifest: Manifest, *, as_json: bool) -> None:
    """Print what a command built."""
    if as_json:
        print(json.dumps(description(folder, manifest), ensure_ascii=False))
        return
    whose = f" of {manifest.model.label}" if manifest.model else ""
    print(f"{folder}: {manifest.kind} store{whose}, {in_words(manifest.counts)}, {manifest.bytes:,} bytes")


def in_words(counts: Mapping[str, int]) -> str:
    """What a store holds; the names of its counts are plurals."""
    return ", ".join(counted(count, name.removesuffix("s")) for name, count in counts.items())


def description(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """A store as ``--json`` prints it; names stay as they are once they have shipped."""
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
