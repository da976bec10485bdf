"""A pass over trees in fixed shapes by the library's own code."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hdtool.runtime.engines.cuda.operations import move_positions
from hdtool.runtime.model.cache.kv_cache import IndexedKVCache, KVTensors
from hdtool.runtime.model.static_steps import StepOutput

if TYPE_CHECKING:
    from hdtool.runtime.model.step_input import StepTensors
    from hdtool.runtime.model.stock_passes import StockPasses


class LibraryPass:
    """Attention reads a fixed extent of the cache; the mask hides what lies behind the contexts."""

    reads_extent = True

    def __init__(self, stock: StockPasses) -> None:
        self._stock = stock

    def run(self, step: StepTensors, storage: KVTensors, extent: int) -> StepOutput:
        stock = self._stock
        move_positions(storage.tensors, step)
        rows = step.tokens.shape[1]
        indices = step.length[:, None] + torch.arange(rows, device=step.length.device)
        logits: torch.Tensor = stock.model(
            input_ids=step.tokens,
            position_ids=step.positions,
            attention_mask=stock.masks.on_device(step.ancestor_mask, step.positions, step.length, extent),
            use_cache=True,
            return_dict=True,
            **{stock.cache_name: IndexedKVCache(storage, indices, extent)},
        ).logits
        return StepOutput(logits.flatten(0, 1), stock.hidden.of_pass if stock.hidden.is_watched else None)
