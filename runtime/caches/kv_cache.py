"""Static KV cache: preallocated keys and values of all layers, and the states of recurrent layers.

The accepted context comes first, directly followed by the tree being verified. Committing a path gathers its
positions in all layers at once, and the next step overwrites rejected positions. Recurrent states are those after the
accepted context: only committing a path changes them, not the pass over the tree.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from hdtool.runtime.caches.states import StateLayer, States, StateShape
from hdtool.runtime.kernels.compiled import Array, compiled, copy_floats

WORD_SIZE = 4
"""Number of bytes that ``move_positions`` moves at once."""


class TensorLayout(NamedTuple):
    """Address, sizes and byte strides of a tensor ``[rows, 1, heads, positions, width]``, for compiled code."""

    address: int
    rows: int
    row_size: int
    heads: int
    head_size: int
    position_size: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorLayout:
        strides = [stride * tensor.itemsize for stride in tensor.stride()]
        return cls(tensor.data_ptr(), tensor.shape[0], strides[0], tensor.shape[2], strides[2], strides[3])


def is_movable(tensor: torch.Tensor) -> bool:
    """Return True if ``move_positions`` supports a tensor.

    The tensor must be on a CPU and hold one sequence, in contiguous positions of whole words.
    """
    is_whole = tensor.is_cpu and tensor.shape[1] == 1 and tensor.stride()[3:] == (tensor.shape[4], 1)
    return is_whole and tensor.shape[4] * tensor.itemsize % WORD_SIZE == 0


@compiled
def move_positions(
    address: int,
    rows: int,
    row_size: int,
    heads: int,
    head_size: int,
    position_size: int,
    start: int,
    path: Array,
) -> None:
    """Move the contents of positions ``start + path`` to ``start``, ``start + 1`` and so on, in each row and head."""
    words = position_size // WORD_SIZE
    for row in range(rows):
        for head in range(heads):
            first = address + row * row_size + head * head_size + start * position_size
            for index in range(len(path)):
                copy_floats(first + path[index] * position_size, words, first + index * position_size)


def compile_moves() -> None:
    """Compile ``move_positions``, or load it from numba's cache, ahead of the first step."""
    move_positions(*TensorLayout(0, 0, 0, 0, 0, 0), 0, np.empty(0, np.int64))


PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
MAX_DEFERRED_MOVES = 16
"""Maximum number of positions that a captured step can move before it computes.

Longer paths are rare and moved immediately.
"""
NO_TENSOR = torch.empty(0)
"""Placeholder for the keys or values of a layer that has none."""
GROWTH = 64
"""Capacities are rounded up to a multiple of this, so that answers of similar length reuse a cache."""


@dataclass(frozen=True)
class HeadShape:
    """Shape, dtype and device of a layer's keys or values."""

    heads: int
    width: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> HeadShape:
        return cls(tensor.shape[1], tensor.shape[3], tensor.dtype, tensor.device)


class LayerShape(NamedTuple):
    """Shapes of the tensors that a layer caches; None for a tensor that it lacks or reads from another layer."""

    keys: HeadShape | None = None
    values: HeadShape | None = None
    indexer: HeadShape | None = None
    """Shape of the keys of an indexer, which selects the positions that attention reads."""

    @property
    def kept(self) -> list[HeadShape]:
        return [shape for shape in self if shape]


def layer_shapes(used: DynamicCache) -> list[LayerShape]:
    """Return the tensor shapes of each layer in a ``transformers`` cache that a forward pass filled."""

    def shape(tensor: torch.Tensor | None) -> HeadShape | None:
        return None if tensor is None else HeadShape.of(tensor)

    shapes = []
    for layer in used.layers:
        indexed = getattr(layer, "indexer_keys", None)
        of_indexer = None if indexed is None else shape(indexed[:, None])
        shapes.append(
            LayerShape(shape(getattr(layer, "keys", None)), shape(getattr(layer, "values", None)), of_indexer)
        )
    return shapes


