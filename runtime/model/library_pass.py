"""A pass over trees in fixed shapes by the library's own code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from hdtool.runtime.engines.cuda.fused_pass import triton_operations
from hdtool.runtime.engines.cuda.operations import move_positions
from hdtool.runtime.engines.cuda.tree_attention import TreeAttention
from hdtool.runtime.model.attention_masks import Mask
from hdtool.runtime.model.cache.kv_cache import IndexedKVCache, KVTensors
from hdtool.runtime.model.static_steps import StepOutput

if TYPE_CHECKING:
    from hdtool.runtime.model.recurrent.in_closed_form import StackedStates
    from hdtool.runtime.model.step_input import StepTensors
    from hdtool.runtime.model.stock_passes import StockPasses
    from hdtool.runtime.model.target import Target


class LibraryPass:
    """Each layer by the library; attention by it, too, or by ``attention``, which reads no more than the contexts.

    The library's attention reads a fixed extent of the cache, and the mask hides what lies behind the contexts.
    """

    def __init__(self, stock: StockPasses, attention: TreeAttention | None = None) -> None:
        self._stock, self._attention = stock, attention
        self.reads_extent = attention is None

    def run(self, step: StepTensors, storage: KVTensors, extent: int) -> StepOutput:
        move_positions(storage.tensors, step)
        if self._attention is None:
            masks = self._stock.masks.on_device(step.ancestor_mask, step.positions, step.length, extent)
            return self._pass(step, storage, masks, extent)
        with self._attention.replacing(self._stock.model, step) as masks:
            found = self._pass(step, storage, masks, storage.capacity)
        if not self._attention.calls:
            raise NotImplementedError("layers that do not look their attention up")
        return found

    def _pass(self, step: StepTensors, storage: KVTensors, masks: Mask, extent: int) -> StepOutput:
        stock = self._stock
        indices = step.length[:, None] + torch.arange(step.tokens.shape[1], device=step.length.device)
        cache = IndexedKVCache(storage, indices, extent)
        given: dict[str, Any] = {"attention_mask": masks, "use_cache": True, "return_dict": True}
        if stock.takes_positions:
            given["position_ids"] = step.positions
        with self._over(step, storage, cache) as states:
            logits: torch.Tensor = stock.model(input_ids=step.tokens, **given, **{stock.cache_name: cache}).logits
        hidden = stock.hidden.of_pass if stock.hidden.is_watched else None
        return StepOutput(logits.flatten(0, 1), hidden, states() if states else None)

    def _over(
        self, step: StepTensors, storage: KVTensors, cache: IndexedKVCache
    ) -> AbstractContextManager[Callable[[], StackedStates] | None]:
        """Compute recurrent layers over the trees of the step."""
        recurrent = self._stock.recurrent
        return recurrent.over_step(step, storage.states, cache) if recurrent and storage.states else nullcontext()


def library_passes(target: Target) -> Iterator[LibraryPass]:
    """The passes by the library's code that may be captured, the faster one first."""
    operations, windows = triton_operations(target.device), target.stock.windows
    selects = any(shape.indexer for shape in target.shapes)  # by the mask, which attention of our own does not read
    if operations and not selects and not any(window.chunk for window in windows):
        yield LibraryPass(target.stock, TreeAttention(operations, windows))
    yield LibraryPass(target.stock)
