"""The product of torch with a weight that is kept in 16 bits or in blocks, for more rows than our own product takes.

The weight is expanded to float32 and given to the same function of torch, block by block, so that a block stays in the
cache. A block has all columns of some matrix rows, and torch adds up the products of each matrix row by itself, in an
order that could depend on the number of these rows. So the results of blocks and of the whole are compared, and where a
bit differs the whole weight is expanded.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from hdtool.runtime.kernels.compact_weight import Stored
from hdtool.runtime.kernels.memory.output_memory import OutputMemory
from hdtool.runtime.kernels.packed.matrix import PackedMatrix

BLOCK_NUMBERS = 1 << 18
"""Numbers of a block for each thread: a megabyte in float32, which the second cache of most processors holds."""
BLOCK_MULTIPLE = 64
"""Matrix rows of a block are a multiple of this, as libraries compute tiles of 64 or fewer."""
COMPARED_NUMBERS = 1 << 23


class BlockwiseLinear:
    """The product for weights of one shape."""

    def __init__(self) -> None:
        self._is_same: dict[tuple[int, int, bool], bool] = {}
        """By the number of threads, the magnitude of the number of rows, and whether there is a bias."""

    def __call__(
        self,
        input: torch.Tensor,
        stored: Stored,
        bias: torch.Tensor | None = None,
        memory: OutputMemory | None = None,
    ) -> torch.Tensor:
        outs, columns = stored.shape
        size = max(1, BLOCK_NUMBERS * torch.get_num_threads() // columns // BLOCK_MULTIPLE) * BLOCK_MULTIPLE
        if size >= outs or not self._holds(input, stored, bias, size):
            return linear(input, stored.float(), bias)
        rows = input.numel() // columns
        found = memory.room_for(rows, outs, input) if memory else input.new_empty(rows, outs)
        found = found.view(*input.shape[:-1], outs)
        return _by_blocks(input, stored, bias, size, found)

    def _holds(self, input: torch.Tensor, stored: Stored, bias: torch.Tensor | None, size: int) -> bool:
        rows = input.numel() // stored.shape[1]
        case = torch.get_num_threads(), rows.bit_length(), bias is not None
        if case not in self._is_same:
            part = stored[: max(2 * size, COMPARED_NUMBERS // stored.shape[1])]
            bias = None if bias is None else bias[: len(part)]
            numbers = torch.randn(input.shape, generator=torch.Generator().manual_seed(0), dtype=input.dtype)
            whole = linear(numbers, part.float(), bias)
            self._is_same[case] = torch.equal(_by_blocks(numbers, part, bias, size, torch.empty_like(whole)), whole)
        return self._is_same[case]


def _by_blocks(
    input: torch.Tensor, stored: Stored, bias: torch.Tensor | None, size: int, found: torch.Tensor
) -> torch.Tensor:
    memory = input.new_empty(size, stored.shape[1])
    for first in range(0, len(stored), size):
        block = stored[first : first + size]
        place = memory[: len(block)]
        expanded = block.into(place) if isinstance(block, PackedMatrix) else place.copy_(block)
        last = first + len(block)
        found[..., first:last] = linear(input, expanded, None if bias is None else bias[first:last])
    return found
