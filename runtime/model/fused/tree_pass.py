"""Passes over draft trees as one compiled call: token ids, positions and masks are made where they are read.

Only the nodes of the trees and the lengths of their contexts differ from one pass to the next. Everything else is an
address in a record that is filled when an answer begins. A pass evicts the processor's caches, so each object of Python
on the way to the next one is read from main memory: there are few of them here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import get_num_threads, is_autocast_enabled

from hdtool.runtime.accept import NOTHING_CERTAIN, walk
from hdtool.runtime.kernels.argmax import INFINITY, TreeLogits, Walk
from hdtool.runtime.kernels.compiled import Array, compiled
from hdtool.runtime.kernels.fused.layers import (
    FIELDS,
    MASK,
    MASK_ROW,
    MASK_SLOT,
    NEW,
    PASS_FIELDS,
    SLOTS,
    TEAM,
)
from hdtool.runtime.kernels.fused.passes import (
    END_FIELDS,
    IDS,
    LOGITS,
    MAXIMA,
    OUTS,
    POSITIONS,
    compute_pass,
    pass_numbers,
)
from hdtool.runtime.kernels.gemm_tiles import ITEM_SIZE
from hdtool.runtime.kernels.memory.raw_memory import array_at
from hdtool.runtime.kernels.team import ALONE, team_of
from hdtool.runtime.kernels.topk import folded_size
from hdtool.runtime.model.attention_masks import hide_non_ancestors
from hdtool.runtime.model.step_input import fill_tree
from hdtool.runtime.tree import LARGEST_TREE, OPEN, DraftTree

if TYPE_CHECKING:
    from hdtool.runtime.model.cache.kv_cache import KVTensors, StaticKVCache
    from hdtool.runtime.model.fused.whole_pass import WholePass

ROWS = LARGEST_TREE + 1
FLOAT32_INFINITY = INFINITY[torch.float32]
HIDDEN_VALUE = float(np.finfo(np.float32).min)
"""Of a mask, for positions that a row does not attend to."""

TREE_PASS = np.dtype(
    [
        ("shape", np.int64, PASS_FIELDS),
        ("ends", np.int64, END_FIELDS),
        ("used", np.int64),  # layers
        ("epsilon", np.float32),
        ("last_epsilon", np.float32),
        ("mask_width", np.int64),
        # Addresses of memory, for ``ROWS`` rows of each slot.
        ("layers", np.int64),
        ("hidden", np.int64),
        ("scratch", np.int64),
        ("mask", np.int64),
        ("shown", np.int64),  # the square of the last mask of each slot: its size, and where it begins
        ("starts", np.int64),
        ("ids", np.int64),
        ("positions", np.int64),
        ("certain", np.int64),
        ("maxima", np.int64),  # what top-k needs of each row
        ("walked", np.int64),  # the tokens of each slot's walk by arg-max, and the nodes that drafted them
    ],
    align=True,
)
NODES, LENGTH, WALKS = 1, 2, 3
"""Of a tree in a batch, after its root: the number of nodes, the length of its context, and whether to walk."""


class TreePass:
    """The passes over trees of one model in so many slots, with the memory that they use in turn."""

    def __init__(self, whole: WholePass, slots: int = 1) -> None:
        self._whole, self._slots = whole, slots
        self._record = np.zeros(1, TREE_PASS)
        self._at = self._record.ctypes.data
        self._memory: dict[str, Any] = {
            "shown": np.zeros((slots, 2), np.int64),
            "starts": np.zeros(slots, np.int64),
            "ids": np.zeros(slots * ROWS, np.int64),
            "positions": np.zeros(slots * ROWS, np.int64),
            "certain": np.zeros(slots * ROWS, np.int64),
            "walked": np.zeros((slots, 2, ROWS), np.int64),
        }
        """What the record has addresses of."""
        self._walked: Array = self._memory["walked"]
        self._found = np.zeros((slots, 2), np.int64)
        """The length of each slot's walk, and whether its logits are finite."""
        self._storage: object = None
        """The KV cache whose addresses the record has."""
        self._checks = self._threads = 0
        self._is_usable = False
        self._own: dict[int, bool] = {}
        """Whether all products of a pass with so many rows are our own."""
        self._logits = torch.empty(0)
        self._maxima: Array = np.empty((0, 0), np.float32)
        self._views: dict[tuple[int, int], TreeLogits] = {}
        """Logits by their first row and their number."""

    def logits(self, tree: DraftTree, cache: StaticKVCache, *, walks: bool, ranks: bool) -> TreeLogits | None:
        """The logits ``[rows, vocabulary]`` of the root and the nodes, valid until the next call.

        After a row with a certain token, they are those of this token alone. None for a pass that is not computed here.
        With ``walks``, the walk by arg-max is computed, too, and with ``ranks`` what top-k needs of each row.
        """
        tokens, length = tree.tokens, cache.length
        rows = len(tokens) + 1
        end = length + rows
        if not self._takes(cache.storage, rows, end):
            return None
        certain = NOTHING_CERTAIN if tree.certain is None else tree.certain
        given = tree.root, tokens, tree.parents, certain, length, walks, ranks
        if self._threads == 1:
            found, finite = compute_tree(self._at, 0, *given)
        else:
            with self._team() as team:
                found, finite = compute_tree(self._at, team, *given)
        if found < 0:
            return None
        if end > cache.used:
            cache.used = end
        self._whole.stack.passes += 1
        logits = self._view(0, rows)
        logits.walk = Walk.of(self._walked[0], found, finite) if walks else None
        logits.maxima = self._maxima[:rows] if ranks else None
        return logits

    def logits_of_batch(
        self,
        trees: Sequence[DraftTree],
        storage: KVTensors,
        lengths: Sequence[int],
        walks: Sequence[bool],
        *,
        ranks: bool,
    ) -> list[torch.Tensor] | None:
        """The same for a tree in each of the first slots."""
        rows = max(len(tree.tokens) for tree in trees) + 1
        if not self._takes(storage, len(trees) * rows, max(lengths) + rows):
            return None
        heads = np.array(
            [
                (tree.root, len(tree.tokens), length, one)
                for tree, length, one in zip(trees, lengths, walks, strict=True)
            ],
            np.int64,
        )
        tokens = np.concatenate([tree.tokens for tree in trees])
        parents = np.concatenate([tree.parents for tree in trees])
        with self._team() as team:
            known = compute_trees(self._at, team, heads, tokens, parents, _certain_of(trees), rows, ranks, self._found)
        if not known:
            return None
        self._whole.stack.passes += 1
        found: list[torch.Tensor] = []
        for slot, (tree, (length, finite)) in enumerate(zip(trees, self._found[: len(trees)].tolist(), strict=True)):
            logits = self._view(slot * rows, len(tree.tokens) + 1)
            logits.walk = Walk.of(self._walked[slot], length, bool(finite)) if walks[slot] else None
            logits.maxima = self._maxima[slot * rows : slot * rows + len(logits)] if ranks else None
            found.append(logits)
        return found

    def _team(self) -> AbstractContextManager[int]:
        return team_of(self._threads).open() if self._threads > 1 else ALONE

    def _takes(self, storage: KVTensors, rows: int, end: int) -> bool:
        """Whether a pass of so many rows, up to a position of the KV cache, is computed here."""
        threads = get_num_threads()
        if self._storage is not storage or self._threads != threads or self._checks != self._whole.checks:
            self._prepare(storage, threads)
        if not self._is_usable or end > storage.capacity or is_autocast_enabled("cpu"):
            return False
        own = self._own.get(rows)
        if own is None:
            own = self._own[rows] = self._whole.has_own_products(rows)
        return own

    @torch.inference_mode()
    def _prepare(self, storage: KVTensors, threads: int) -> None:
        """Fill the record for a KV cache and a number of threads."""
        whole, stack, capacity = self._whole, self._whole.stack, storage.capacity
        self._storage, self._threads, self._checks = storage, threads, whole.checks
        self._is_usable, self._own = whole.is_usable, {}
        if not self._is_usable:
            return
        record: Any = self._record[0]
        record["shape"] = shape = stack.shape_of(self._slots, ROWS, None, storage)
        record["ends"] = whole.ends_below(capacity)
        record["used"], record["epsilon"], record["last_epsilon"] = stack.used, stack.epsilon, whole.epsilon
        record["mask_width"] = capacity
        rows, memory = self._slots * ROWS, self._memory
        memory["layers"], memory["shown"][:] = stack.with_cache(storage), 0
        with torch.inference_mode(False):  # an inference tensor could not be written to outside of that mode
            if not len(self._logits):
                self._logits = torch.empty(rows, whole.outs)
                self._maxima = memory["maxima"] = np.empty((rows, folded_size(whole.outs)), np.float32)
            memory["hidden"] = torch.empty(rows, stack.width).numpy()
            memory["scratch"] = torch.empty(pass_numbers(shape, capacity)).numpy()
            memory["mask"] = torch.zeros(rows, capacity).numpy()  # pages that nobody writes take no memory
        for name, part in memory.items():
            record[name] = part.ctypes.data
        record["ends"][IDS], record["ends"][POSITIONS] = record["ids"], record["positions"]
        record["ends"][LOGITS] = self._logits.data_ptr()

    def _view(self, first: int, rows: int) -> TreeLogits:
        found = self._views.get((first, rows))
        if found is None:
            found = self._views[first, rows] = TreeLogits.of(self._logits[first : first + rows])
        return found


