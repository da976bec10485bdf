"""Build backends: a backend runs the tasks of a build; the tasks are the same for all."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from multiprocessing import get_context
from typing import TYPE_CHECKING, Protocol

from hdtool.builders.stores.mining import LENGTHS, mined
from hdtool.builders.stores.sequences import Answers
from hdtool.builders.stores.shards import ShardFiles
from hdtool.builders.stores.tokenize import tokenized
from hdtool.data.progress import Bar, bar
from hdtool.data.records import Reading
from hdtool.data.stores.documents import Document
from hdtool.runtime.stores.model_record import Group
from hdtool.runtime.stores.suffix_search import ShardPlace

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LENGTHS_AT_ONCE = 2
"""Sequence lengths that are counted in parallel: compiled code releases the GIL for the writing."""


class Engine(Protocol):
    """Runs the tasks of a build, in any order and on any machine; the store does not depend on it."""

    def prepare(self, reading: Reading) -> None:
        """Check the inputs before any is read."""
        ...

    def documents(self, reading: Reading, tokenizer: PreTrainedTokenizerBase, shown: Bar) -> Iterator[Document]:
        """The tokenized texts of all inputs, in their order."""
        ...

    def sort(self, files: ShardFiles, shards: Sequence[ShardPlace]) -> None:
        """Sort every shard."""
        ...

    def mine(self, answers: Answers, top_k: int, per_key: int) -> Iterator[Group]:
        """The n-grams of all lengths, the shortest first."""
        ...


class LocalEngine:
    """Runs on this machine: the tokenizer's own threads, processes that sort, threads that count."""

    def __init__(self, workers: int | None = None, *, quiet: bool = True) -> None:
        self._workers = workers or os.cpu_count() or 1
        self._quiet = quiet

    def prepare(self, reading: Reading) -> None:
        pass

    def documents(self, reading: Reading, tokenizer: PreTrainedTokenizerBase, shown: Bar) -> Iterator[Document]:
        return tokenized(reading, tokenizer, shown)

    def sort(self, files: ShardFiles, shards: Sequence[ShardPlace]) -> None:
        workers = min(self._workers, len(shards))
        pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn")) if workers > 1 else None
        with bar(len(shards), "sorting", unit="shards", quiet=self._quiet) as shown, pool or nullcontext():
            if pool:
                for done in as_completed([pool.submit(files.sort, *job) for job in enumerate(shards)]):
                    done.result()
                    shown.advance()
                return
            for job in enumerate(shards):
                files.sort(*job)
                shown.advance()

    def mine(self, answers: Answers, top_k: int, per_key: int) -> Iterator[Group]:
        with ThreadPoolExecutor(LENGTHS_AT_ONCE) as pool:
            # The longest takes the most time, but the shortest is written first.
            order = (LENGTHS[-1], *LENGTHS[:-1])
            counted = {length: pool.submit(mined, answers, length, top_k, per_key) for length in order}
            for length in LENGTHS:
                yield from counted[length].result()
