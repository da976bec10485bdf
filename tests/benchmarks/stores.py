"""Measures what stores cost: building, opening and lookups, compared with REST's retriever if it is installed.

``python -m tests.benchmarks.stores --corpus FILE --generations FILE --traces FILE --model FOLDER`` prints the figures
in docs/benchmarks/stores.md; ``pip install draftretriever==0.1.1`` adds REST. Contexts are the last 16 tokens at every
third position of the traces, which neither store has seen.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from hdtool.builders.stores.build_stores import build_corpus_index, build_model_store
from hdtool.builders.stores.frequent_sequences import tokenized
from hdtool.data.documents import Document
from hdtool.data.stores.manifest import TokenizerFingerprint
from hdtool.data.texts_and_traces import RecordReader
from hdtool.runtime.kernels.machine_name import machine
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.stores.corpus_index import CorpusIndex
from hdtool.runtime.stores.model_store import ModelStore
from hdtool.runtime.target.load import load_tokenizer
from tests.benchmarks.laboratory import Table, parser_of, seconds_of

WARM_UP = 200


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = action()
    return time.perf_counter() - started, result


def percentiles(lookup: Callable[[Any], Any], contexts: list[Any]) -> list[str]:
    for context in contexts[:WARM_UP]:
        lookup(context)
    taken = [1e6 * seconds_of(partial(lookup, context)) for context in contexts]
    return [f"{np.percentile(taken, part):.1f}" for part in (50, 99)]


def documents_of(path: Path, tokenizer: Any, *, answers_only: bool) -> tuple[float, list[Document], RecordReader]:
    reading = RecordReader([path], answers_only=answers_only)
    seconds, documents = timed(lambda: list(tokenized(reading, tokenizer)))
    return seconds, documents, reading


def contexts_of(traces: Path, tokenizer: Any, limit: int) -> list[list[int]]:
    contexts = []
    for line in traces.read_text().splitlines():
        text = "\n".join(message["content"] for message in json.loads(line)["messages"])
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        contexts += [ids[at - 16 : at] for at in range(16, len(ids), 3)]
    return contexts[:limit]


def opening(folder: str, conn: Any) -> None:
    """Send the time and memory of opening an index, measured in a process that has loaded the libraries."""
    process = psutil.Process()
    before = process.memory_info().rss
    seconds, index = timed(lambda: CorpusIndex(Path(folder)))
    grown = process.memory_info().rss - before
    for place in range(0, len(index.tokens) - 16, len(index.tokens) // 500):
        index.after(index.tokens[place : place + 16])
    memory = process.memory_full_info()
    conn.send((seconds, grown, memory.pss, memory.uss))


def rest(documents: list[Document], vocab_size: int, contexts: list[list[int]], folder: Path) -> list[str]:
    """Measure REST with the settings of its own code: suffixes of 16 down to 2 tokens, 5,000 matches, 64 nodes."""
    import draftretriever

    path = str(folder / "rest.idx")

    def write() -> None:
        writer = draftretriever.Writer(path, vocab_size=vocab_size)
        for document in documents:
            writer.add_entry(list(document.ids))
        writer.finalize()

    seconds, _ = timed(write)
    reader = draftretriever.Reader(path)

    def search(context: list[int]) -> None:
        for length in range(16, 1, -1):
            if reader.search(context[-length:], k=5000, choices=64, long=10)[0]:
                return

    size = Path(path).stat().st_size
    tokens = sum(len(document.ids) for document in documents)
    return [f"{seconds:.1f}", f"{size / tokens:.2f}", *percentiles(search, contexts)]


def lmdb_lookup(store: ModelStore) -> Callable[[list[int]], Any]:
    """Return a lookup in the LMDB file: all four prefix lengths, with unpacked values."""
    import lmdb
    import msgpack

    path = store.folder / store.manifest.files["record"].name
    reader = lmdb.open(str(path), subdir=False, readonly=True, lock=False).begin()

    def lookup(context: list[int]) -> list[Any]:
        keys = (
            bytes([length]) + b"".join(token.to_bytes(4, "big") for token in context[-length:])
            for length in (4, 3, 2, 1)
        )
        return [msgpack.unpackb(value) for value in map(reader.get, keys) if value is not None]

    return lookup


def main() -> None:
    parser = parser_of(__doc__, model=None, contexts=3000)
    for name in ("corpus", "generations", "traces"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    options = parser.parse_args()
    tokenizer = load_tokenizer(ModelConfig(options.model))
    mark = TokenizerFingerprint.of(tokenizer)
    contexts = contexts_of(options.traces, tokenizer, options.contexts)
    print(machine(), f"; {len(contexts)} contexts\n")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        reading_time, documents, reading = documents_of(options.corpus, tokenizer, answers_only=False)
        build_corpus_index(folder / "warm", documents[:50], mark, reading.sources)  # warm-up: compiles
        seconds, made = timed(lambda: build_corpus_index(folder / "corpus", documents, mark, reading.sources))
        index = CorpusIndex(folder / "corpus")
        print(f"{made.counts['tokens']:,} tokens, read and tokenized in {reading_time:.1f} s\n")
        table = Table("corpus", "indexing, s", "bytes a token", "lookup p50, µs", "p99, µs")
        size = made.bytes / made.counts["tokens"]
        arrays = [np.array(context) for context in contexts]
        table.row("hdtool", f"{seconds:.1f}", f"{size:.2f}", *percentiles(index.after, arrays))
        try:
            table.row("REST's draftretriever", *rest(documents, mark.vocab_size, contexts, folder))
        except ImportError:
            table.row("REST's draftretriever", "not installed", "", "", "")
        reading_time, answers, reading = documents_of(options.generations, tokenizer, answers_only=True)
        build_model_store(folder / "warm-model", answers[:50], mark, reading.sources)
        seconds, made = timed(lambda: build_model_store(folder / "model", answers, mark, reading.sources))
        store = ModelStore(folder / "model")
        print()
        table = Table("model store", "reading and tokenizing, s", "mining, s", "MB", "lookup p50, µs", "p99, µs")
        spent = f"{reading_time:.2f}", f"{seconds:.2f}", f"{made.bytes / 1e6:.1f}"
        table.row(f"{made.counts['tokens']:,} tokens", *spent, *percentiles(store.after, arrays))
        table.row("LMDB and msgpack instead", "", "", "", *percentiles(lmdb_lookup(store), contexts))
        print()
        table = Table(
            "process", "opening, ms", "resident before the first lookup, MiB", "proportional, MiB", "own, MiB"
        )
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(4)]
        workers = [context.Process(target=opening, args=(str(folder / "corpus"), pipe[1])) for pipe in pipes]
        for worker in workers:
            worker.start()
        for number, (end, _) in enumerate(pipes, start=1):
            seconds, grown, pss, uss = end.recv()
            memory = f"{grown / 2**20:.1f}", f"{pss / 2**20:.0f}", f"{uss / 2**20:.0f}"
            table.row(number, f"{seconds * 1e3:.1f}", *memory)
        for worker in workers:
            worker.join()


if __name__ == "__main__":
    main()
