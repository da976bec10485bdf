"""Estimates the cost of corpora far larger than this machine: ``python -m tests.benchmarks.scale --corpus FILE``.

Measures three things on a real corpus: the time to read, tokenize and sort it, the time of a lookup by the number of
shards, and the number of disk pages that a lookup touches when nothing is in memory. From these, the cost of corpora of
up to a trillion tokens is extrapolated. Times are CPU seconds, which other processes disturb little.
"""

from __future__ import annotations

import argparse
import mmap
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hdtool.builders.stores.build_stores import build_corpus_index
from hdtool.builders.stores.frequent_sequences import tokenized
from hdtool.builders.stores.local_executor import BuildExecutor
from hdtool.builders.stores.suffix_array import SORT_MEMORY_FACTOR
from hdtool.data.documents import Document, InputFile
from hdtool.data.stores.manifest import TokenizerFingerprint
from hdtool.data.texts_and_traces import RecordReader
from hdtool.runtime.kernels.machine_name import machine
from hdtool.runtime.settings.building import BuildConfig
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.stores.corpus_index import MAX_CONTEXT_TOKENS, CorpusIndex
from hdtool.runtime.target.load import load_tokenizer
from tests.benchmarks.laboratory import Table, parser_of

LOOK_UPS, FRESH = 3000, 60
GROWN = 1.7
"""Ratio of lookup times in 199 million and in 10 million tokens, from docs/benchmarks/stores.md."""
SIZES = (10**9, 10**10, 10**11, 10**12)
NAMES = ("1 billion", "10 billion", "100 billion", "1 trillion")
Floats = npt.NDArray[np.float64]


class Slopes(NamedTuple):
    """Measured costs."""

    read: float
    """CPU microseconds per token for reading and tokenizing."""
    sort: float
    """CPU microseconds per token for sorting, in shards of the measured size."""
    bytes_a_token: float
    first_shard: float
    """Median microseconds of a lookup."""
    each_shard: float
    pages: float
    """Number of 4 KiB pages that a lookup in one shard reads when nothing is in memory."""


