"""Reads prompts and verifies chains of drafts with transformers' own code, for models that cannot verify trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hdtool.runtime.caches.replay_slots import ReplayCache, ReplaySlot
from hdtool.runtime.caches.slots import Cache, Slot
from hdtool.runtime.core.engine import PassOptions, Verified
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.engines.backend import StockBackend
from hdtool.runtime.engines.stock.facts import ModelFacts
from hdtool.runtime.engines.stock.stock_model import StockModel
from hdtool.runtime.model.transformers_internals import cache_in

MAX_WAITING = 12
"""Maximum number of accepted tokens that a pass reads again together with drafts.

If more tokens are waiting, the pass verifies no drafts: none can be rejected, so the slot can keep the pass's cache.
"""


class ChainPasses(StockBackend):
    """Runs passes over chains, for a model that cannot verify trees.

    Each pass first reads the accepted tokens that the slot's cache lacks.
    """

    def __init__(self, stock: StockModel, facts: ModelFacts) -> None:
        self._stock, self._facts = stock, facts

    def allocate(self, slots: int, capacity: int) -> ReplayCache:
        return ReplayCache(self._facts.replaced, slots)

    @torch.inference_mode()
    def read(self, tokens: Sequence[int], slot: Slot) -> torch.Tensor:
        held = _replayed(slot)
        logits, after, hidden = self._pass(held, tokens, 1)
        held.read(tokens, after, None if hidden is None else hidden[-len(tokens) :])
        return logits

    def fit_tree(self, slot: Slot, tree: DraftTree) -> DraftTree:
        """Return the part of a tree that the slot's next pass verifies: the chain of first children.

        If more than ``MAX_WAITING`` tokens are waiting, that part is only the root.
        """
        if len(_replayed(slot).waiting) > MAX_WAITING:
            return DraftTree.bare(tree.root)
        return tree.first_chain()

    @torch.inference_mode()
    def verify(self, cache: Cache, trees: Sequence[DraftTree], options: Sequence[PassOptions] = ()) -> list[Verified]:
        """Verify chain ``i`` in slot ``i``, one after another; the log counts them as one pass."""
        log = self._stock.log
        passes, seconds = log.passes, log.seconds
        verified = [self.verify_alone(slot, tree) for slot, tree in zip(cache.slots, trees, strict=False)]
        log.passes, log.last_seconds = passes + 1, log.seconds - seconds
        log.nodes, log.slots = max(map(len, trees)), len(trees)
        return verified

    @torch.inference_mode()
    def verify_alone(self, slot: Slot, tree: DraftTree) -> Verified:
        assert tree.is_chain, "this model verifies chains"
        held, rows = _replayed(slot), len(tree) + 1
        logits, after, hidden = self._pass(held, tree.all_tokens, rows)
        held.verified(len(tree), after)
        return Verified(logits, None if hidden is None else hidden[-rows:])

    def _pass(self, held: ReplaySlot, new: Sequence[int], keep: int) -> tuple[torch.Tensor, Any, torch.Tensor | None]:
        """Run a pass over the slot's ``waiting`` tokens and then ``new``; return ``(logits, cache, hidden)``.

        ``logits`` are those of the last ``keep`` tokens. ``hidden`` has the hidden states of all tokens that were read,
        or is None if they aren't recorded.
        """
        stock, tokens = self._stock, [*held.waiting, *new]
        first = held.filled.length
        ids = torch.tensor([tokens], device=stock.device)
        positions = torch.arange(first, first + len(tokens), device=stock.device)[None]
        options = dict.fromkeys(stock.last_only, keep)
        output = stock.call(ids, positions, None, held.copy_of_filled(), **options)
        return output.logits[0, -keep:], cache_in(output), stock.hidden.slot_rows(0, len(tokens))


def _replayed(slot: Slot) -> ReplaySlot:
    assert isinstance(slot, ReplaySlot)
    return slot
