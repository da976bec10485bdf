"""Build executors and the tasks they run: sorting shards and mining frequent sequences."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from multiprocessing import get_context
from typing import TYPE_CHECKING

import numpy as np

from hdtool.builders.stores.frequent_sequences import CountedDocuments, FrequentSequences, most_frequent, tokenized
from hdtool.builders.stores.suffix_array import ShardFiles
from hdtool.data.documents import Document
from hdtool.data.isolated_processes import isolated_children
from hdtool.data.progress import progress_bar
from hdtool.data.texts_and_traces import RecordReader
from hdtool.runtime.kernels.compiled import Ints
from hdtool.runtime.stores.model_store_lmdb import PHRASE_TOKENS, NgramGroup
from hdtool.runtime.stores.suffix_search import ShardExtent

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SEQUENCE_LENGTHS = range(2, PHRASE_TOKENS + 2)
MAX_COUNT = 2**31 - 1


def mine_groups(answers: CountedDocuments, length: int, top_k: int, per_key: int) -> list[NgramGroup]:
    """Find the ``top_k`` most frequent sequences of ``length`` tokens; return them as n-gram groups."""
    return sequence_groups(answers, length, most_frequent(answers, length, top_k), per_key)


def sequence_groups(
    answers: CountedDocuments, length: int, frequent: FrequentSequences, per_key: int
) -> list[NgramGroup]:
    """Group sequences by prefix; sequences of the maximum length are also grouped by first token, as phrases."""
    positions, *_ = frequent
    tokens = answers.tokens[positions[:, None] + np.arange(length)]
    groups = [_group(tokens, frequent, length - 1, per_key)]
    if length == PHRASE_TOKENS + 1:
        groups.append(_group(tokens, frequent, 1, per_key))
    return groups


def _group(tokens: Ints, frequent: FrequentSequences, prefix: int, per_key: int) -> NgramGroup:
    """Group sequences by their first ``prefix`` tokens, keeping the ``per_key`` most frequent of each group."""
    _, counts, totals, distinct = frequent
    counts = np.minimum(counts, MAX_COUNT)
    order = np.lexsort([*tokens.T[:prefix], -counts, *tokens.T[prefix:]][::-1])
    tokens, counts = tokens[order], counts[order]
    firsts = np.flatnonzero(np.append(True, (tokens[1:, :prefix] != tokens[:-1, :prefix]).any(1))[: len(tokens)])
    sizes = np.diff(np.append(firsts, len(tokens)))
    chosen = np.arange(len(tokens)) - np.repeat(firsts, sizes) < per_key
    totals, distinct = totals[order[firsts]], distinct[order[firsts]]
    if prefix + 1 < tokens.shape[1]:
        totals, distinct = np.add.reduceat(counts, firsts), sizes  # the given totals belong to a longer prefix
    return NgramGroup(
        heads=tokens[firsts, :prefix],
        totals=np.minimum(totals, MAX_COUNT),
        distinct=np.minimum(distinct, MAX_COUNT),
        stops=np.cumsum(np.minimum(sizes, per_key)),
        tokens=tokens[chosen, prefix:],
        counts=counts[chosen],
    )


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
