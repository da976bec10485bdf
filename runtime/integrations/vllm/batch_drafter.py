"""Drafts for all requests of a vLLM batch, with one context table per request and shared stores.

vLLM passes no request ids, and it moves, removes and adds requests between rows. A context table is used for a row only
if the table's tokens are a prefix of the row's context, so no request gets drafts from the table of another one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence, Sized
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from hdtool.runtime.budget.min_probability import NO_DRAFT_ABOVE, MinProbability
from hdtool.runtime.drafters.hierarchy.hierarchy import UNLIMITED_VOCABULARY, Hierarchy
from hdtool.runtime.integrations.vllm.answer_collector import AnswerCollector
from hdtool.runtime.integrations.vllm.draft_chains import draft_rows, new_request_states
from hdtool.runtime.kernels.compiled import Ints, Uncopyable, array_at, compiled
from hdtool.runtime.settings.decoding import MEMORY
from hdtool.runtime.settings.serving import VllmConfig
from hdtool.runtime.stores.context_table import CONTEXT_TABLE, clear, holds
from hdtool.runtime.stores.history_store import History
from hdtool.runtime.stores.store_set import StoreSet

NO_TABLE = -1


@compiled
def match_rows(tables: Ints, rows_of: Ints, contexts: Ints, lengths: Ints, wanted: Ints, chosen: Ints) -> int:
    """Choose a context table for each ``wanted`` row of ``contexts``; return the number of rows that matched a table.

    Indices of tables are written to ``chosen``. ``rows_of`` holds the row for which each table was last chosen, and is
    updated in place. A table that no row matched is free. A row without a match gets a free table, which is cleared, or
    ``NO_TABLE`` if no free table is left.
    """
    last = np.full(len(contexts), NO_TABLE, np.int64)
    free = np.ones(len(tables), np.bool_)
    for table in range(len(tables)):
        if rows_of[table] >= 0:
            last[rows_of[table]] = table
    matched = 0
    for turn in range(len(wanted)):
        row = wanted[turn]
        table, chosen[turn] = last[row], NO_TABLE
        if table >= 0 and _is_prefix(tables[table], contexts[row], lengths[row]):
            chosen[turn], free[table] = table, False
            matched += 1
    if matched < len(wanted):
        matched += _match_moved(tables, contexts, lengths, wanted, chosen, free)
    rows_of[:] = NO_TABLE
    for turn in range(len(wanted)):
        if chosen[turn] >= 0:
            rows_of[chosen[turn]] = wanted[turn]
    return matched


@compiled
def _match_moved(tables: Ints, contexts: Ints, lengths: Ints, wanted: Ints, chosen: Ints, free: Ints) -> int:
    """Find the tables of requests that changed rows, give free tables to the others, and return how many were found."""
    matched = 0
    for turn in range(len(wanted)):
        if chosen[turn] == NO_TABLE:
            row, longest = wanted[turn], np.int64(0)
            for table in range(len(tables)):
                size = array_at(tables[table], 1, CONTEXT_TABLE)[0].end
                if free[table] and size > longest and _is_prefix(tables[table], contexts[row], lengths[row]):
                    chosen[turn], longest = table, size
            if longest > 0:
                free[chosen[turn]] = False
                matched += 1
    table = 0
    for turn in range(len(wanted)):
        if chosen[turn] == NO_TABLE:
            while table < len(free) and not free[table]:
                table += 1
            if table == len(free):
                break
            chosen[turn], free[table] = table, False
            clear(array_at(tables[table], 1, CONTEXT_TABLE)[0])
    return matched


@compiled
def _is_prefix(address: int, context: Ints, length: int) -> bool:
    """Return True if a table holds a prefix of a context; compare the table's last token first, to fail early."""
    table = array_at(address, 1, CONTEXT_TABLE)[0]
    size = table.end
    if size == 0 or size > length or table.ring[(size - 1) & (len(table.ring) - 1)] != context[size - 1]:
        return False
    return holds(table, context[:length])


TABLES_PER_BLOCK = 32
"""Number of context tables per allocation: large allocations get 2 MiB pages if available, for fewer TLB misses."""

NO_LOCK: AbstractContextManager[object] = nullcontext()


