"""Reads prompts and verifies draft trees with transformers' own code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers.cache_utils import Cache as LibraryCache

from hdtool.runtime.caches.recurrent_states import States
from hdtool.runtime.caches.slots import Cache, Slot
from hdtool.runtime.core.engine_interface import PassOptions, Verified
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.engines.backend import StockBackend
from hdtool.runtime.engines.stock.model_facts import ModelFacts
from hdtool.runtime.engines.stock.stock_model import StockModel
from hdtool.runtime.model.pass_inputs import StepTensors, sent_step
from hdtool.runtime.model.refusals import rotary_switch


class TreePasses(StockBackend):
    """Runs passes of a model that can verify trees."""

    def __init__(self, stock: StockModel, facts: ModelFacts) -> None:
        self._stock, self._facts = stock, facts
        self._switch = rotary_switch(stock.config)

    def allocate(self, slots: int, capacity: int) -> Cache:
        return Cache(self._facts.shapes, slots, capacity, self._facts.state_shapes)

    def prefill(self, tokens: Sequence[int], slot: Slot) -> torch.Tensor:
        stock, first = self._stock, slot.length
        # A whole prompt needs no mask: the model makes its own, or uses a causal kernel.
        mask = stock.masks.continuation_mask(len(tokens), first) if first else None
        positions = range(first, first + len(tokens))
        cache = slot.view(len(tokens))
        slot.begin_prefill()
        option = stock.last_of_all if stock.hidden.is_watched else stock.last_only
        logits = stock.forward([list(tokens)], [positions], mask, cache, **option)[0, -1:]
        slot.extend(tokens, stock.hidden.slot_rows(0, len(tokens)))
        return logits

    @torch.inference_mode()
    def verify(self, cache: Cache, trees: Sequence[DraftTree], options: Sequence[PassOptions] = ()) -> list[Verified]:
        """Verify tree ``i`` in slot ``i``, all in one pass if the slots' rotary factors agree."""
        slots = cache.slots[: len(trees)]
        if len(trees) == 1 or self._have_other_factors(slots):
            return [self.verify_alone(slot, tree) for slot, tree in zip(slots, trees, strict=True)]
        view = cache.view(len(trees), max(map(len, trees)) + 1)
        return self._verify_together(trees, slots, view, cache.storage.states)

    def _have_other_factors(self, slots: Sequence[Slot]) -> bool:
        """Return True if the slots' lengths are on different sides of the length at which rotary factors change."""
        return self._switch is not None and len({slot.length >= self._switch for slot in slots}) > 1

    def verify_alone(self, slot: Slot, tree: DraftTree) -> Verified:
        return self._verify_together([tree], [slot], slot.view(len(tree) + 1), slot.states)[0]

    def _verify_together(
        self, trees: Sequence[DraftTree], slots: Sequence[Slot], view: LibraryCache, states: States | None
    ) -> list[Verified]:
        """Verify all trees in one pass, padded to equal size."""
        stock, lengths = self._stock, [slot.length for slot in slots]
        step = sent_step(trees, lengths, stock.device)
        mask = stock.masks.of_trees(trees, lengths, step)
        with self._over(trees, slots, states, view, step):
            logits: torch.Tensor = stock.call(step.tokens, step.positions, mask, view).logits
        stock.log.nodes, stock.log.slots = step.tokens.shape[1] - 1, len(trees)
        used = [len(tree) + 1 for tree in trees]
        return [Verified(logits[slot, :n], stock.hidden.slot_rows(slot, n)) for slot, n in enumerate(used)]

    @contextmanager
    def _over(
        self,
        trees: Sequence[DraftTree],
        slots: Sequence[Slot],
        states: States | None,
        cache: LibraryCache,
        step: StepTensors,
    ) -> Iterator[None]:
        """In this block, run recurrent layers over trees; then let each slot hold the pass's states for ``commit``."""
        recurrent = self._facts.recurrent
        if recurrent is None or states is None:
            yield
            return
        with recurrent.over(trees, states, cache, step) as states_of_rows:
            yield
        for place, slot in enumerate(slots):
            slot.hold_states(states_of_rows, place)
