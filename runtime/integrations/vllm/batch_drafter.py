"""Drafts for all requests of a batch at once, as an engine asks for them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hdtool.runtime.config import ServeConfig
from hdtool.runtime.drafters.hierarchy.drafter import ANY_TOKEN, Hierarchy
from hdtool.runtime.drafters.hierarchy.sources.context_table import TABLE, clear
from hdtool.runtime.integrations.vllm.chain import draft_rows, no_requests
from hdtool.runtime.integrations.vllm.min_probability import HOPELESS, Pace
from hdtool.runtime.integrations.vllm.request_matching import NOBODY, recognise
from hdtool.runtime.kernels.no_copy import Pinned
from hdtool.runtime.stores.store_set import StoreSet

TABLES_TOGETHER = 32
"""Context tables lie together, in pages of 2 MiB where the system has them: fewer of these must be looked up."""

Ints = npt.NDArray[Any]


class BatchDrafter(Pinned):
    """A hierarchy for each request, made as they are needed; stores and what is learned of their worth are shared."""

    def __init__(
        self, store_set: StoreSet, config: ServeConfig, *, rows: int, longest: int, vocabulary: int = ANY_TOKEN
    ) -> None:
        """For batches of at most ``rows`` requests of at most ``longest`` tokens, each below ``vocabulary``."""
        self.store_set = store_set
        self.pace = Pace(config.min_draft_prob)
        self.most = max(1, min(rows, (config.context_mib << 20) // TABLE.itemsize))
        """Context tables at most; requests that find none are not drafted for."""
        self._longest = longest
        self._hierarchy = Hierarchy(store_set.model, store_set.corpus, vocabulary=vocabulary)
        self._tables: list[Ints] = []
        self._count = 0
        self._requests = no_requests(self.most, self._hierarchy.shards)
        self._held = np.full(self.most, NOBODY, np.int64)
        self._chosen = np.empty(rows, np.int64)
        self._drafts = np.empty((rows, config.draft_tokens), np.int64)
        self._sizes = np.zeros(rows, np.int64)
        self._compile()

    def __len__(self) -> int:
        """How many context tables there are."""
        return self._count

    @property
    def nbytes(self) -> int:
        """The memory of all context tables."""
        return self._count * TABLE.itemsize

    def draft(self, ready: Sequence[object], lengths: Ints, contexts: Ints) -> list[list[int]]:
        """What may come next in each row of a batch; nothing for rows that are not ``ready``.

        Each row of ``contexts`` holds as many tokens as ``lengths`` says: a prompt, and all that was said since.
        """
        at = time.perf_counter()
        rows = np.array([row for row, is_ready in enumerate(ready) if is_ready], np.int64)
        sizes = np.array(lengths[rows], np.int64)
        if len(rows) == len(ready):
            self.pace.asked(at, rows, sizes)
        drafts: list[list[int]] = [[] for _ in ready]
        sent = self._sizes[: len(rows)]
        sent[:] = 0
        floor = self.pace.floor(len(rows))
        if len(rows) and floor < HOPELESS:
            self._make_tables(len(rows))
            self._grow(rows, lengths, contexts, floor)
            for row, size, tokens in zip(rows.tolist(), sent.tolist(), self._drafts[: len(rows)].tolist(), strict=True):
                drafts[row] = tokens[:size]
        self.pace.sent(at, rows, sizes, sent.copy())
        return drafts

    def _grow(self, rows: Ints, lengths: Ints, contexts: Ints, floor: float) -> None:
        recognise(self._requests.tables[: len(self)], self._held[: len(self)], contexts, lengths, rows, self._chosen)
        memories = self._hierarchy.corpus, self._hierarchy.addresses
        limits = self._longest, self._drafts.shape[1], floor
        draft_rows(memories, self._requests, self._chosen, contexts, lengths, rows, limits, self._drafts, self._sizes)

    def _make_tables(self, wanted: int) -> None:
        """As many context tables as are wanted, if there may be so many."""
        while self._count < min(wanted, self.most):
            place = self._count % TABLES_TOGETHER
            if place == 0:
                self._tables.append(np.zeros(min(TABLES_TOGETHER, self.most - self._count), TABLE))
            table = self._tables[-1][place : place + 1]
            clear(table[0])
            self._requests.tables[self._count] = table.ctypes.data
            self._count += 1

    def _compile(self) -> None:
        """Have everything compiled, or loaded, before the first request waits for it."""
        self._make_tables(1)
        self._grow(np.zeros(1, np.int64), np.ones(1, np.int32), np.zeros((1, 1), np.int32), 1.0)
        clear(self._tables[0][0])
        self._held[:] = NOBODY
