"""Measures what a model store costs, by size: ``python -m tests.benchmarks.model_store_scale --corpus FILE``.

The answers are the synthetic documents of ``corpus_scale``. Times are CPU seconds of counting and writing, without
reading and tokenizing. Larger stores take more time per token, since every part of the prefixes is counted in a scan of
all tokens: the last line estimates a billion tokens from the time of one such scan.
"""

from __future__ import annotations

import resource
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from hdtool.builders.stores.build_stores import build_model_store
from hdtool.builders.stores.frequent_sequences import CountedDocuments, most_frequent_in_part, part_count
from hdtool.builders.stores.ngram_groups import SEQUENCE_LENGTHS
from hdtool.data.documents import Document, InputFile, token_type
from hdtool.runtime.kernels.machine_name import machine
from hdtool.runtime.settings.building import BuildConfig
from hdtool.runtime.stores.corpus_index import CorpusIndex
from tests.benchmarks.corpus_scale import build_real_index, parser_of_sizes, synthetic
from tests.benchmarks.laboratory import Table

BILLION = 10**9


def counted(answers: list[Document], end: int) -> CountedDocuments:
    closed = [part for answer in answers for part in (np.asarray(answer.ids), np.array([end]))]
    tokens = np.concatenate(closed).astype(token_type(end))
    tokens.setflags(write=False)  # as in a build, whose compiled code is then used
    return CountedDocuments(tokens, end)


def scan_seconds(documents: CountedDocuments, parts: int) -> float:
    """Return the CPU seconds per token of scanning all tokens for one part, to which hardly any sequence belongs."""
    started = time.process_time()
    for length in SEQUENCE_LENGTHS:
        most_frequent_in_part(documents, length, 0, parts, BuildConfig.top_k)
    return (time.process_time() - started) / len(documents.tokens)


def main() -> None:
    options = parser_of_sizes(__doc__, [1, 10, 20, 40]).parse_args()
    print(machine() + "\n")
    with tempfile.TemporaryDirectory() as place:
        mark = build_real_index(Path(place) / "real", options.corpus, options.model)
        index = CorpusIndex(Path(place) / "real")
        mark = replace(mark, vocab_size=options.vocabulary or mark.vocab_size)
        table = Table("million tokens", "CPU seconds", "peak memory, GiB", "MB")
        for millions in options.millions:
            answers = list(synthetic(index, millions * 1_000_000))
            started = time.process_time()
            made = build_model_store(Path(place) / "model", answers, mark, [InputFile("walk", "0")])
            seconds, tokens = time.process_time() - started, made.counts["tokens"]
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            table.row(f"{tokens / 1e6:.1f}", f"{seconds:.1f}", f"{peak:.2f}", f"{made.bytes / 1e6:.1f}")
        documents = counted(answers, mark.vocab_size)
        parts = part_count(replace(documents, tokens=np.broadcast_to(documents.tokens[:1], BILLION)))
        scan = scan_seconds(documents, parts)
        others = seconds / tokens - part_count(documents) * scan
        hours = BILLION * (others + parts * scan) / 3600
        print(f"\na billion tokens: {parts:,} scans of {scan * 1e9:.1f} ns per token, {hours:.1f} core hours")


if __name__ == "__main__":
    main()