def _certain_of(trees: Sequence[DraftTree]) -> Array:
    """The certain tokens of all rows of all trees, if there is any."""
    if all(tree.certain is None for tree in trees):
        return NOTHING_CERTAIN
    return np.concatenate([np.full(len(tree) + 1, OPEN) if tree.certain is None else tree.certain for tree in trees])


@compiled
def compute_tree(
    at: int, team: int, root: int, tokens: Array, parents: Array, certain: Array, length: int, walks: bool, ranks: bool
) -> tuple[int, bool]:
    """Compute a pass by the record at an address.

    Returns the tokens of the walk by arg-max, if it ``walks``, and whether their logits are finite; -1 for a token or a
    position that the model does not have. No logits are computed after a row with a ``certain`` token; there is an
    entry for each row or none.
    """
    own, rows = array_at(at, 1, TREE_PASS)[0], len(tokens) + 1
    _place_tree(own, 0, root, tokens, parents, length, rows)
    if not _compute(own, team, 1, rows, certain, ranks):
        return -1, False
    return _walk(own, 0, rows, certain, tokens, parents) if walks else (0, True)


@compiled
def compute_trees(
    at: int,
    team: int,
    heads: Array,
    tokens: Array,
    parents: Array,
    certain: Array,
    rows: int,
    ranks: bool,
    found: Array,
) -> bool:
    """The same for a tree in each slot, padded to so many rows; ``found`` gets the walks of those that ``WALKS`` names.

    No logits are computed after padding.
    """
    own, slots, first, skips = array_at(at, 1, TREE_PASS)[0], len(heads), 0, False
    of_rows = array_at(own.certain, (slots * rows,), np.int64)
    for slot in range(slots):
        nodes = heads[slot, NODES]
        drafted, above = tokens[first : first + nodes], parents[first : first + nodes]
        _place_tree(own, slot, heads[slot, 0], drafted, above, heads[slot, LENGTH], rows)
        for row in range(rows):
            only = OPEN if row <= nodes else 0
            if row <= nodes and len(certain) > 0:
                only = certain[first + slot + row]
            of_rows[slot * rows + row] = only
            skips |= only != OPEN
        first += nodes
    if not _compute(own, team, slots, rows, of_rows if skips else of_rows[:0], ranks):
        return False
    first = 0
    for slot in range(slots):
        nodes = heads[slot, NODES]
        found[slot] = 0
        if heads[slot, WALKS]:
            drafted, above = tokens[first : first + nodes], parents[first : first + nodes]
            found[slot, 0], found[slot, 1] = _walk(
                own, slot, rows, of_rows[slot * rows : (slot + 1) * rows], drafted, above
            )
        first += nodes
    return True