class BatchDrafter(Uncopyable):
    """Drafts with one context table per request; stores, history and learned weights are shared."""

    def __init__(
        self,
        store_set: StoreSet,
        config: VllmConfig,
        *,
        rows: int,
        max_length: int,
        vocabulary: int = UNLIMITED_VOCABULARY,
        on_cpu: bool = False,
    ) -> None:
        """Batches have up to ``rows`` rows, contexts up to ``max_length`` tokens; token ids are below ``vocabulary``.

        ``on_cpu`` is True if the target runs on a CPU.

        The history is that of the ``store_set``, else a history in memory if ``config`` asks for one, else None.
        """
        self.store_set = store_set
        self.min_probability = MinProbability(config.min_draft_prob, on_cpu=on_cpu)
        self.max_tables = max(1, min(rows, (config.context_mib << 20) // CONTEXT_TABLE.itemsize))
        """Maximum number of context tables; requests without a table get no drafts."""
        self._max_length = max_length
        self.history = store_set.history or (History() if config.history == MEMORY else None)
        self._hierarchy = Hierarchy(store_set.model, store_set.corpus, vocabulary=vocabulary, history=self.history)
        self._tables: list[Ints] = []
        self._count = 0
        lasts = bool(self.history and self.history.store)
        self._requests = new_request_states(
            self.max_tables, self._hierarchy.shards, history=bool(self.history), ended=lasts
        )
        self._rows_of = np.full(self.max_tables, NO_TABLE, np.int64)
        self._chosen = np.empty(rows, np.int64)
        self._drafts = np.empty((rows, config.draft_tokens), np.int64)
        self._sizes = np.zeros(rows, np.int64)
        self._compile()
        self._finished = AnswerCollector(self.history, self._requests) if self.history and lasts else None

    def __len__(self) -> int:
        """Return the number of context tables."""
        return self._count

    def draft(self, sampled: Sequence[Sized], lengths: Ints, contexts: Ints) -> list[list[int]]:
        """Return the draft tokens for each row of a batch; none for rows in prefill, which have no ``sampled`` tokens.

        Row ``i`` of ``contexts`` holds ``lengths[i]`` tokens: a prompt and its answer so far, which ends with the
        sampled tokens.
        """
        at = time.perf_counter()
        counts = np.array([len(tokens) for tokens in sampled], np.int64)
        rows = np.flatnonzero(counts)
        sizes = np.array(lengths[rows], np.int64)
        if len(rows) == len(sampled):
            self.min_probability.begin_step(at, rows, sizes)
        drafts: list[list[int]] = [[] for _ in sampled]
        sent = self._sizes[: len(rows)]
        sent[:] = 0
        floor = self.min_probability.floor(len(rows))
        # A stored history keeps whole answers, so the new tokens are added even if nothing is drafted.
        if len(rows) and (floor < NO_DRAFT_ABOVE or self._finished):
            with self._finished.lock if self._finished else NO_LOCK:
                if self.history:
                    self.history.answers.grow()
                self._make_tables(len(rows))
                self._grow(rows, counts[rows], lengths, contexts, floor)
                if self._finished:
                    self._finished.observe(self._chosen[: len(rows)], at)
            for row, size, tokens in zip(rows.tolist(), sent.tolist(), self._drafts[: len(rows)].tolist(), strict=True):
                drafts[row] = tokens[:size]
        self.min_probability.record_drafts(at, rows, sizes, sent.copy())
        return drafts

    def _grow(self, rows: Ints, sampled: Ints, lengths: Ints, contexts: Ints, floor: float) -> None:
        match_rows(
            self._requests.tables[: len(self)], self._rows_of[: len(self)], contexts, lengths, rows, self._chosen
        )
        limits = self._max_length, self._drafts.shape[1], floor
        batch = contexts, lengths, rows, sampled
        draft_rows(self._hierarchy.address, self._requests, self._chosen, *batch, limits, self._drafts, self._sizes)

    def _make_tables(self, wanted: int) -> None:
        """Allocate context tables until there are ``wanted`` tables, or ``max_tables`` if that is less."""
        while self._count < min(wanted, self.max_tables):
            place = self._count % TABLES_PER_BLOCK
            if place == 0:
                self._tables.append(np.zeros(min(TABLES_PER_BLOCK, self.max_tables - self._count), CONTEXT_TABLE))
            table = self._tables[-1][place : place + 1]
            clear(table[0])
            self._requests.tables[self._count] = table.ctypes.data
            self._count += 1

    def _compile(self) -> None:
        """Compile all functions now, or load them from the cache, so that no request waits for compilation."""
        self._make_tables(1)
        row, length = np.zeros(1, np.int64), np.ones(1, np.int64)
        self._grow(row, length, np.ones(1, np.int32), np.zeros((1, 1), np.int32), 1.0)
        if self.history:
            lane = self._requests.lanes[:1]
            self.history.answers.answer(lane)
            self.history.answers.discard(int(lane["owner"][0]))
            lane["owner"] = lane["stop"] = 0
        clear(self._tables[0][0])
        self._rows_of[:] = NO_TABLE
