"""Runs the tasks of a build on this machine: tokenizing, sorting shards and mining frequent sequences."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from multiprocessing import get_context
from typing import TYPE_CHECKING

from hdtool.builders.stores.frequent_sequences import CountedDocuments, tokenized
from hdtool.builders.stores.ngram_groups import SEQUENCE_LENGTHS, mine_groups
from hdtool.builders.stores.suffix_array import ShardFiles
from hdtool.data.documents import Document
from hdtool.data.isolated_processes import isolated_children
from hdtool.data.progress import progress_bar
from hdtool.data.texts_and_traces import RecordReader
from hdtool.runtime.stores.model_store_lmdb import NgramGroup
from hdtool.runtime.stores.suffix_search import ShardExtent

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PARALLEL_LENGTHS = 2
"""Number of sequence lengths counted in parallel. Counting is compiled code that releases the GIL."""


class BuildExecutor:
    """Runs the tasks of a build on this machine: tokenizes in the tokenizer's threads, sorts in processes.

    Neither the order of the tasks nor the machines that run them affect the resulting store.
    """

    def __init__(self, workers: int | None = None, *, quiet: bool = False) -> None:
        self._workers = workers or os.cpu_count() or 1
        self._quiet = quiet

    def prepare(self, reading: RecordReader) -> None:
        """Check the inputs before any of them is read; on this machine, nothing is checked."""

    def documents(self, reading: RecordReader, tokenizer: PreTrainedTokenizerBase) -> Iterator[Document]:
        """Yield the tokenized texts of all inputs, in input order."""
        return tokenized(reading, tokenizer)

    def sort(self, files: ShardFiles, shards: Sequence[ShardExtent]) -> None:
        """Sort every shard and write its arrays to ``files``."""
        workers = min(self._workers, len(shards))
        with (
            isolated_children(),
            progress_bar(len(shards), "sorting", unit="shards", quiet=self._quiet) as progress,
            ProcessPoolExecutor(workers, get_context("spawn")) if workers > 1 else nullcontext() as pool,
        ):
            if pool:
                for done in as_completed([pool.submit(files.sort, *job) for job in enumerate(shards)]):
                    done.result()
                    progress.advance()
                return
            for job in enumerate(shards):
                files.sort(*job)
                progress.advance()

    def mine(self, answers: CountedDocuments, top_k: int, per_key: int) -> Iterator[NgramGroup]:
        """Yield the n-gram groups of all lengths, shortest first."""
        with ThreadPoolExecutor(PARALLEL_LENGTHS) as pool:
            # Start the longest length first because it takes the most time; results are yielded shortest first.
            order = (SEQUENCE_LENGTHS[-1], *SEQUENCE_LENGTHS[:-1])
            counted = {length: pool.submit(mine_groups, answers, length, top_k, per_key) for length in order}
            for length in SEQUENCE_LENGTHS:
                yield from counted[length].result()
