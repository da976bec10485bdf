"""What the adaptation layers remember of a conversation: keys and values of accepted positions alone."""

from __future__ import annotations

from typing import Protocol

import torch

from hdtool.runtime.model.static_steps import extent_for

Places = slice | torch.Tensor
Seen = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Keys and values of a layer, and who of the new rows sees whom, if not all do."""


class Rows(Protocol):
    """Where a pass puts its new rows, and which ones it reads."""

    def places(self, new: int) -> Places:
        """The positions of so many new rows."""
        ...

    def reach(self, new: int) -> int:
        """No position is as large."""
        ...

    def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Seen:
        """Take new rows of a layer."""
        ...


class HeadsKVCache:
    """Keys and values ``[layers, 2, heads, rows, width]``; rejected drafts never come here."""

    def __init__(self, layers: int, heads: int, width: int, like: torch.Tensor) -> None:
        self.length = 0
        self.memory = like.new_zeros((layers, 2, heads, 0, width))

    def make_room(self, rows: int) -> None:
        """For so many rows in all."""
        old = self.memory
        if old.shape[3] < rows:
            self.memory = old.new_zeros((*old.shape[:3], extent_for(rows), old.shape[4]))
            self.memory[:, :, :, : self.length] = old[:, :, :, : self.length]

    @torch.inference_mode()
    def restart(self) -> None:
        """Begin another conversation; a mask hides rows of the last one only if they are finite."""
        self.memory.zero_()
        self.length = 0

    def places(self, new: int) -> slice:
        return slice(self.length, self.length + new)

    def reach(self, new: int) -> int:
        return self.length + new

    def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Seen:
        new, start = keys.shape[-2], self.length
        held = self.memory[layer]
        held[0, :, start : start + new] = keys[0]
        held[1, :, start : start + new] = values[0]
        mask = None
        if start and new > 1:
            mask = torch.ones((new, start + new), dtype=torch.bool, device=keys.device).tril_(start)
        return held[0, None, :, : start + new], held[1, None, :, : start + new], mask


class IndexedHeadsKVCache:
    """The same memory for a pass that is recorded: where its rows stand is read on the device."""

    def __init__(self, memory: torch.Tensor, places: torch.Tensor, extent: int) -> None:
        """The first ``extent`` rows are read, as far as each new one may see."""
        self._memory, self._places, self._extent = memory, places, extent
        self._mask = torch.arange(extent, device=places.device) <= places[:, None]

    def places(self, new: int) -> torch.Tensor:
        return self._places

    def reach(self, new: int) -> int:
        return self._extent

    def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Seen:
        held = self._memory[layer]
        held[0].index_copy_(1, self._places, keys[0])
        held[1].index_copy_(1, self._places, values[0])
        return held[0, None, :, : self._extent], held[1, None, :, : self._extent], self._mask
