"""Passes over draft trees in compiled code, where whole passes of the model are compiled."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hdtool.runtime.model.fused.layer_stack import check_layers_again, takes_number
from hdtool.runtime.model.fused.tree_pass import TreePass
from hdtool.runtime.tree import DraftTree
from hdtool.runtime.verified import LOGITS_ALONE, Verified, Want

if TYPE_CHECKING:
    from hdtool.runtime.model.cache.slots import Cache
    from hdtool.runtime.model.fused.whole_pass import WholePass
    from hdtool.runtime.model.stock_passes import StockPasses

PIECE = 128
"""Rows of a pass over a prompt in compiled layers; larger passes take longer for each row."""


class CompiledPasses:
    """The compiled passes of one model; off until there are some."""

    def __init__(self, stock: StockPasses) -> None:
        self._stock = stock
        self._by_slots: dict[int, TreePass] = {}
        """By the number of slots, for which a pass has memory."""

    def use(self, whole: WholePass | None) -> None:
        """Compute passes without the Python code of the model from now on, or with it again."""
        self._stock.whole = whole
        self._by_slots.clear()

    def check_again(self) -> None:
        """Before a prompt is read, compare modules and weights with those whose addresses are known."""
        check_layers_again(self._stock.model)
        if self._stock.whole:
            self._stock.whole.check_again()

    def piece_of_prompt(self) -> int | None:
        """The tokens of a prompt to read in one pass; None if compiled layers do not read prompts."""
        return PIECE if takes_number(self._stock.model, PIECE) else None

    def verify(self, cache: Cache, trees: Sequence[DraftTree], wants: Sequence[Want]) -> list[Verified] | None:
        """Verify a tree in each of the first slots; None for a pass that is not computed here."""
        slots, count = len(cache.slots), len(trees)
        passes = self._by_slots.get(slots)
        if passes is None:
            assert self._stock.whole
            passes = self._by_slots[slots] = TreePass(self._stock.whole, slots)
        started = time.perf_counter()
        if count == 1:
            verified = passes.verify_one(cache, trees[0], wants[0] if wants else LOGITS_ALONE)
        else:
            verified = passes.verify(cache, trees, wants or [LOGITS_ALONE] * count)
        if verified:
            most = len(trees[0].tokens) if count == 1 else max(len(tree.tokens) for tree in trees)
            self._stock.log.add(time.perf_counter() - started, most, count)
        return verified