class StaticLayer(CacheLayerMixin):
    """A ``transformers`` cache layer that forwards its updates to a cache of preallocated tensors."""

    is_sliding = False  # old positions are kept; sliding windows are part of the masks
    supports_early_init = False

    def __init__(self, cache: Any, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = cache
        self._index = index

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise AssertionError("the cache is allocated before the first forward pass")

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return cast("Views", self._cache.update(key_states, value_states, self._index))

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self._cache.update_indexer(indexer_key_states, self._index))

    def get_seq_length(self) -> int:
        return int(self._cache.length)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.length + query_length, 0

    def get_max_length(self) -> int:
        return int(self._cache.capacity)


class LayerWithStates(StateLayer, StaticLayer):  # type: ignore[override]
    """A ``transformers`` cache layer for a layer with both attention and a recurrence."""

    def __init__(self, cache: Any, index: int, states: StateLayer) -> None:
        StaticLayer.__init__(self, cache, index)
        vars(self).update(vars(states))

    def get_max_length(self) -> int:
        return StaticLayer.get_max_length(self)


def views_of_layers(cache: Any, layers: Sequence[Views], states: States | None, *, has_begun: bool) -> list[Any]:
    """Return a ``transformers`` cache layer for each model layer, with its keys and values, its states, or both."""
    state_layers = states.layers(has_begun=has_begun) if states else {}
    views: list[Any] = []
    for index, (keys, _) in enumerate(layers):
        state = state_layers.get(index)
        if state is None:
            views.append(StaticLayer(cache, index))
        else:
            views.append(state if keys is NO_TENSOR else LayerWithStates(cache, index, state))
    return views


Views = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class KVTensors:
    """The preallocated keys and values of all layers, and each layer's views of them.

    Keys and values of equal ``HeadShape`` share one tensor ``[rows, batch, heads, positions, width]``, with one row for
    the keys and one for the values of each layer. Indexer keys are stored likewise.
    """

    tensors: list[torch.Tensor]
    layers: list[Views]
    capacity: int
    states: States | None = None
    """Recurrent states of the same sequences; None if the model has none."""
    indexers: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """Indexer keys by layer, shape ``[batch, 1, positions, width]``; layers without an indexer are absent."""

    @classmethod
    def for_layers(
        cls, shapes: Sequence[LayerShape], capacity: int, batch: int = 1, states: Sequence[StateShape] = ()
    ) -> KVTensors:
        capacity = -(-capacity // GROWTH) * GROWTH
        rows = [shape for layer in shapes for shape in layer.kept]
        tensors = {
            shape: zeros((rows.count(shape), batch, shape.heads, capacity, shape.width), shape.dtype, shape.device)
            for shape in dict.fromkeys(rows)
        }
        free = {shape: iter(tensor) for shape, tensor in tensors.items()}
        views = [[next(free[shape]) if shape else NO_TENSOR for shape in layer] for layer in shapes]
        indexers = {number: indexed for number, (*_, indexed) in enumerate(views) if indexed is not NO_TENSOR}
        state_tensors = States.zeros(states, batch) if states else None
        held = [tensor for shape, tensor in tensors.items() if shape.width]
        return cls(held, [(keys, values) for keys, values, _ in views], capacity, state_tensors, indexers)

    @cached_property
    def layouts(self) -> list[TensorLayout] | None:
        """Tensor layouts for ``move_positions``; None if it doesn't support the tensors, for example on a GPU."""
        return [TensorLayout.of(tensor) for tensor in self.tensors] if all(map(is_movable, self.tensors)) else None

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors) + (self.states.bytes if self.states else 0)

    def slot_view(self, slot: int) -> KVTensors:
        """Return a view of the tensors that contains only one slot of the batch."""

        def part(view: torch.Tensor) -> torch.Tensor:
            return view if view is NO_TENSOR else view.narrow(0, slot, 1)

        views = [(part(keys), part(values)) for keys, values in self.layers]
        states = self.states.part(slot, 1) if self.states else None
        indexers = {number: part(keys) for number, keys in self.indexers.items()}
        return KVTensors([tensor.narrow(1, slot, 1) for tensor in self.tensors], views, self.capacity, states, indexers)