@compiled
def _place_tree(own: Any, slot: int, root: int, tokens: Array, parents: Array, length: int, rows: int) -> None:
    """Write the ids, the positions and the mask of a tree, padded to so many rows."""
    first, nodes = slot * rows, len(tokens)
    ids, positions = array_at(own.ids, first + rows, np.int64), array_at(own.positions, first + rows, np.int64)
    fill_tree(ids[first:], positions[first:], root, tokens, parents, length)
    for row in range(first + nodes + 1, first + rows):
        ids[row], positions[row] = root, length
    array_at(own.starts, slot + 1, np.int64)[slot] = length
    if rows > 1:
        shown = array_at(own.shown, (slot + 1, 2), np.int64)[slot]
        mask = array_at(own.mask, (slot + 1, ROWS, own.mask_width), np.float32)[slot]
        hide_non_ancestors(mask, shown[0], shown[1], parents, length, HIDDEN_VALUE)
        for row in range(nodes + 1):
            for column in range(length + nodes + 1, length + rows):
                mask[row, column] = HIDDEN_VALUE
        shown[0], shown[1] = rows, length


@compiled
def _compute(own: Any, team: int, slots: int, rows: int, certain: Array, ranks: bool) -> bool:
    shape = own.shape
    own.ends[MAXIMA] = own.maxima if ranks else 0
    shape[SLOTS], shape[NEW], shape[TEAM] = slots, rows, team
    shape[MASK], shape[MASK_SLOT], shape[MASK_ROW] = own.mask if rows > 1 else 0, ROWS * own.mask_width, own.mask_width
    layers, starts = array_at(own.layers, (own.used, FIELDS), np.int64), array_at(own.starts, slots, np.int64)
    epsilons = own.epsilon, own.last_epsilon
    return compute_pass(shape, layers, starts, own.ends, *epsilons, certain, own.hidden, own.scratch)


@compiled
def _walk(own: Any, slot: int, rows: int, certain: Array, tokens: Array, parents: Array) -> tuple[int, bool]:
    outs, walked = own.ends[OUTS], array_at(own.walked, (slot + 1, 2, ROWS), np.int64)[slot]
    logits = own.ends[LOGITS] + slot * rows * outs * ITEM_SIZE
    return walk(logits, outs, outs, FLOAT32_INFINITY, certain, tokens, parents, len(tokens) + 1, walked)


def compile_tree_passes() -> None:
    """Compile them ahead, for a token that no model has."""
    numbers, record, bare = np.zeros(4, np.int64), np.zeros(1, TREE_PASS), DraftTree.bare(-1)
    for name in ("starts", "ids", "positions", "certain"):
        record[name] = numbers.ctypes.data
    record["ends"][0, IDS] = record["ends"][0, POSITIONS] = numbers.ctypes.data
    nodes, at = (bare.tokens, bare.parents), record.ctypes.data
    compute_tree(at, 0, bare.root, *nodes, NOTHING_CERTAIN, 0, True, False)
    compute_trees(at, 0, np.array([[-1, 0, 0, 1]]), *nodes, NOTHING_CERTAIN, 1, False, np.zeros((1, 2), np.int64))
