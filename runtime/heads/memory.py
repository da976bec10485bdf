"""What the adaptation layers remember of a conversation: keys and values of accepted positions alone."""

from __future__ import annotations

import torch

GROWTH = 256
"""Capacities are multiples of this."""


class HeadRows:
    """Keys and values ``[layers, 2, heads, rows, width]``; rejected drafts never come here."""

    def __init__(self, layers: int, heads: int, width: int, like: torch.Tensor) -> None:
        self.length = 0
        self._memory = like.new_zeros((layers, 2, heads, 0, width))

    def make_room(self, rows: int) -> None:
        """For so many rows in all."""
        old = self._memory
        if old.shape[3] < rows:
            self._memory = old.new_zeros((*old.shape[:3], -(-rows // GROWTH) * GROWTH, old.shape[4]))
            self._memory[:, :, :, : self.length] = old[:, :, :, : self.length]

    def update(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Take new rows of a layer: all of its keys and values, and who of the new ones sees whom, if not all do."""
        new, start = keys.shape[-2], self.length
        held = self._memory[layer]
        held[0, :, start : start + new] = keys[0]
        held[1, :, start : start + new] = values[0]
        mask = None
        if start and new > 1:
            mask = torch.ones((new, start + new), dtype=torch.bool, device=keys.device).tril_(start)
        return held[0, None, :, : start + new], held[1, None, :, : start + new], mask
