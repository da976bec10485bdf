"""Presents preallocated keys, values and recurrent states to the model's code as ``transformers`` caches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from hdtool.runtime.caches.kv_cache import NO_TENSOR, KVTensors, Views
from hdtool.runtime.caches.recurrent_states import StateLayer


class KVLayer(CacheLayerMixin):
    """A ``transformers`` cache layer whose keys and values are written by the ``KVView`` that contains it."""

    is_sliding = False  # old positions are kept; sliding windows are part of the masks
    supports_early_init = False

    def __init__(self, view: KVView, number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._view, self._number = view, number

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise AssertionError("the cache is allocated before the first forward pass")

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Views:
        keys, values = self._view.storage.layers[self._number]
        write, number = self._view.write, self._number
        return write(keys, key_states, number), write(values, value_states, number)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        keys = self._view.storage.indexers[self._number]
        return self._view.write(keys, indexer_key_states[:, None], self._number)[:, 0]

    def get_seq_length(self) -> int:
        return self._view.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._view.length + query_length, 0

    def get_max_length(self) -> int:
        return self._view.capacity


class LayerWithStates(StateLayer, KVLayer):  # type: ignore[override]
    """A ``transformers`` cache layer for a layer with both attention and a recurrence."""

    def __init__(self, view: KVView, number: int, states: StateLayer) -> None:
        KVLayer.__init__(self, view, number)
        vars(self).update(vars(states))

    def get_max_length(self) -> int:
        return KVLayer.get_max_length(self)


class KVView(Cache):
    """Base class of ``transformers`` caches that are views of the first slots in preallocated tensors."""

    def __init__(self, storage: KVTensors, slots: int, length: int, *, has_begun: bool) -> None:
        """``length`` is the length of the longest context; without ``has_begun``, states include no token yet."""
        self.storage, self.length, self.capacity = storage, length, storage.capacity
        states = storage.states.part(0, slots).layers(has_begun=has_begun) if storage.states else {}
        layers: list[Any] = []
        for number, (keys, _) in enumerate(storage.layers):
            state = states.get(number)
            if state is None:
                layers.append(KVLayer(self, number))
            else:
                layers.append(state if keys is NO_TENSOR else LayerWithStates(self, number, state))
        super().__init__(layers=layers)

    def write(self, tensor: torch.Tensor, new: torch.Tensor, layer: int) -> torch.Tensor:
        """Write a layer's ``new [slots, heads, rows, width]`` to a cached tensor; return the part that a pass reads."""
        raise NotImplementedError


class SlotKVCache(KVView):
    """A view for a pass that appends rows to contexts whose lengths the host knows."""

    def __init__(self, storage: KVTensors, lengths: Sequence[int], *, has_begun: bool = True) -> None:
        super().__init__(storage, len(lengths), max(lengths), has_begun=has_begun)
        self.lengths = lengths

    def write(self, tensor: torch.Tensor, new: torch.Tensor, layer: int) -> torch.Tensor:
        rows = new.shape[2]
        for slot, length in enumerate(self.lengths):
            tensor[slot].narrow(1, length, rows).copy_(new[slot])
        return tensor[: len(self.lengths), :, : self.length + rows]


class IndexedKVCache(KVView):
    """A view for a pass whose tensor shapes are fixed.

    The pass writes its rows at ``indices``, a tensor ``[slots, rows]``, and always reads ``extent`` positions; the mask
    hides positions after the context.
    """

    def __init__(self, storage: KVTensors, indices: torch.Tensor, extent: int) -> None:
        # Only the device knows the real length, since a captured step runs at different ones.
        super().__init__(storage, len(indices), 0, has_begun=True)
        self._indices, self._extent = indices, extent

    @cached_property
    def _slots(self) -> torch.Tensor:
        return torch.arange(len(self._indices), device=self._indices.device)[:, None]

    def write(self, tensor: torch.Tensor, new: torch.Tensor, layer: int) -> torch.Tensor:
        slots, indices = len(self._indices), self._indices.to(tensor.device)
        if slots == 1:
            tensor[:1].index_copy_(2, indices[0], new)
        else:
            tensor[self._slots.to(tensor.device), :, indices] = new.transpose(1, 2)
        return tensor[:slots, :, : self._extent]
