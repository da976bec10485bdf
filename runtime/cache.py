"""The target's memory: keys and values of all layers in one static tensor.

Rows of the accepted context lie first, rows of the tree under check right behind them. Keeping a
path is one gather over all layers; rejected rows are simply overwritten by the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

GROWTH = 64
"""Capacities are multiples of this, so that conversations of similar length share a cache."""


@dataclass(frozen=True)
class RowShape:
    """What one layer stores for one token, as keys or as values."""

    heads: int
    width: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> RowShape:
        return cls(tensor.shape[1], tensor.shape[3], tensor.dtype, tensor.device)


LayerShape = tuple[RowShape, RowShape] | None
"""Shapes of a layer's keys and values; None where a layer stores nothing (it shares another's)."""


def layer_shapes(used: DynamicCache) -> list[LayerShape]:
    """Read off the cache that the model's own library filled in a forward pass."""
    shapes: list[LayerShape] = []
    for layer in used.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        shapes.append(None if keys is None or values is None else (RowShape.of(keys), RowShape.of(values)))
    return shapes


class StaticLayer(CacheLayerMixin):
    """One layer's window on the shared tensor, as the model's library wants to see it."""

    is_sliding = False  # old rows stay; sliding windows are applied in the masks
    supports_early_init = False

    def __init__(self, cache: StaticRows, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = cache
        self._index = index

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise AssertionError("the rows are laid out before the first forward pass")

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cache.update(key_states, value_states, self._index)

    def get_seq_length(self) -> int:
        return self._cache.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.length + query_length, 0

    def get_max_length(self) -> int:
        return self._cache.capacity


class StaticRows(Cache):
    """A ``transformers`` cache over one tensor ``[keys and values of all layers, batch, heads, rows, width]``.

    Models whose layers differ in shape, or live on several devices, get one tensor for each shape.
    """

    def __init__(self, shapes: Sequence[LayerShape], capacity: int, batch: int = 1) -> None:
        super().__init__(layers=[StaticLayer(self, index) for index in range(len(shapes))])
        self.capacity = -(-capacity // GROWTH) * GROWTH
        self.length = 0
        """Rows of accepted tokens; whatever lies behind them is not part of the context."""
        self._tensors, self._layers = _lay_out(shapes, self.capacity, batch)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._layers[layer_idx]
        new = key_states.shape[2]
        end = self.length + new
        keys.narrow(2, self.length, new).copy_(key_states)
        values.narrow(2, self.length, new).copy_(value_states)
        return keys.narrow(2, 0, end), values.narrow(2, 0, end)

    def keep(self, fixed: int, path: Sequence[int]) -> None:
        """Accept the first ``fixed`` new rows and, behind them, those at ``path`` (offsets past ``fixed``)."""
        start = self.length + fixed
        if any(offset != place for place, offset in enumerate(path)):
            rows = [start + offset for offset in path]
            for tensor in self._tensors:
                chosen = tensor.index_select(3, torch.tensor(rows, device=tensor.device))
                tensor.narrow(3, start, len(path)).copy_(chosen)
        self.length = start + len(path)


Views = tuple[torch.Tensor, torch.Tensor]


def _lay_out(shapes: Sequence[LayerShape], capacity: int, batch: int) -> tuple[list[torch.Tensor], list[Views]]:
    """The tensors, one for each shape of row, and every layer's views on them."""
    rows = [shape for layer in shapes if layer for shape in layer]
    tensors = {
        shape: torch.zeros(
            (rows.count(shape), batch, shape.heads, capacity, shape.width), dtype=shape.dtype, device=shape.device
        )
        for shape in dict.fromkeys(rows)
    }
    free = {shape: iter(tensor) for shape, tensor in tensors.items()}
    nothing = torch.empty(0)
    views = [(next(free[layer[0]]), next(free[layer[1]])) if layer else (nothing, nothing) for layer in shapes]
    return list(tensors.values()), views
