"""Passes over chains of drafts by the library's own code and cache, for models that cannot verify trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hdtool.runtime.model.cache.library_copies import Place
from hdtool.runtime.model.cache.replay_slots import ReplayCache, ReplaySlot
from hdtool.runtime.model.cache.slots import Cache
from hdtool.runtime.model.library import cache_in
from hdtool.runtime.model.stock_passes import StockPasses
from hdtool.runtime.tree import DraftTree
from hdtool.runtime.verified import Verified

MOST_WAITING = 12
"""A pass that reads more accepted tokens again verifies no drafts: what it leaves is kept for certain."""


class ReplayPasses:
    """The passes of one model."""

    def __init__(self, stock: StockPasses, shared: frozenset[Place]) -> None:
        self._stock, self._shared = stock, shared

    def allocate(self, slots: int) -> ReplayCache:
        return ReplayCache(self._shared, slots)

    @torch.inference_mode()
    def prefill(self, cache: Cache, slot: int, tokens: Sequence[int], start: int) -> Verified:
        """Read tokens after the first ``start`` ones of a slot."""
        held = _slot(cache, slot)
        held.cut(start)
        logits, after, hidden = self._pass(held, tokens, 1)
        held.read(tokens, after, None if hidden is None else hidden[-len(tokens) :])
        return Verified(logits, held.all_hidden())

    @staticmethod
    def fitted(cache: Cache, slot: int, tree: DraftTree) -> DraftTree:
        """The part of a tree that the next pass of a slot verifies: its first chain, or none if many tokens wait."""
        if len(_slot(cache, slot).waiting) > MOST_WAITING:
            return DraftTree.bare(tree.root)
        return tree.first_chain()

    @torch.inference_mode()
    def verify(self, cache: Cache, trees: Sequence[DraftTree]) -> list[Verified]:
        """Verify a chain in each of the first slots, one after another; it counts as one pass."""
        log = self._stock.log
        passes, seconds = log.passes, log.seconds
        found = [self.verify_alone(cache, slot, tree) for slot, tree in enumerate(trees)]
        log.passes, log.last_seconds = passes + 1, log.seconds - seconds
        log.nodes, log.slots = max(map(len, trees)), len(trees)
        return found

    @torch.inference_mode()
    def verify_alone(self, cache: Cache, slot: int, tree: DraftTree) -> Verified:
        assert tree.is_chain, "this model verifies chains"
        held, rows = _slot(cache, slot), len(tree) + 1
        logits, after, hidden = self._pass(held, tree.all_tokens, rows)
        held.verified(len(tree), after)
        held.tree, held.hidden_of_tree = tree, None if hidden is None else hidden[-rows:]
        return Verified(logits, held.hidden_of_tree)

    def _pass(self, held: ReplaySlot, new: Sequence[int], keep: int) -> tuple[torch.Tensor, Any, torch.Tensor | None]:
        """Read the tokens that wait, and new ones: the last logits, the cache after them, and hidden states."""
        stock, tokens = self._stock, [*held.waiting, *new]
        first = held.filled.length
        ids = torch.tensor([tokens], device=stock.device)
        positions = torch.arange(first, first + len(tokens), device=stock.device)[None]
        options = dict.fromkeys(stock.last_only, keep)
        output = stock.call(ids, positions, None, held.copy_of_filled(), **options)
        return output.logits[0, -keep:], cache_in(output), stock.hidden.of_slot(0, len(tokens))


def _slot(cache: Cache, slot: int) -> ReplaySlot:
    held = cache.slots[slot]
    assert isinstance(held, ReplaySlot)
    return held
