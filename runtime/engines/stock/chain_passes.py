"""Reads prompts and verifies chains of drafts with transformers' own code, for models that cannot verify trees."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hdtool.runtime.caches.recurrent_states import Snapshot
from hdtool.runtime.caches.replay_slots import ReplayCache, ReplayedCaches
from hdtool.runtime.caches.slots import Cache, Slot
from hdtool.runtime.core.engine_interface import PassOptions, Verified
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.engines.backend import StockBackend
from hdtool.runtime.engines.stock.model_facts import ModelFacts
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
    def prefill(self, tokens: Sequence[int], slot: Slot) -> torch.Tensor:
        slot.begin_prefill()
        logits, hidden = self._pass(slot, tokens, 1)
        slot.extend(tokens, None if hidden is None else hidden[-len(tokens) :])
        return logits

    def fit_tree(self, slot: Slot, tree: DraftTree) -> DraftTree:
        """Return the part of a tree that the slot's next pass verifies: the chain of first children.

        If more than ``MAX_WAITING`` tokens are waiting, that part is only the root.
        """
        if len(_waiting(slot)) > MAX_WAITING:
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
        rows = len(tree) + 1
        logits, hidden = self._pass(slot, tree.all_tokens, rows)
        return Verified(logits, None if hidden is None else hidden[-rows:])

    def _pass(self, slot: Slot, new: Sequence[int], keep: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run a pass over the tokens that wait in a slot and then ``new``; return ``(logits, hidden)``.

        ``logits`` are those of the last ``keep`` tokens. ``hidden`` has the hidden states of all tokens that were read,
        or is None if they aren't recorded.
        """
        stock, tokens, caches = self._stock, [*_waiting(slot), *new], _caches(slot)
        first, end = caches.filled.length, slot.length + len(new)
        ids = torch.tensor([tokens], device=stock.device)
        positions = torch.arange(first, end, device=stock.device)[None]
        options = dict.fromkeys(stock.last_only, keep)
        output = stock.call(ids, positions, None, caches.copy_of_filled(), **options)
        slot.hold_states(Snapshot(end, cache_in(output)))
        return output.logits[0, -keep:], stock.hidden.slot_rows(0, len(tokens))


def _waiting(slot: Slot) -> list[int]:
    """Return the accepted tokens that the slot's cache lacks; the next pass reads them first."""
    return slot.tokens[_caches(slot).filled.length :]


def _caches(slot: Slot) -> ReplayedCaches:
    assert isinstance(slot.kept, ReplayedCaches)
    return slot.kept
