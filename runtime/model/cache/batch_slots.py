"""The KV cache of a batch: one slot for each request that is being answered."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hdtool.runtime.model.cache.kv_cache import SlotKVCache, StaticKVCache
from hdtool.runtime.model.fused.tree_pass import TreePass
from hdtool.runtime.model.step_input import TreeInput
from hdtool.runtime.tree import LARGEST_TREE, DraftTree

if TYPE_CHECKING:
    from hdtool.runtime.model.target import Target

ROOM = 512
"""Positions that are allocated for an answer; the cache grows if it becomes longer."""


class BatchSlots:
    """The KV cache of a batch of requests; the first slots are in use."""

    def __init__(self, target: Target, size: int) -> None:
        self._target = target
        self._size = size
        self._caches: list[StaticKVCache] = []
        self._pending: list[int] = []
        self._input = TreeInput(target.device)
        self._pass: TreePass | None = None
        self._allocate(0)

    @torch.inference_mode()
    def prefill(self, slot: int, context: Sequence[int], room: int) -> torch.Tensor:
        """Prefill a slot with a whole context and return the logits ``[1, vocabulary]`` after it."""
        self._provide(len(context) + min(room, ROOM))
        self._pending[slot] = len(context)
        self._caches[slot].clear_from(len(context))
        return self._target.read(context, self._caches[slot])

    @torch.inference_mode()
    def load(self, slot: int, cache: StaticKVCache, room: int) -> None:
        """Copy a context into a slot, after which ``room`` tokens may follow."""
        self._provide(cache.length + min(room, ROOM))
        self._pending[slot] = 0
        self._caches[slot].copy_from(cache)

    @torch.inference_mode()
    def saved(self, slot: int) -> StaticKVCache:
        """A copy of the context of a slot."""
        cache = self._target.new_cache(self._caches[slot].length)
        cache.copy_from(self._caches[slot])
        return cache

    def length(self, slot: int) -> int:
        """Accepted tokens in a slot."""
        return self._caches[slot].length

    @torch.inference_mode()
    def recompute(self, slot: int, root: int) -> torch.Tensor:
        """Verify the root of one slot without drafts, after a pass with drafts overflowed."""
        target, cache = self._target, self._caches[slot]
        cache.clear_from(cache.length)
        all_hidden = target.all_hidden
        mask = target.masks.of_tree(DraftTree.bare(root), cache.length)
        logits = target.forward([[root]], [[cache.length]], mask, cache)[0]
        target.all_hidden = all_hidden  # the drafters of the other slots still read theirs
        return logits

    def verify(
        self, trees: Sequence[DraftTree], walks: Sequence[bool] = (), *, rank: bool = False
    ) -> list[torch.Tensor]:
        """Verify one tree in each of the first slots: logits ``[1 + nodes, vocabulary]`` for each.

        They are valid until the next call. Where ``walks`` says so, a compiled pass computes the walk by arg-max, too,
        and with ``rank`` what top-k needs of each row.
        """
        lengths = [cache.length for cache, _ in zip(self._caches, trees, strict=False)]
        if max(lengths) + LARGEST_TREE >= self._storage.capacity:
            self._provide(max(lengths) + max(ROOM, max(lengths) // 2))
        self._pending[: len(trees)] = [1] * len(trees)
        found = self._in_one_call(trees, lengths, walks or [False] * len(trees), rank)
        return found or self._verify_by_torch(trees, lengths)

    def _in_one_call(
        self, trees: Sequence[DraftTree], lengths: Sequence[int], walks: Sequence[bool], rank: bool
    ) -> list[torch.Tensor] | None:
        """Verify the trees in one compiled call; None where that cannot be."""
        whole = self._target.whole_pass
        if not whole:
            return None
        if self._pass is None:
            self._pass = TreePass(whole, self._size)
        started = time.perf_counter()
        found = self._pass.logits_of_batch(trees, self._storage, lengths, walks, ranks=rank)
        if found:
            rows = max(map(len, found))
            self._target.count_pass(time.perf_counter() - started, rows - 1, len(trees))
            self._note_used(lengths, rows)
        return found

    def _note_used(self, lengths: Sequence[int], rows: int) -> None:
        for cache, length in zip(self._caches, lengths, strict=False):
            cache.used = max(cache.used, length + rows)

    @torch.inference_mode()
    def _verify_by_torch(self, trees: Sequence[DraftTree], lengths: Sequence[int]) -> list[torch.Tensor]:
        target = self._target
        mask = target.masks.of_batch(trees, lengths)
        ids, positions = self._input.of_batch(trees, lengths)
        most = ids.shape[1]
        self._note_used(lengths, most)
        logits = target.run(ids, positions, mask, SlotKVCache(self._storage, lengths, most))
        target.nodes_of_last_pass, target.slots_of_last_pass = most - 1, len(trees)
        return [logits[slot, : len(tree) + 1] for slot, tree in enumerate(trees)]

    def commit(self, slot: int, path: Sequence[int]) -> None:
        """Append the root and the nodes of ``path`` to the context of a slot."""
        self._caches[slot].commit(self._pending[slot], path)

    @torch.inference_mode()
    def move(self, slot: int, to: int) -> None:
        self._caches[to].copy_from(self._caches[slot])

    def _provide(self, length: int) -> None:
        """Provide capacity for ``length`` tokens in each slot, and the largest tree after them."""
        if (needed := length + LARGEST_TREE + 1) > self._storage.capacity:
            self._allocate(needed)

    @torch.inference_mode()
    def _allocate(self, capacity: int) -> None:
        """Allocate a cache for ``capacity`` tokens a slot and copy the slots in use into it."""
        self._storage = self._target.allocate(capacity, self._size)
        caches = [StaticKVCache(self._storage.of_slot(slot)) for slot in range(self._size)]
        for new, old in zip(caches, self._caches, strict=False):
            new.copy_from(old)
        self._caches = caches
        self._pending = self._pending or [0] * self._size
