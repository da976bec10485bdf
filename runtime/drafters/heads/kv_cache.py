"""The KV cache of the adaptation layers, which holds accepted positions only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hdtool.runtime.model.static_steps import extent_for

if TYPE_CHECKING:
    from hdtool.runtime.drafters.heads.modules import Heads

Indices = slice | torch.Tensor
Attended = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Keys and values of a layer, and the attention mask of the new positions, if one is needed."""


class HeadsKVCache:
    """Keys and values ``[layers, 2, heads, positions, width]`` of accepted tokens."""

    def __init__(self, layers: int, heads: int, width: int, like: torch.Tensor) -> None:
        self.length = 0
        """Accepted tokens; 0 without layers."""
        self.keys_values = like.new_zeros((layers, 2, heads, 0, width))

    @classmethod
    def of(cls, heads: Heads) -> HeadsKVCache:
        """The empty cache of some heads."""
        shape = heads.shape
        return cls(len(heads.layers), shape.attention_heads, shape.width // shape.attention_heads, heads.like)

    def make_room(self, positions: int) -> None:
        """Grow to this number of positions."""
        old = self.keys_values
        if old.shape[3] < positions:
            self.keys_values = old.new_zeros((*old.shape[:3], extent_for(positions), old.shape[4]))
            self.keys_values[:, :, :, : self.length] = old[:, :, :, : self.length]

    @torch.inference_mode()
    def restart(self) -> None:
        """Clear the cache. Old values are zeroed, because a mask hides them only if they are finite."""
        self.keys_values.zero_()
        self.length = 0

    def indices(self, new: int) -> slice:
        """The indices of ``new`` new positions."""
        return slice(self.length, self.length + new)

    def bound(self, new: int) -> int:
        """An upper bound of all indices."""
        return self.length + new

    def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Attended:
        """Write keys and values of a layer; return those to attend to."""
        new, start = keys.shape[-2], self.length
        layer_cache = self.keys_values[layer]
        layer_cache[0, :, start : start + new] = keys[0]
        layer_cache[1, :, start : start + new] = values[0]
        mask = None
        if start and new > 1:
            mask = torch.ones((new, start + new), dtype=torch.bool, device=keys.device).tril_(start)
        return layer_cache[0, None, :, : start + new], layer_cache[1, None, :, : start + new], mask


class IndexedHeadsKVCache:
    """The same cache in a captured pass: indices are read on the device."""

    def __init__(self, keys_values: torch.Tensor, indices: torch.Tensor, extent: int) -> None:
        """The first ``extent`` positions are read, under a causal mask."""
        self._keys_values, self._indices, self._extent = keys_values, indices, extent
        self._mask = torch.arange(extent, device=indices.device) <= indices[:, None]

    def indices(self, new: int) -> torch.Tensor:
        return self._indices

    def bound(self, new: int) -> int:
        return self._extent

    def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Attended:
        layer_cache = self._keys_values[layer]
        layer_cache[0].index_copy_(1, self._indices, keys[0])
        layer_cache[1].index_copy_(1, self._indices, values[0])
        return layer_cache[0, None, :, : self._extent], layer_cache[1, None, :, : self._extent], self._mask


CacheView = HeadsKVCache | IndexedHeadsKVCache
"""Where a pass writes its new positions, and which positions it reads."""
