"""Measures what a corpus index costs, by size: ``python -m tests.benchmarks.corpus_scale --corpus FILE``.

Larger corpora are synthetic with natural statistics: a walk over the real corpus that jumps, every 20 tokens on
average, to a random other place with the same last two tokens. Thus all trigrams are natural, and longer sequences
repeat as often as in text twenty times as large. A document ends where a document of the real corpus ends.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from hdtool.builders.stores.build_stores import build_corpus_index
from hdtool.builders.stores.frequent_sequences import tokenized
from hdtool.builders.stores.local_executor import BuildExecutor
from hdtool.data.documents import Document, InputFile, stored_documents
from hdtool.data.stores.manifest import TokenizerFingerprint
from hdtool.data.texts_and_traces import RecordReader
from hdtool.runtime.kernels.machine_name import machine
from hdtool.runtime.settings.building import BuildConfig
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.stores.corpus_index import CorpusIndex
from hdtool.runtime.stores.suffix_search import find_longest, shards_at
from hdtool.runtime.target.load import load_tokenizer
from tests.benchmarks.laboratory import Table, parser_of
from tests.benchmarks.scale import look_up_times

JUMP_EVERY = 20
Tokens = npt.NDArray[Any]


@njit(cache=True)
def walk(tokens: Tokens, addresses: Tokens, end: int, out: Tokens, seed: int) -> None:
    """Fill ``out`` with a random walk over the corpus."""
    np.random.seed(seed)
    shards = shards_at(tokens, addresses)
    at = int(np.random.randint(len(tokens) - 1))
    pair = np.empty(2, np.int64)
    for place in range(len(out)):
        token = tokens[at]
        out[place] = token
        if token == end or at + 1 >= len(tokens):
            at = np.random.randint(len(tokens) - 1)
            continue
        at += 1
        if np.random.randint(JUMP_EVERY) == 0 and tokens[at - 1] != end and tokens[at] != end:
            pair[0], pair[1] = tokens[at - 1], tokens[at]
            known, ranges = find_longest(shards, pair)
            if known == 2:
                at = int(shards.suffixes[np.random.randint(ranges[0, 0], ranges[0, 1])]) + 1
    out[len(out) - 1] = end


def synthetic(index: CorpusIndex, size: int) -> Iterator[Document]:
    """Yield documents of about ``size`` tokens in total, generated in pieces to bound memory."""
    piece = 1 << 22
    for number, start in enumerate(range(0, size, piece)):
        out = np.empty(min(piece, size - start), index.tokens.dtype)
        walk(index.tokens, index.addresses, index.end, out, number)
        yield from (Document(ids) for ids in stored_documents(out, index.end))


def measure(real: str, size: int, place: str, mark: TokenizerFingerprint, shard_bytes: int, conn: Any) -> None:
    """Build and query an index of one size, and send the figures; a new process runs this, for its memory peak."""
    index = CorpusIndex(Path(real))
    folder = Path(place) / f"{size}"
    started = time.perf_counter()
    walked = synthetic(index, size)
    made = build_corpus_index(
        folder, walked, mark, [InputFile("walk", "0")], shard_bytes=shard_bytes, executor=BuildExecutor(1)
    )
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    speed = np.percentile(look_up_times(folder), (50, 99)).tolist()
    shutil.rmtree(folder)
    conn.send((made.counts["tokens"], seconds, peak, made.bytes / made.counts["tokens"], *speed))


def plot(rows: list[tuple[float, ...]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 4, figsize=(14, 3.2), layout="constrained")
    names = ("build, seconds", "peak memory, GiB", "bytes a token", "look-up, µs (p50, p99)")
    for axis, name, columns in zip(axes, names, ((1,), (2,), (3,), (4, 5)), strict=True):
        for column in columns:
            axis.plot([row[0] / 1e6 for row in rows], [row[column] for row in rows], "o-")
        axis.set(title=name, xlabel="million tokens", xscale="log")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def build_real_index(folder: Path, corpus: Path, model: str | None) -> TokenizerFingerprint:
    """Build the index of a corpus, from which larger ones are drawn; return the tokenizer's fingerprint."""
    tokenizer = load_tokenizer(ModelConfig(model))
    mark, reading = TokenizerFingerprint.of(tokenizer), RecordReader([corpus])
    build_corpus_index(folder, tokenized(reading, tokenizer), mark, reading.sources)
    return mark


def parser_of_sizes(description: str | None, millions: list[int]) -> argparse.ArgumentParser:
    parser = parser_of(description, model=None, millions=millions)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--vocabulary", type=int, help="store ids as for a tokenizer with so many tokens")
    return parser


def main() -> None:
    parser = parser_of_sizes(__doc__, [1, 3, 10, 30, 100, 200])
    parser.add_argument("--shard-bytes", type=int, default=BuildConfig.shard_bytes)
    parser.add_argument("--plot", type=Path, default=Path("docs/benchmarks/corpus-scale.png"))
    options = parser.parse_args()
    print(machine() + "\n")
    with tempfile.TemporaryDirectory() as place:
        mark = build_real_index(Path(place) / "real", options.corpus, options.model)
        mark = replace(mark, vocab_size=options.vocabulary or mark.vocab_size)
        rows = []
        heads = "walk and build, s", "peak memory, GiB", "bytes a token", "p50, µs", "p99, µs"
        table = Table("million tokens", *heads)
        for millions in options.millions:
            context = multiprocessing.get_context("spawn")
            end, sent = context.Pipe()
            arguments = (str(Path(place) / "real"), millions * 1_000_000, place, mark, options.shard_bytes, sent)
            worker = context.Process(target=measure, args=arguments)
            worker.start()
            rows.append(end.recv())
            worker.join()
            tokens, seconds, peak, size, p50, p99 = rows[-1]
            table.row(f"{tokens / 1e6:.0f}", f"{seconds:.1f}", f"{peak:.2f}", f"{size:.3f}", p50, p99)
    plot(rows, options.plot)


if __name__ == "__main__":
    main()
