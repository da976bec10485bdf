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

    def __init__(self, cache: StaticKVCache | SlotKVCache | IndexedKVCache, index: int) -> None:
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


Views = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Memory:
    """One tensor ``[keys and values of all layers, batch, heads, rows, width]``, and each layer's views on it.

    Models whose layers differ in shape, or live on several devices, get one tensor for each shape.
    """

    tensors: list[torch.Tensor]
    layers: list[Views]
    capacity: int

    @classmethod
    def for_layers(cls, shapes: Sequence[LayerShape], capacity: int, batch: int = 1) -> Memory:
        capacity = -(-capacity // GROWTH) * GROWTH
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
        return cls(list(tensors.values()), views, capacity)

    def of_slot(self, slot: int) -> Memory:
        """The part of one conversation of the batch."""

        def part(view: torch.Tensor) -> torch.Tensor:
            return view.narrow(0, slot, 1) if view.numel() else view

        views = [(part(keys), part(values)) for keys, values in self.layers]
        return Memory([tensor.narrow(1, slot, 1) for tensor in self.tensors], views, self.capacity)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class StaticKVCache(Cache):
    """The ``transformers`` cache of one conversation, over memory that is laid out once."""

    def __init__(self, memory: Memory) -> None:
        super().__init__(layers=[StaticLayer(self, index) for index in range(len(memory.layers))])
        self.memory = memory
        self.length = 0
        """Rows of accepted tokens; whatever lies behind them is not part of the context."""
        self.used = 0
        """No row from here on was ever written."""

    @property
    def capacity(self) -> int:
        return self.memory.capacity

    def clear_from(self, row: int) -> None:
        """Zero what earlier passes left from ``row`` on.

        A mask hides such rows only if they are finite: attention multiplies them by 0, and 0 times NaN is NaN.
        """
        if self.used > row:
            for tensor in self.memory.tensors:
                tensor.narrow(3, row, min(self.used, self.capacity) - row).zero_()
            self.used = row

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Views:
        keys, values = self.memory.layers[layer_idx]
        new = key_states.shape[2]
        end = self.length + new
        self.used = max(self.used, end)
        keys.narrow(2, self.length, new).copy_(key_states)
        values.narrow(2, self.length, new).copy_(value_states)
        return keys.narrow(2, 0, end), values.narrow(2, 0, end)

    def commit(self, fixed: int, path: Sequence[int]) -> None:
        """Accept the first ``fixed`` new rows and, behind them, those at ``path`` (offsets past ``fixed``)."""
        start = self.length + fixed
        if must_move(path):
            self.move(start, path)
        self.length = start + len(path)

    def move(self, start: int, path: Sequence[int]) -> None:
        """Put the rows at ``path``, counted from ``start``, there one after another."""
        rows = [start + offset for offset in path]
        for tensor in self.memory.tensors:
            chosen = tensor.index_select(3, torch.tensor(rows, device=tensor.device))
            tensor.narrow(3, start, len(path)).copy_(chosen)

    def copy_from(self, other: StaticKVCache) -> None:
        """Become another conversation, of the same memory or of one that was too small."""
        self.length = other.length
        for mine, theirs in zip(self.memory.tensors, other.memory.tensors, strict=True):
            mine.narrow(3, 0, self.length).copy_(theirs.narrow(3, 0, self.length))
        self.used = max(self.used, self.length)
        self.clear_from(self.length)


def must_move(path: Sequence[int]) -> bool:
    """Whether the rows of a path lie elsewhere than where they are kept."""
    return any(offset != place for place, offset in enumerate(path))


class IndexedKVCache(Cache):
    """The cache of a step whose shapes never change.

    New rows are written where a tensor says, and ``extent`` rows are read whatever the length: what
    lies behind the context is hidden by the mask.
    """

    def __init__(self, memory: Memory, places: torch.Tensor, extent: int) -> None:
        super().__init__(layers=[StaticLayer(self, index) for index in range(len(memory.layers))])
        self.capacity = memory.capacity
        self.length = 0  # known to the device alone; whatever asks shall not take one step's length for every step's
        self._memory, self._places, self._extent = memory, places, extent

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Views:
        keys, values = self._memory.layers[layer_idx]
        keys.index_copy_(2, self._places, key_states)
        values.index_copy_(2, self._places, value_states)
        return keys.narrow(2, 0, self._extent), values.narrow(2, 0, self._extent)


class SlotKVCache(Cache):
    """The cache of several conversations at once: row by row of a batch, each behind its own context."""

    def __init__(self, memory: Memory, lengths: Sequence[int], rows: int) -> None:
        """``rows`` are new in each of the first conversations of ``memory``, behind ``lengths`` old ones."""
        super().__init__(layers=[StaticLayer(self, index) for index in range(len(memory.layers))])
        self.capacity = memory.capacity
        self.length = max(lengths)
        self._memory = memory
        self._slots = torch.arange(len(lengths))[:, None]
        self._places = torch.tensor(lengths)[:, None] + torch.arange(rows)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Views:
        keys, values = self._memory.layers[layer_idx]
        end = self.length + key_states.shape[2]
        for rows, new in ((keys, key_states), (values, value_states)):
            slots, places = self._slots.to(rows.device), self._places.to(rows.device)
            rows[slots, :, places] = new.transpose(1, 2)
        return keys[: len(self._slots), :, :end], values[: len(self._slots), :, :end]