def contexts(index: CorpusIndex, count: int, seed: int) -> list[npt.NDArray[np.int64]]:
    """Return random token sequences of the corpus with one token replaced, as in ``inspect --latency``."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        at = int(rng.integers(0, len(index.tokens) - MAX_CONTEXT_TOKENS))
        context = np.array(index.tokens[at : at + MAX_CONTEXT_TOKENS], np.int64)
        context[-int(rng.integers(2, 9))] = rng.integers(index.end)
        found.append(context)
    return found


def look_up_times(folder: Path) -> Floats:
    index = CorpusIndex(folder)
    taken = []
    for number, context in enumerate(contexts(index, LOOK_UPS + 200, 0)):
        started = time.thread_time()
        index.after(context)
        if number >= 200:
            taken.append(1e6 * (time.thread_time() - started))
    return np.array(taken)


def cold_pages(folder: Path, places: list[list[int]]) -> float:
    """Return the mean number of pages that a lookup reads from disk when no page of the files is in memory."""
    index = CorpusIndex(folder)
    index.after([1, 2, 3])  # loads the compiled code
    paths = [folder / file.name for file in index.manifest.files.values()]
    read = []
    for context in places:
        del index
        for path in paths:
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        index = CorpusIndex(folder)
        for array in index.shards[:4]:
            base: Any = array
            while not isinstance(base, mmap.mmap):
                base = base.base if isinstance(base, np.ndarray) else base.obj
            base.madvise(mmap.MADV_RANDOM)  # disables read-ahead
        before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        index.after(context)
        read.append(resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before)
    return float(np.mean(read))


def cold_in_a_process(folder: Path) -> float:
    """Run ``cold_pages`` in a new process, because pages mapped by this one would stay in memory."""
    return float(subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.scale", "--cold", str(folder)],
        check=True, capture_output=True, text=True,
    ).stdout)  # fmt: skip


def cpu_seconds() -> float:
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def measure(corpus: Path, model: str | None, shards: list[int], place: Path) -> Slopes:
    tokenizer = load_tokenizer(ModelConfig(model))
    mark, reading = TokenizerFingerprint.of(tokenizer), RecordReader([corpus])
    started = cpu_seconds()
    documents = list(tokenized(reading, tokenizer))
    read = cpu_seconds() - started
    tokens = sum(len(document.ids) for document in documents)
    print(f"{tokens:,} tokens, read and tokenized in {read:.1f} s of a core, {1e6 * read / tokens:.2f} µs a token\n")
    heads = "sorting, s of a core", "bytes a token", "look-up p50, µs", "p99, µs", "pages a cold look-up"
    table = Table("shards", *heads)
    # Warm-up: compiles the kernels.
    build_corpus_index(place / "first", documents[:50], mark, [InputFile("a", "")], executor=BuildExecutor(1))
    times, pages, sort, size = {}, {}, 0.0, 0.0
    for wanted in shards:
        folder, width = place / str(wanted), 2 if mark.vocab_size < 2**16 else 4
        shard_bytes = min(1 << 30, int(width * 1.02 * (tokens + len(documents)) / wanted) + 4096)
        seconds, made = sorted_in(folder, documents, mark, shard_bytes)
        count = made.counts["shards"]
        times[count], pages[count] = look_up_times(folder), cold_in_a_process(folder)
        if count == 1:
            sort, size = 1e6 * seconds / tokens, made.bytes / tokens
        p50, p99 = np.percentile(times[count], (50, 99))
        cells = f"{seconds:.1f}", f"{made.bytes / tokens:.2f}", f"{p50:.1f}", f"{p99:.1f}", f"{pages[count]:.0f}"
        table.row(count, *cells)
    medians = [float(np.median(times[count])) for count in times]
    each, first = np.polyfit(list(times), medians, 1)
    return Slopes(1e6 * read / tokens, sort, size, float(first + each), float(each), pages[min(pages)])


def sorted_in(
    folder: Path, documents: list[Document], mark: TokenizerFingerprint, shard_bytes: int
) -> tuple[float, Any]:
    started = cpu_seconds()
    executor = BuildExecutor(1)
    made = build_corpus_index(folder, documents, mark, [InputFile("a", "")], shard_bytes=shard_bytes, executor=executor)
    return cpu_seconds() - started, made


def project(slopes: Slopes, cores: int, disk: float) -> None:
    tokens_a_shard = BuildConfig.shard_bytes // 2
    print(f"\nProjected, in shards of {tokens_a_shard / 1e6:.0f} million tokens, {cores} cores, {disk:.0f} µs a page\n")
    heads = "disk, GB", "memory of a sort, GiB", "build, hours", "look-up, µs", "cold, ms"
    table = Table("tokens", "shards", *heads)
    for name, tokens in zip(NAMES, SIZES, strict=True):
        shards = -(-tokens // tokens_a_shard)
        memory = SORT_MEMORY_FACTOR * min(BuildConfig.shard_bytes, 2 * tokens) / 2**30
        hours = tokens * (slopes.read + slopes.sort) / 1e6 / 3600 / cores
        look_up = GROWN * (slopes.first_shard + slopes.each_shard * (shards - 1))
        cold = shards * slopes.pages * disk / 1e3
        disk_gb = tokens * slopes.bytes_a_token / 1e9
        times = f"{hours:,.2f}", f"{look_up:,.0f}", f"{cold:,.1f}"
        table.row(name, f"{shards:,}", f"{disk_gb:,.0f}", f"{memory:.1f}", *times)


def main() -> None:
    parser = parser_of(__doc__, model=None, shards=[1, 2, 4, 8, 16, 32, 64], page=100.0, cores=16)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--cold", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cold:
        index = CorpusIndex(options.cold)
        asked = contexts(index, FRESH, 1)
        del index
        print(cold_pages(options.cold, [context.tolist() for context in asked]))
        return
    print(machine() + "\n")
    with tempfile.TemporaryDirectory() as place:
        slopes = measure(options.corpus, options.model, options.shards, Path(place))
    print("\n" + ", ".join(f"{name} {value:.3g}" for name, value in slopes._asdict().items()))
    project(slopes, options.cores, options.page)


if __name__ == "__main__":
    main()