class StaticKVCache(Cache):
    """A ``transformers`` cache for one sequence in preallocated tensors."""

    def __init__(self, storage: KVTensors) -> None:
        super().__init__(layers=views_of_layers(self, storage.layers, storage.states, has_begun=False))
        self.storage = storage
        self.length = 0
        """Number of accepted tokens; later positions are not part of the context."""
        self.written_length = 0
        """Number of leading positions that passes may have written; all later ones are zero."""
        self.pending_move: tuple[int, list[int]] | None = None
        """Arguments ``(start, path)`` of the ``move`` that the next captured step makes; None if no move is pending."""
        self._interrupted_from: int | None = None
        """First target position of a move that may have been interrupted halfway, or None."""

    @property
    def slots(self) -> int:
        return 1

    @property
    def capacity(self) -> int:
        return self.storage.capacity

    @property
    def settled(self) -> int:
        """Number of accepted positions whose keys and values are right, or will be after the pending move."""
        return self.length if self._interrupted_from is None else self._interrupted_from

    def settle(self) -> None:
        """Make the pending move, if there is one."""
        if move := self.pending_move:
            self.begin_move()
            self.move(*move)
            self.end_move()

    def begin_move(self) -> None:
        """Mark the pending move as started. If it is interrupted before ``end_move``, it cannot be repeated."""
        if move := self.pending_move:
            self._interrupted_from, self.pending_move = move[0], None

    def end_move(self) -> None:
        self._interrupted_from = None

    def cut(self, length: int) -> None:
        """Keep only the first ``length`` positions."""
        if self.pending_move:
            if length > self.pending_move[0]:
                self.settle()
            self.pending_move = None
        self.length, self._interrupted_from = length, None

    def begin_states(self, *, has_begun: bool) -> None:
        """Set whether the recurrent states include any token; if not, the next pass ignores their contents."""
        for layer in self.layers:
            if isinstance(layer, StateLayer):
                layer.begin(has_begun)

    def mark_written(self, end: int) -> None:
        """Note that a pass writes to positions before ``end``."""
        self.written_length = max(self.written_length, end)

    def clear_from(self, position: int) -> None:
        """Zero all keys and values that earlier passes wrote from ``position`` on.

        A mask hides leftover values only if they are finite: attention multiplies them by 0, and 0 times NaN is NaN.
        """
        if self.written_length > position:
            for tensor in self.storage.tensors:
                tensor.narrow(3, position, min(self.written_length, self.capacity) - position).zero_()
            self.written_length = position

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Views:
        keys, values = self.storage.layers[layer_idx]
        new = key_states.shape[2]
        end = self.length + new
        self.mark_written(end)
        keys.narrow(2, self.length, new).copy_(key_states)
        values.narrow(2, self.length, new).copy_(value_states)
        return keys.narrow(2, 0, end), values.narrow(2, 0, end)

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        keys, new = self.storage.indexers[layer_idx][:, 0], indexer_key_states.shape[1]
        keys.narrow(1, self.length, new).copy_(indexer_key_states)
        return keys.narrow(1, 0, self.length + new)

    def room_for(self, new: int) -> tuple[KVTensors, list[int]]:
        """Return the tensors for the caller to write ``new`` positions to, and the first position, in a list."""
        self.mark_written(self.length + new)
        return self.storage, [self.length]

    def commit(self, fixed: int, path: Sequence[int], *, deferred: bool = False) -> None:
        """Accept the first ``fixed`` new positions and, of the positions after them, those at indices ``path``.

        With ``deferred``, the next captured step moves positions that must move, unless ``path`` is longer than
        ``MAX_DEFERRED_MOVES``.
        """
        start = self.length + fixed
        if must_move(path):
            if deferred and len(path) <= MAX_DEFERRED_MOVES:
                self.pending_move = start, list(path)
            else:
                self.move(start, path)
        self.length = start + len(path)

    def move(self, start: int, path: Sequence[int]) -> None:
        """Move the contents of positions ``start + path`` to ``start`` and onwards; ``path`` must increase."""
        if (layouts := self.storage.layouts) is None:
            self._move_by_torch(start, path)
            return
        offsets = np.array(path, np.int64)
        for layout in layouts:
            move_positions(*layout, start, offsets)

    @torch.inference_mode()
    def _move_by_torch(self, start: int, path: Sequence[int]) -> None:
        rows = [start + offset for offset in path]
        for tensor in self.storage.tensors:
            chosen = tensor.index_select(3, torch.tensor(rows, device=tensor.device))
            tensor.narrow(3, start, len(path)).copy_(chosen)

    def at(self, position: int) -> list[torch.Tensor]:
        """Return copies of the keys and values at one position, one tensor per ``HeadShape``."""
        return [tensor.narrow(3, position, 1).clone() for tensor in self.storage.tensors]

    def copy_from(self, source: StaticKVCache, length: int | None = None) -> None:
        """Copy the keys and values of the first ``length`` tokens of ``source``, by default all that are valid.

        They must fit in ``capacity`` positions.
        """
        source.settle()
        self.pending_move = self._interrupted_from = None
        self.length = source.settled if length is None else length
        for mine, theirs in zip(self.storage.tensors, source.storage.tensors, strict=True):
            mine.narrow(3, 0, self.length).copy_(theirs.narrow(3, 0, self.length))
        self.mark_written(self.length)
        self.clear_from(self.length)


