"""Memory for the output of a large layer, used again for its next output once nobody holds the last one.

The logits of a tree have many megabytes. Memory of such a size goes back to the system whenever it is freed, and the
next pass gets new pages, which the system fills with zeros: milliseconds outside the pass, and as many inside of it.
"""

from __future__ import annotations

from typing import Any

import torch

SMALLEST = 1 << 18
"""Numbers of an output from which on its memory is kept; an allocator keeps smaller pieces itself."""
KEPT = 2
"""Pieces: a caller may hold the last output during the next pass."""
_holders: Any = getattr(torch._C, "_storage_Use_Count", None)


class OutputMemory:
    """The latest pieces of memory of one layer."""

    def __init__(self) -> None:
        self._pieces: list[tuple[torch.Tensor, int]] = []
        """Each with the number of its holders while nobody else holds it."""

    def room_for(self, rows: int, outs: int, like: torch.Tensor) -> torch.Tensor:
        """Uninitialized memory ``[rows, outs]`` that nobody else holds."""
        size = rows * outs
        if size < SMALLEST or _holders is None:
            return like.new_empty(rows, outs)
        for piece, alone in self._pieces:
            if piece.numel() >= size and piece.dtype == like.dtype and holders_of(piece) == alone:
                return piece[:size].view(rows, outs)
        with torch.inference_mode(False):  # an inference tensor could not be written to outside of that mode
            piece = like.new_empty(size)
        self._pieces = [*self._pieces, (piece, holders_of(piece))][-KEPT:]
        return piece.view(rows, outs)


def holders_of(tensor: torch.Tensor) -> int:
    """How many tensors, of Python or not, share the memory of this one."""
    return int(_holders(tensor.untyped_storage()._cdata))
