"""Runs a pass over draft trees or a prompt in one compiled call, reusing its buffers for every pass.

A pass evicts everything else from the CPU's caches, so each Python object that is touched before the next pass costs a
read from main memory. The code of this module therefore touches few objects.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from operator import add
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import get_num_threads, is_autocast_enabled

from hdtool.runtime.core.engine_interface import PassOptions, Verified, Walk
from hdtool.runtime.core.tree import UNDETERMINED, DraftTree
from hdtool.runtime.core.tree_walks import NO_FORCED_TOKENS
from hdtool.runtime.engines.cpu.convolution import ORIGIN
from hdtool.runtime.engines.cpu.mixer_kernel import PATH_SLOT, KeptRows
from hdtool.runtime.engines.cpu.pass_kernel import (
    HEADER,
    TREE_PASS,
    TREE_ROWS,
    accept_path,
    compute_trees,
    pass_scratch_size,
)
from hdtool.runtime.kernels.compiled import Array, zeroed_records
from hdtool.runtime.kernels.thread_pool import NO_THREADS, shared_thread_pool
from hdtool.runtime.kernels.topk import folded_size

if TYPE_CHECKING:
    from hdtool.runtime.caches.kv_cache import KVTensors, StaticKVCache
    from hdtool.runtime.caches.recurrent_states import States
    from hdtool.runtime.caches.slots import Slot
    from hdtool.runtime.engines.cpu.weight_table import WeightTable

PROMPT_CHUNK = 128
"""Maximum number of prompt tokens per pass; larger passes take longer per row."""
CHAIN = np.arange(-1, PROMPT_CHUNK, dtype=np.int32)
"""Parents of a tree whose nodes form a chain."""


class StatesOfRows:
    """Computes the recurrent states after any row of a pass over trees, from values that mixers kept for the rows."""

    def __init__(self, passes: TreePass) -> None:
        self._source: TreePass | KeptRows = passes

    def leave(self) -> None:
        """Copy the kept values, because another pass is about to overwrite them."""
        if isinstance(self._source, TreePass):
            self._source = self._source.copy_of_kept()

    def commit(self, slot: int, rows: Sequence[int], states: States) -> None:
        self._source.accept(np.array([slot, len(rows), len(rows), *rows], np.int64), states)


class TreePass:
    """Computes passes of one model over at most ``slots`` sequences, reusing its buffers for every pass."""

    def __init__(self, table: WeightTable, slots: int = 1) -> None:
        self._table, self._slots = table, slots
        self._rows = TREE_ROWS if slots > 1 else max(TREE_ROWS, PROMPT_CHUNK)
        records = zeroed_records(TREE_PASS)
        self._record, self._at = records[0], records.ctypes.data
        self._active_experts: Array = records["pass_record"]["active_experts"]
        """View of the field in ``_record``, which takes 14 µs to read through the record."""
        self.nodes = 0
        """Number of nodes that the last pass verified, as ``PassLog`` counts them."""
        rows = slots * self._rows
        self._memory: dict[str, Any] = {
            "last_masks": np.zeros((slots, 2), np.int64),
            "starts": np.zeros(slots, np.int64),
            "offsets": np.zeros(slots + 1, np.int64),
            "ids": np.zeros(rows, np.int64),
            "positions": np.zeros(rows, np.int64),
            "forced_tokens": np.zeros(rows, np.int64),
            "tree_headers": np.zeros((slots, HEADER), np.int64),
            "walk_results": np.zeros((slots, 2), np.int64),
            "argmax_walks": np.zeros((slots, 2, TREE_ROWS), np.int64),
            "origins": np.zeros(rows if table.mixers else 0, ORIGIN),
            "maxima": np.empty((slots * TREE_ROWS, folded_size(table.vocabulary)), np.float32),
        }
        """Buffers whose addresses are in the record."""
        self._headers: Array = self._memory["tree_headers"]
        self._walk_results: Array = self._memory["walk_results"]
        self._argmax_walks: list[Array] = [*self._memory["argmax_walks"]]
        self._maxima: Array = self._memory["maxima"]
        with torch.inference_mode(False):  # inference tensors can't be changed outside of inference mode
            self._logits = torch.empty(slots * TREE_ROWS, table.vocabulary, dtype=torch.float32)
            self._normed = torch.empty(rows, table.width, dtype=torch.float32)
        self._storage: Callable[[], KVTensors | None] = lambda: None
        """Weak reference to the KV cache whose addresses are in the record."""
        self._version = self._threads = 0
        self._states_at = 0, 0
        """Address of the KV cache's first state, and the stride between sequences in bytes."""
        self._kept_states: Callable[[], StatesOfRows | None] = lambda: None
        """Weak reference to the states after the last pass's rows, which must be copied before the next pass."""
        self._outputs: dict[int, torch.Tensor] = {}
        """Outputs of watched layers by layer index."""
        self._views: dict[tuple[int, int], torch.Tensor] = {}
        """Views of the logits by first row and row count."""

    def verify(
        self,
        storage: KVTensors,
        slots: Sequence[Slot],
        trees: Sequence[DraftTree],
        options: Sequence[PassOptions],
    ) -> list[Verified] | None:
        """Verify each tree in the slot with the same index; return None if the engine can't compute the pass.

        ``slots`` are the first slots of ``storage``. If a tree's ``forced_tokens`` allow only one token after a row,
        only that token's logit is written.
        """
        if len(trees) == 1:
            return self._verify_one(storage, slots[0].kv, trees[0], options[0])
        nodes, lengths = [len(tree.tokens) for tree in trees], [slot.length for slot in slots]
        # Mixers need equally many rows in each tree, so smaller trees are padded.
        min_rows = max(nodes) + 1 if self._table.mixers else 1
        rows = [max(count + 1, min_rows) for count in nodes]
        if not self._can_compute(storage, max(map(add, lengths, rows))):
            return None
        headers = self._headers[: len(trees)]
        for header, tree, count, length, each in zip(headers, trees, nodes, lengths, options, strict=True):
            header[:] = tree.root, count, length, each.walk
        tokens, parents = (np.concatenate([getattr(tree, name) for tree in trees]) for name in ("tokens", "parents"))
        forced_tokens, ranks = _forced_tokens_of(trees), any(each.wants_maxima for each in options)
        if not self._compute(len(trees), tokens, parents, forced_tokens, min_rows, 0, ranks, False):
            return None
        verified, offsets = list[Verified](), accumulate(rows, initial=0)
        for number, (slot, each, first) in enumerate(zip(slots, options, offsets, strict=False)):
            slot.kv.mark_written(slot.length + rows[number])
            verified.append(self._result(number, first, nodes[number] + 1, each))
        self.nodes = min_rows - 1 if self._table.mixers else sum(rows) - 1
        return verified

    def _verify_one(
        self, storage: KVTensors, kv: StaticKVCache, tree: DraftTree, options: PassOptions
    ) -> list[Verified] | None:
        """Verify one tree as ``verify`` does, with less overhead in Python."""
        rows, length = len(tree.tokens) + 1, kv.length
        if not self._can_compute(storage, length + rows):
            return None
        forced_tokens = NO_FORCED_TOKENS if tree.forced_tokens is None else tree.forced_tokens
        self._headers[0] = tree.root, rows - 1, length, options.walk
        if not self._compute(1, tree.tokens, tree.parents, forced_tokens, 1, 0, options.wants_maxima, False):
            return None
        kv.mark_written(length + rows)
        self.nodes = rows - 1
        return [self._result(0, 0, rows, options)]

    def _result(self, slot: int, first: int, rows: int, options: PassOptions) -> Verified:
        """Return the results of a slot's tree, whose rows begin with ``first``."""
        walk = None
        if options.walk:
            length, finite = self._walk_results[slot].tolist()
            walk = Walk.of(self._argmax_walks[slot], length, bool(finite))
        maxima = self._maxima[first : first + rows] if options.wants_maxima else None
        return Verified(self._view(first, rows), self._hidden(first, rows), walk, maxima=maxima)

    def prefill(self, kv: StaticKVCache, tokens: Sequence[int]) -> Verified | None:
        """Read at most ``PROMPT_CHUNK`` tokens after a sequence's context; return the logits after the last token.

        Return None if the engine can't compute the pass. The caller adds the tokens to the context.
        """
        rows, length = len(tokens), kv.length
        if not self._can_compute(kv.storage, length + rows):
            return None
        ids = np.array(tokens, np.int64)
        self._headers[0] = ids[0], rows - 1, length, False
        if not self._compute(1, ids[1:], CHAIN[: rows - 1], NO_FORCED_TOKENS, 1, rows - 1, False, True):
            return None
        kv.mark_written(length + rows)
        return Verified(self._view(0, 1), self._hidden(0, rows))

    @property
    def experts(self) -> int:
        """Number of distinct experts that the last pass used, summed over layers."""
        return int(self._active_experts[0]) if self._table.has_experts else 0

    def states_of_rows(self) -> StatesOfRows:
        """Return an object that computes the states after any row of the last pass over trees."""
        states = StatesOfRows(self)
        self._kept_states = weakref.ref(states)
        return states

    def accept(self, path: Array, states: States) -> None:
        """Advance ``states`` along a path of the last pass's rows; for ``path``, see ``mixer_kernel.PATH``."""
        first, stride = self._states_at
        if states.address == first + int(path[PATH_SLOT]) * stride:
            with self._open_threads() as thread_pool:
                accept_path(self._at, thread_pool, path)
        else:  # the cache has grown since the pass, so the states have moved
            self.copy_of_kept().accept(path, states)

    def copy_of_kept(self) -> KeptRows:
        """Return a copy of the values that mixers kept for the last pass's rows."""
        record, mixers = self._record, self._table.mixers
        assert mixers, "nothing is kept without mixers"
        pass_record = record.pass_record.copy()
        rows = int(pass_record.slots * pass_record.new)
        layers = self._memory["layers"][: record.layer_count]
        journal = self._memory["journal"][: rows * mixers.journal_size]
        return KeptRows(mixers, pass_record, layers.copy(), journal.copy())

    def _compute(self, *arguments: Any) -> bool:
        """Call ``compute_trees`` with the record, the thread pool and these arguments."""
        if self._threads == 1:
            return compute_trees(self._at, 0, *arguments)
        with self._open_threads() as thread_pool:
            return compute_trees(self._at, thread_pool, *arguments)

    def _open_threads(self) -> AbstractContextManager[int]:
        return shared_thread_pool(self._threads).open() if self._threads > 1 else NO_THREADS

    def _can_compute(self, storage: KVTensors, end: int) -> bool:
        """Prepare for a pass that ends at cache position ``end``; return False for unsupported passes."""
        if states := self._kept_states():
            states.leave()
            self._kept_states = lambda: None
        if is_autocast_enabled("cpu") or end > storage.capacity:
            return False
        threads = get_num_threads()
        if self._storage() is not storage or self._threads != threads or self._version != self._table.version:
            self._prepare(storage, threads)
        return True

    @torch.inference_mode()
    def _prepare(self, storage: KVTensors, threads: int) -> None:
        """Set up the record and the buffers for this KV cache and number of threads."""
        table, capacity, memory = self._table, storage.capacity, self._memory
        rows = self._slots * self._rows
        record = self._record
        record.pass_record = table.pass_record(self._slots, self._rows)
        record.outer_record = table.outer_record(capacity)
        self._storage, self._threads, self._version = weakref.ref(storage), threads, table.version
        record.rows, record.layer_count, record.mask_width = self._rows, table.layer_count, capacity
        memory["layers"], memory["last_masks"][:] = table.with_cache(storage).copy(), 0
        self._outputs = {layer: torch.empty(rows, table.width, dtype=torch.float32) for layer in table.watched}
        for layer, output in self._outputs.items():
            memory["layers"][layer].watched = output.data_ptr()
        with torch.inference_mode(False):
            memory["hidden"] = torch.empty(rows, table.width, dtype=torch.float32).numpy()
            size = pass_scratch_size(record.pass_record, memory["layers"], table.rotary_types, capacity)
            memory["scratch"] = torch.empty(size, dtype=torch.float32).numpy()
            # The operating system allocates no memory for pages that are never written.
            memory["mask"] = torch.zeros(rows, capacity, dtype=torch.float32).numpy()
            if mixers := table.mixers:
                journal_size = max(self._slots * TREE_ROWS * mixers.journal_size, self._rows * mixers.max_journal_size)
                memory["journal"] = torch.empty(journal_size, dtype=torch.float32).numpy()
        for name, part in memory.items():
            record[name] = part.ctypes.data
        if states := storage.states:
            self._states_at = states.address, states.stride
        pass_record, outer_record = record.pass_record, record.outer_record
        pass_record.origins, pass_record.journal = record.origins, record.journal
        outer_record.logits, outer_record.normed = self._logits.data_ptr(), self._normed.data_ptr()

    def _view(self, first: int, rows: int) -> torch.Tensor:
        view = self._views.get((first, rows))
        if view is None:
            view = self._views[first, rows] = self._logits[first : first + rows]
        return view

    def _hidden(self, first: int, rows: int) -> torch.Tensor | None:
        """Return the rows' hidden states after the final norm and each watched layer, or None if nothing is watched."""
        table = self._table
        if not table.watches_hidden:
            return None
        columns = [self._normed, *(self._outputs[layer] for layer in table.watched)]
        return torch.cat([column[first : first + rows] for column in columns], dim=1)


def _forced_tokens_of(trees: Sequence[DraftTree]) -> Array:
    """Join the ``forced_tokens`` of all trees, with one item per row; return an empty array if no tree has any."""
    if all(tree.forced_tokens is None for tree in trees):
        return NO_FORCED_TOKENS
    return np.concatenate(
        [np.full(len(tree) + 1, UNDETERMINED) if tree.forced_tokens is None else tree.forced_tokens for tree in trees]
    )
