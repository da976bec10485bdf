"""Passes over a single tree by captured steps, as long as the model can be captured and computes the same."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from hdtool.data.errors import reason_of
from hdtool.runtime.model.cache.slots import Cache
from hdtool.runtime.model.checks.trees import two_steps
from hdtool.runtime.model.families import deviation
from hdtool.runtime.model.placement import scattered
from hdtool.runtime.model.static_steps import StaticSteps
from hdtool.runtime.tree import DraftTree
from hdtool.runtime.verified import Verified

if TYPE_CHECKING:
    from hdtool.runtime.model.cuda_graphs import Capture
    from hdtool.runtime.model.target import Target


class CapturedPasses:
    """The captured steps of a target; off where the model cannot be captured."""

    def __init__(self) -> None:
        self.steps: StaticSteps | None = None
        self._running: DraftTree | None = None
        """The tree of a step that was started and not waited for."""

    @torch.inference_mode()
    def enable(self, target: Target, capture: Capture) -> None:
        """Use captured steps from now on, if the model can be captured and gives the same logits."""
        if reason := scattered(target.model) or target.stock.row_by_row.reason:
            return self._disable(reason)
        # Captured steps are those of one cache, but an answer may still need what that holds.
        cache = target.cache if target.cache.user is None else target.allocate()
        expected = two_steps(target, cache)
        like = expected[0]
        self.steps = StaticSteps(target.model, target.stock.masks, like.shape[-1], like.dtype, capture)
        self.watch(target)
        # The first two are captured, and the next two replay them.
        found_twice = [*two_steps(target, cache), *two_steps(target, cache)]
        for found, usual in zip(found_twice, [*expected, *expected], strict=True):
            if self.steps and (distance := deviation(found, usual, target.rounding)):
                self._disable(f"its logits would be off by {distance}")
        cache.slots[0].cut(0)

    def watch(self, target: Target) -> None:
        """Copy hidden states in each step, too, if the target watches them."""
        if self.steps and target.hidden.is_watched:
            self.steps.watch(lambda: target.hidden.rows_of(0))

    def disable(self) -> None:
        self.steps = None

    def _disable(self, reason: str) -> None:
        print(f"note: the steps of this model are not captured as CUDA graphs: {reason}", file=sys.stderr)
        self.steps = None

    def forget(self) -> None:
        """Capture all steps again."""
        if self.steps:
            self.steps.forget()

    def capacity_for(self, needed: int, limit: int | None) -> int:
        """The capacity of a cache: one of few values, so that captured steps remain valid."""
        return self.steps.capacity_for(needed, limit) if self.steps else needed

    @torch.inference_mode()
    def verify(self, cache: Cache, trees: Sequence[DraftTree]) -> list[Verified] | None:
        """Start the verification of a tree; ``wait`` waits for it. None for a pass that is not captured."""
        if self.steps is None or len(cache.slots) > 1:
            return None
        (tree,) = trees
        start: Callable[[], Verified]
        try:
            start = self.steps.prepared(tree, cache.slots[0].kv)
        except Exception as error:  # model code that cannot be captured raises many kinds
            self._disable(reason_of(error))
            return None
        verified, self._running = start(), tree
        return [verified]

    def wait(self) -> tuple[float, int] | None:
        """Wait for the step that still runs: its seconds and the nodes of its tree; None if there is none."""
        if self.steps is None or self._running is None:
            return None
        nodes, self._running = len(self._running), None
        return self.steps.wait(), nodes
