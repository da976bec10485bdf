"""Static KV cache: preallocated keys and values of all layers, and the states of recurrent layers.

The accepted context comes first, directly followed by the tree being verified. Committing a path moves its positions to
the end of the context, and the next step overwrites rejected positions. Recurrent states are those after the accepted
context: a pass over a tree leaves them unchanged, and committing a path advances them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from hdtool.data.memory import mapped_memory
from hdtool.runtime.caches.accepted_path_moves import (
    MAX_DEFERRED_MOVES,
    TensorLayout,
    move_on_host,
    move_ranges,
    must_move,
)
from hdtool.runtime.caches.recurrent_states import States, StateShape

NO_TENSOR = torch.empty(0)
"""Placeholder for the keys or values of a layer that has none."""
GROWTH = 64
"""Capacities are rounded up to a multiple of this, so that answers of similar length reuse a cache."""
MIN_EXTENT = 512
"""Smallest extent (cache positions that a captured step reads); others are ``2**n`` or ``1.5 * 2**n`` times this."""


def extent_for(rows: int) -> int:
    """Return the smallest extent with at least ``rows`` positions."""
    extent = MIN_EXTENT
    while extent < rows:
        if extent * 3 // 2 >= rows:
            return extent * 3 // 2
        extent *= 2
    return extent


@dataclass(frozen=True)
class HeadShape:
    """Shape, dtype and device of a layer's keys, values or indexer keys."""

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
    def _layouts(self) -> list[TensorLayout | None]:
        """Layout of each tensor for ``move_on_host``; None for a tensor that isn't on a CPU."""
        return [TensorLayout.of(tensor) if tensor.is_cpu else None for tensor in self.tensors]

    def move(self, start: int, path: Sequence[int]) -> None:
        """Move the contents of positions ``start + path`` to ``start``, ``start + 1`` and so on.

        The tensors must hold a single slot, and the offsets in ``path`` must increase.
        """
        offsets = np.array(path, np.int64)
        for tensor, layout in zip(self.tensors, self._layouts, strict=True):
            if layout:
                move_on_host(*layout, start, offsets)
            else:
                move_ranges(tensor, start, path)

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


class StaticKVCache:
    """The keys and values of one sequence, in preallocated tensors."""

    def __init__(self, storage: KVTensors) -> None:
        self.storage = storage
        self.length = 0
        """Number of accepted tokens; later positions are not part of the context."""
        self.written_length = 0
        """Number of leading positions that passes may have written; all later ones are zero."""
        self.pending_move: tuple[int, list[int]] | None = None
        """Arguments ``(start, path)`` of the move that the next captured step makes; None if no move is pending."""
        self._interrupted_from: int | None = None
        """First target position of a move that may have been interrupted halfway, or None."""

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
            self.storage.move(*move)
            self.end_move()

    def begin_move(self) -> None:
        """Mark the pending move, if any, as started: if interrupted before ``end_move``, it cannot be repeated."""
        if move := self.pending_move:
            self._interrupted_from, self.pending_move = move[0], None

    def end_move(self) -> None:
        self._interrupted_from = None

    def cut(self, length: int) -> None:
        """Keep only the first ``length`` positions; if the pending move writes to any of these, make it first."""
        if self.pending_move:
            if length > self.pending_move[0]:
                self.settle()
            self.pending_move = None
        self.length, self._interrupted_from = length, None

    def mark_written(self, end: int) -> None:
        """Note that a pass writes to positions before ``end``."""
        if end > self.written_length:
            self.written_length = end

    def clear_from(self, position: int) -> None:
        """Zero all keys and values that earlier passes wrote from ``position`` on.

        A mask hides leftover values only if they are finite: attention multiplies them by 0, and 0 times NaN is NaN.
        """
        if self.written_length > position:
            for tensor in self.storage.tensors:
                tensor.narrow(3, position, min(self.written_length, self.capacity) - position).zero_()
            self.written_length = position

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
                self.storage.move(start, path)
        self.length = start + len(path)

    def at(self, position: int) -> list[torch.Tensor]:
        """Return copies of the keys and values at one position, one tensor per ``HeadShape``."""
        return [tensor.narrow(3, position, 1).clone() for tensor in self.storage.tensors]

    def copy_from(self, source: StaticKVCache, length: int | None = None) -> None:
        """Copy the keys and values of the first ``length`` tokens of ``source``, by default all that are valid.

        The tokens must fit into ``capacity``; positions after them are zeroed. The pending move of ``source`` is made.
        """
        source.settle()
        self.pending_move = self._interrupted_from = None
        self.length = source.settled if length is None else length
        for mine, theirs in zip(self.storage.tensors, source.storage.tensors, strict=True):
            mine.narrow(3, 0, self.length).copy_(theirs.narrow(3, 0, self.length))
        self.mark_written(self.length)
        self.clear_from(self.length)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of zeros; on a CPU it has a separate memory mapping, which is released with the tensor.

    Caches differ in size and live longer than other tensors. An allocator shared by caches and other tensors would
    fragment and keep more and more unused memory.
    """
    size = prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mapped_memory(size), dtype=dtype).view(shape)