def must_move(path: Sequence[int]) -> bool:
    """Return True if a path's positions must move; they needn't if its increasing offsets are 0, 1, 2 and so on."""
    return len(path) > 0 and path[-1] != len(path) - 1


class IndexedKVCache(Cache):
    """A ``transformers`` cache of a batch's first slots, for a pass whose tensor shapes are fixed.

    The pass writes its rows at ``indices``, a tensor ``[slots, rows]``, and always reads ``extent`` positions; the mask
    hides positions after the context.
    """

    def __init__(self, storage: KVTensors, indices: torch.Tensor, extent: int) -> None:
        states = storage.states.part(0, len(indices)) if storage.states else None
        super().__init__(layers=views_of_layers(self, storage.layers, states, has_begun=True))
        self.capacity = storage.capacity
        self.length = 0  # only the device knows the real length, since a captured step runs at different ones
        self._storage, self._indices, self._extent = storage, indices, extent

    @cached_property
    def _slots(self) -> torch.Tensor:
        return torch.arange(len(self._indices), device=self._indices.device)[:, None]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Views:
        keys, values = self._storage.layers[layer_idx]
        slots = len(self._indices)
        indices = self._indices.to(keys.device)
        for rows, new in ((keys, key_states), (values, value_states)):
            if slots == 1:
                rows[:1].index_copy_(2, indices[0], new)
            else:
                rows[self._slots.to(keys.device), :, indices] = new.transpose(1, 2)
        return keys[:slots, :, : self._extent], values[:slots, :, : self._extent]

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        keys = self._storage.indexers[layer_idx][:, 0]
        keys[self._slots.to(keys.device), self._indices.to(keys.device)] = indexer_key_states
        return keys[: len(self._indices), : self._extent]


class SlotKVCache(IndexedKVCache):
    """A ``transformers`` cache for a batch whose slots have contexts of different lengths, known on the host."""

    def __init__(self, storage: KVTensors, lengths: Sequence[int], new: int) -> None:
        """Prepare to write ``new`` positions to each of the first slots, after contexts of these ``lengths``."""
        super().__init__(storage, torch.tensor(lengths)[:, None] + torch.arange(new), max(lengths) + new)
        self.slots, self.length, self._lengths = len(lengths), max(lengths), list(lengths)

    def room_for(self, new: int) -> tuple[KVTensors, list[int]]:
        """Return the tensors for the caller to write ``new`` positions per slot to, and each slot's first position."""
        return self._storage, self._lengths


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of zeros; on a CPU it has a separate memory mapping, which is released with the tensor.

    Caches differ in size and live longer than other tensors. An allocator shared by caches and other tensors would
    fragment and keep more and more unused memory.
    """
    size = prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, size, **PRIVATE), dtype=dtype).view(shape)
