"""Passes over draft trees in one compiled call, with the memory that they use in turn.

A pass evicts the processor's caches, so each object of Python on the way to the next one is read from main memory:
there are few of them here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import get_num_threads, is_autocast_enabled

from hdtool.runtime.kernels.compiled import Array
from hdtool.runtime.kernels.fused.passes import IDS, LOGITS, POSITIONS, pass_numbers
from hdtool.runtime.kernels.team import ALONE, team_of
from hdtool.runtime.kernels.topk import folded_size
from hdtool.runtime.model.fused.tree_kernel import ROWS, TREE_PASS, compute_tree, compute_trees
from hdtool.runtime.sampling.walks import NOTHING_CERTAIN
from hdtool.runtime.tree import OPEN, DraftTree
from hdtool.runtime.verified import Verified, Walk, Want

if TYPE_CHECKING:
    from hdtool.runtime.model.cache.kv_cache import KVTensors
    from hdtool.runtime.model.cache.slots import Cache
    from hdtool.runtime.model.fused.whole_pass import WholePass


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
        self._views: dict[tuple[int, int], torch.Tensor] = {}
        """Logits by their first row and their number."""

    def verify(self, cache: Cache, trees: Sequence[DraftTree], wants: Sequence[Want]) -> list[Verified] | None:
        """Verify a tree in each of the first slots; None for a pass that is not computed here.

        After a row with a certain token, the logits are those of this token alone.
        """
        lengths = [slot.kv.length for slot, _ in zip(cache.slots, trees, strict=False)]
        rows = max(len(tree.tokens) for tree in trees) + 1
        if not self._takes(cache.storage, len(trees) * rows, max(lengths) + rows):
            return None
        heads = np.array(
            [
                (tree.root, len(tree.tokens), length, want.walk)
                for tree, length, want in zip(trees, lengths, wants, strict=True)
            ],
            np.int64,
        )
        tokens = np.concatenate([tree.tokens for tree in trees])
        parents = np.concatenate([tree.parents for tree in trees])
        ranks = any(want.rank for want in wants)
        with self._team() as team:
            known = compute_trees(self._at, team, heads, tokens, parents, _certain_of(trees), rows, ranks, self._found)
        if not known:
            return None
        self._whole.stack.passes += 1
        verified: list[Verified] = []
        walks = self._found[: len(trees)].tolist()
        for slot, (tree, want, (length, finite)) in enumerate(zip(trees, wants, walks, strict=True)):
            kv, first, used = cache.slots[slot].kv, slot * rows, len(tree.tokens) + 1
            kv.used = max(kv.used, kv.length + rows)
            walk = Walk.of(self._walked[slot], length, bool(finite)) if want.walk else None
            maxima = self._maxima[first : first + used] if want.rank else None
            verified.append(Verified(self._view(first, used), walk=walk, maxima=maxima))
        return verified

    def verify_one(self, cache: Cache, tree: DraftTree, want: Want) -> list[Verified] | None:
        """Verify a tree in the first slot."""
        kv, rows = cache.slots[0].kv, len(tree.tokens) + 1
        length = kv.length
        end = length + rows
        if not self._takes(cache.storage, rows, end):
            return None
        certain = NOTHING_CERTAIN if tree.certain is None else tree.certain
        given = tree.root, tree.tokens, tree.parents, certain, length, want.walk, want.rank
        if self._threads == 1:
            found, finite = compute_tree(self._at, 0, *given)
        else:
            with self._team() as team:
                found, finite = compute_tree(self._at, team, *given)
        if found < 0:
            return None
        if end > kv.used:
            kv.used = end
        self._whole.stack.passes += 1
        walk = Walk.of(self._walked[0], found, finite) if want.walk else None
        return [Verified(self._view(0, rows), walk=walk, maxima=self._maxima[:rows] if want.rank else None)]

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

    def _view(self, first: int, rows: int) -> torch.Tensor:
        found = self._views.get((first, rows))
        if found is None:
            found = self._views[first, rows] = self._logits[first : first + rows]
        return found


def _certain_of(trees: Sequence[DraftTree]) -> Array:
    """The certain tokens of all rows of all trees, if there is any."""
    if all(tree.certain is None for tree in trees):
        return NOTHING_CERTAIN
    return np.concatenate([np.full(len(tree) + 1, OPEN) if tree.certain is None else tree.certain for tree in trees])
