"""Passes over draft trees as one compiled call: token ids, positions and the mask are made where they are read.

Only the nodes of the tree and the length of the context differ from one pass of an answer to the next. Everything else
is an address in a record that is filled when an answer begins. A pass evicts the processor's caches, so each object of
Python on the way to the next one is read from main memory: there are few of them here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hdtool.runtime.accept import NOTHING_CERTAIN, walk
from hdtool.runtime.kernels.argmax import INFINITY, ArgmaxWalk, TreeLogits
from hdtool.runtime.kernels.compiled import Array, compiled
from hdtool.runtime.kernels.fused.layers import FIELDS, MASK, MASK_ROW, NEW, PASS_FIELDS, TEAM
from hdtool.runtime.kernels.fused.passes import END_FIELDS, IDS, LOGITS, OUTS, POSITIONS, compute_pass, pass_numbers
from hdtool.runtime.kernels.memory.raw_memory import array_at
from hdtool.runtime.kernels.team import team_of
from hdtool.runtime.model.attention_masks import hide_non_ancestors
from hdtool.runtime.model.step_input import fill_tree
from hdtool.runtime.tree import LARGEST_TREE, DraftTree

if TYPE_CHECKING:
    from hdtool.runtime.model.cache.kv_cache import StaticKVCache
    from hdtool.runtime.model.fused.whole_pass import WholePass

ROWS = LARGEST_TREE + 1
FLOAT32_INFINITY = INFINITY[torch.float32]
HIDDEN_VALUE = float(np.finfo(np.float32).min)
"""Of a mask, for positions that a row does not attend to."""

TREE_PASS = np.dtype(
    [
        ("shape", np.int64, PASS_FIELDS),
        ("ends", np.int64, END_FIELDS),
        ("layers", np.int64),  # the address of the table of layers, and how many there are
        ("used", np.int64),
        ("epsilon", np.float32),
        ("last_epsilon", np.float32),
        ("hidden", np.int64),  # addresses
        ("scratch", np.int64),
        ("mask", np.int64),
        ("mask_width", np.int64),
        ("shown_rows", np.int64),  # the square of the last mask
        ("shown_from", np.int64),
        ("start", np.int64, 1),
        ("ids", np.int64, ROWS),
        ("positions", np.int64, ROWS),
        ("walked", np.int64, (2, ROWS)),  # the tokens of the walk by arg-max, and the nodes that drafted them
    ],
    align=True,
)


class TreePass:
    """The passes over trees of one model, with the memory that they use in turn."""

    def __init__(self, whole: WholePass) -> None:
        self._whole = whole
        self._record = np.zeros(1, TREE_PASS)
        self._at = self._record.ctypes.data
        self._walked: Array = self._record["walked"][0]
        self._storage: object = None
        """The KV cache whose addresses the record has."""
        self._threads = 0
        self._own: list[bool] = []
        """Whether all products of a pass with so many rows are our own."""
        self._logits: list[TreeLogits] = []
        """Those of a pass by its number of rows, all in the same memory."""
        self._memory: list[Any] = []
        """What else the record has addresses of."""

    def restart(self) -> None:
        """Before the next pass, look at the model again."""
        self._storage = None

    def logits(self, tree: DraftTree, cache: StaticKVCache, *, walks: bool) -> TreeLogits | None:
        """The logits ``[rows, vocabulary]`` of the root and the nodes, valid until the next call.

        After a row with a certain token, they are those of this token alone. None for a pass that is not computed here.
        With ``walks``, the walk by arg-max is computed, too.
        """
        tokens, length, threads = tree.tokens, cache.length, torch.get_num_threads()
        if self._storage is not cache.storage or self._threads != threads:
            self._prepare(cache, threads)
        rows = len(tokens) + 1
        end = length + rows
        if not self._own[rows] or end > cache.capacity or torch.is_autocast_enabled("cpu"):
            return None
        certain = NOTHING_CERTAIN if tree.certain is None else tree.certain
        given = tree.root, tokens, tree.parents, certain, length, walks
        if threads == 1:
            found, finite = compute_tree(self._at, 0, *given)
        else:
            with team_of(threads).open() as team:
                found, finite = compute_tree(self._at, team, *given)
        if found < 0:
            return None
        if end > cache.used:
            cache.used = end
        self._whole.stack.passes += 1
        logits = self._logits[rows]
        logits.walk = ArgmaxWalk(*self._walked[:, :found].tolist(), finite) if walks else None
        return logits

    @torch.inference_mode()
    def _prepare(self, cache: StaticKVCache, threads: int) -> None:
        """Fill the record for a KV cache and a number of threads."""
        whole, stack = self._whole, self._whole.stack
        self._storage, self._threads = cache.storage, threads
        self._own = [whole.has_own_products(cache, rows) for rows in range(ROWS + 1)]
        if not any(self._own):
            return
        record: Any = self._record[0]
        record["shape"] = shape = stack.shape_of(1, ROWS, None, cache.storage)
        record["ends"] = whole.ends_below(cache.capacity)
        table, scratch = stack.with_cache(cache.storage), pass_numbers(shape, cache.capacity)
        record["layers"], record["used"] = table.ctypes.data, stack.used
        record["epsilon"], record["last_epsilon"] = stack.epsilon, whole.epsilon
        with torch.inference_mode(False):  # an inference tensor could not be written to outside of that mode
            memory = [torch.empty(ROWS, stack.width), torch.empty(scratch), torch.zeros(ROWS, cache.capacity)]
            if not self._logits:
                self._logits = TreeLogits.of_rows(torch.empty(ROWS, whole.outs))
        self._memory = [table, *memory]
        record["hidden"], record["scratch"], record["mask"] = (one.data_ptr() for one in memory)
        record["mask_width"] = cache.capacity
        record["shown_rows"] = record["shown_from"] = 0
        record["ends"][IDS] = self._at + TREE_PASS.fields["ids"][1]
        record["ends"][POSITIONS] = self._at + TREE_PASS.fields["positions"][1]
        record["ends"][LOGITS] = self._logits[0].bits.address


@compiled
def compute_tree(
    at: int, team: int, root: int, tokens: Array, parents: Array, certain: Array, length: int, walks: bool
) -> tuple[int, bool]:
    """Compute a pass by the record at an address.

    Returns the tokens of the walk by arg-max, if it ``walks``, and whether their logits are finite; -1 for a token or a
    position that the model does not have. No logits are computed after a row with a ``certain`` token; there is an
    entry for each row or none.
    """
    own = array_at(at, 1, TREE_PASS)[0]
    shape, rows = own.shape, len(tokens) + 1
    fill_tree(own.ids, own.positions, root, tokens, parents, length)
    own.start[0] = length
    shape[NEW], shape[TEAM], shape[MASK], shape[MASK_ROW] = rows, team, 0, own.mask_width
    if rows > 1:
        mask = array_at(own.mask, (ROWS, own.mask_width), np.float32)
        hide_non_ancestors(mask, own.shown_rows, own.shown_from, parents, length, HIDDEN_VALUE)
        own.shown_rows, own.shown_from, shape[MASK] = rows, length, own.mask
    layers = array_at(own.layers, (own.used, FIELDS), np.int64)
    epsilons = own.epsilon, own.last_epsilon
    if not compute_pass(shape, layers, own.start, own.ends, *epsilons, certain, own.hidden, own.scratch):
        return -1, False
    if not walks:
        return 0, True
    outs = own.ends[OUTS]
    return walk(own.ends[LOGITS], outs, outs, FLOAT32_INFINITY, certain, tokens, parents, rows, own.walked)


def compile_tree_passes() -> None:
    """Compile them ahead, for a token that no model has."""
    record, bare = np.zeros(1, TREE_PASS), DraftTree.bare(-1)
    record["ends"][0, IDS] = record.ctypes.data + TREE_PASS.fields["ids"][1]
    record["ends"][0, POSITIONS] = record.ctypes.data + TREE_PASS.fields["positions"][1]
    record["shape"][0, 0] = 1
    compute_tree(record.ctypes.data, 0, bare.root, bare.tokens, bare.parents, NOTHING_CERTAIN, 0, True)
