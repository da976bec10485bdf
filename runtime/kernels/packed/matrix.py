"""A matrix in blocks, usually mapped from a GGUF file; it is read-only."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Sequence
from typing import Any

import torch

from hdtool.runtime.kernels.packed.formats import BlockFormat
from hdtool.runtime.kernels.small_batch_gemm import unpack

PAGE_OUT = 21
"""MADV_PAGEOUT of Linux, which never loses what is in memory."""
DO_NOT_NEED = 4
"""MADV_DONTNEED of Linux, which discards pages that were written privately."""
ATEN = torch.ops.aten
ROW_ARGUMENTS = {ATEN.embedding.default: 1, ATEN.index.Tensor: 1, ATEN.index_select.default: 2}
"""Operations that copy rows, with the place of the argument that selects them."""


class PackedMatrix:
    """Has the methods of a 16-bit tensor that a ``CompactWeight`` and its products use."""

    dtype = torch.uint8

    def __init__(self, blocks: torch.Tensor, format: BlockFormat) -> None:
        """``blocks`` has the bytes of a matrix row in each row."""
        self.blocks, self.format = blocks, format
        self.shape = torch.Size((len(blocks), blocks.shape[1] // format.bytes * format.numbers))
        self.device = blocks.device
        self.itemsize, self.nbytes = format.bytes, blocks.nbytes

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, rows: slice) -> PackedMatrix:
        return PackedMatrix(self.blocks[rows], self.format)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that its numbers are read from."""
        return [self.blocks]

    def stride(self) -> tuple[int, ...]:
        return self.shape[1], 1

    def data_ptr(self) -> int:
        return self.blocks.data_ptr()

    def clone(self) -> PackedMatrix:
        return self

    def float(self) -> torch.Tensor:
        return self.into(torch.empty(self.shape, dtype=torch.float32))

    def page_out(self) -> None:
        """Let the system take the memory of the blocks: it reads what is used again from their file, or from its swap.

        A system that cannot do so keeps the memory.
        """
        self._advise(PAGE_OUT)

    def unmap(self) -> None:
        """Drop the mapped pages of the blocks; the file stays in the page cache."""
        self._advise(DO_NOT_NEED)

    def _advise(self, advice: int) -> None:
        if sys.platform == "linux":
            first = -(-self.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
            size = (self.data_ptr() + self.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
            if size > 0:
                ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), advice)

    def into(self, memory: torch.Tensor) -> torch.Tensor:
        """Write the numbers to contiguous memory of this shape in float32."""
        unpack(self.data_ptr(), self.format.kind, self.itemsize, len(self), self.shape[1], memory.data_ptr())
        return memory

    def rows(self, operation: Any, args: Sequence[Any], kwargs: Any) -> torch.Tensor | None:
        """The rows that an operation copies, in float32; None if it copies other parts."""
        selected = args[ROW_ARGUMENTS[operation] - 1]
        whole = args[0] == 0 if operation is ATEN.index_select.default else True
        if operation is ATEN.index.Tensor:
            whole = len(selected) == 1 and selected[0] is not None and selected[0].dtype != torch.bool
        if not whole:
            return None
        found = operation(self.blocks, *args, **kwargs)
        numbers = PackedMatrix(found.reshape(-1, self.blocks.shape[1]), self.format).float()
        return numbers.view(*found.shape[:-1], self.shape[1])

    def viewed(self, operation: Any, args: Sequence[Any]) -> PackedMatrix | torch.Tensor | None:
        """A view that needs no other numbers expanded than its own; None if there is none."""
        if operation in (ATEN.detach.default, ATEN.alias.default):
            return self
        if operation is ATEN.slice.Tensor and (not args or args[0] == 0) and args[3:] in ((), (1,)):
            first, last = (*args[1:3], None, None)[:2]
            return self[slice(first, last)]
        if operation is ATEN.select.int and args[0] == 0 and -len(self) <= args[1] < len(self):
            row = args[1] % len(self)
            return self[row : row + 1].float()[0]
        return None
