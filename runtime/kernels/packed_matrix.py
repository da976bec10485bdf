"""Weights that torchao quantized to 8 or 4 bits, in blocks that our product takes.

A block of Q8_0 has the scale by which its largest number becomes 127. One of Q4_0 has the scale by which the number
that is largest without its sign becomes -8. Numbers are divided by the scale in float32; then it is stored in float16.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hdtool.runtime.kernels.gemm import unpack
from hdtool.runtime.kernels.packed_formats import FORMATS, INT4, INT8, BlockFormat

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


class PackedExperts(PackedMatrix):
    """Matrices ``[experts, rows, columns]`` in blocks; the rows of an expert are in one part after another."""

    def __init__(self, parts: Sequence[PackedMatrix], number: int, *, is_transposed: bool = False) -> None:
        """Each part has some rows of the first of a ``number`` of experts, then as many of the second, and so on.

        A matrix that ``is_transposed`` is given to others with its rows as columns, as some modules have it.
        """
        first = parts[0]
        super().__init__(first.blocks, first.format)
        self.parts, self.is_transposed = tuple(parts), is_transposed
        rows, columns = sum(len(part) for part in parts) // number, first.shape[1]
        self.shape = torch.Size((number, columns, rows) if is_transposed else (number, rows, columns))
        self.nbytes = sum(part.nbytes for part in parts)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, experts: slice) -> PackedExperts:
        first, end, step = experts.indices(len(self))
        assert step == 1
        sizes = [len(part) // len(self) for part in self.parts]
        parts = [part[first * size : end * size] for part, size in zip(self.parts, sizes, strict=True)]
        return PackedExperts(parts, end - first, is_transposed=self.is_transposed)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [part.blocks for part in self.parts]

    def stride(self) -> tuple[int, ...]:
        _, rows, columns = self.shape
        return (rows * columns, 1, rows) if self.is_transposed else (rows * columns, columns, 1)

    def is_contiguous(self) -> bool:
        return not self.is_transposed

    def transpose(self, *dims: int) -> PackedExperts:
        assert set(dims) == {1, 2}
        return PackedExperts(self.parts, len(self), is_transposed=not self.is_transposed)

    def clone(self) -> PackedExperts:
        return self

    def page_out(self) -> None:
        for part in self.parts:
            part.page_out()

    def unmap(self) -> None:
        for part in self.parts:
            part.unmap()

    def float(self) -> torch.Tensor:
        parts = [part.float().view(len(self), -1, part.shape[1]) for part in self.parts]
        found = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return found.transpose(1, 2) if self.is_transposed else found

    def into(self, memory: torch.Tensor) -> torch.Tensor:
        return memory.copy_(self.float())

    def rows(self, operation: Any, args: Sequence[Any], kwargs: Any) -> torch.Tensor | None:
        """The experts that an operation copies, in float32; None if it copies other parts."""
        if operation is not ATEN.index.Tensor or len(args[0]) != 1 or args[0][0] is None:
            return None
        chosen = args[0][0]
        if chosen.dtype == torch.bool:
            return None
        found = [self[one : one + 1].float()[0] for one in (chosen.flatten() % len(self)).tolist()]
        return torch.stack(found).view(*chosen.shape, *self.shape[1:]) if found else None

    def viewed(self, operation: Any, args: Sequence[Any]) -> PackedMatrix | torch.Tensor | None:
        if operation is ATEN.transpose.int and {dim % 3 for dim in args} == {1, 2}:
            return self.transpose(1, 2)
        return super().viewed(operation, args)


TOGETHER = 1 << 20
"""Numbers that are rounded at a time."""
BY_NAME = {one.name: one for one in FORMATS.values()}
Q8_0, Q4_0 = BY_NAME["Q8_0"], BY_NAME["Q4_0"]
HALF_SIZE = 2


def quantized_matrix(weight: torch.Tensor, format: BlockFormat) -> PackedMatrix | None:
    """The blocks of a matrix; None if a number or a scale is infinite or NaN."""
    rows, columns = weight.shape
    blocks = torch.empty(rows, format.row_bytes(columns), dtype=torch.uint8)
    round_ = ROUNDED[format.name]
    step = max(1, TOGETHER // columns)
    for first in range(0, rows, step):
        part = weight[first : first + step].detach().float().reshape(-1, format.numbers)
        scales, levels = round_(part)
        stored = scales.half()
        if not (part.isfinite().all() and stored.isfinite().all()):
            return None
        written = blocks[first : first + step].view(-1, format.bytes)
        written[:, :HALF_SIZE] = stored.view(torch.uint8)
        written[:, HALF_SIZE:] = levels
    return PackedMatrix(blocks, format)


def _q8_0(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = blocks.abs().amax(1, keepdim=True) / 127
    return scales, _nearest(blocks * _inverse(scales)).to(torch.int8).view(torch.uint8)


def _q4_0(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    size, columns = blocks.abs(), torch.arange(blocks.shape[1])
    is_largest = size == size.amax(1, keepdim=True)
    # Of several the first one, which argmax does not promise.
    first = torch.where(is_largest, columns, len(columns) - 1).amin(1, keepdim=True)
    scales = blocks.gather(1, first) / -8
    levels = (blocks * _inverse(scales) + 8.5).clamp(0, 15).to(torch.uint8)
    half = levels.shape[1] // 2
    return scales, levels[:, :half] | levels[:, half:] << 4


ROUNDED: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {"Q8_0": _q8_0, "Q4_0": _q4_0}
"""The scales and the packed levels of blocks, by the name of the format."""


def _inverse(scales: torch.Tensor) -> torch.Tensor:
    return torch.where(scales == 0, 0, 1 / scales)


def _nearest(numbers: torch.Tensor) -> torch.Tensor:
    """The nearest integers; of two that are as near, the one farther from zero."""
    size = numbers.abs()
    whole = size.floor()
    return torch.copysign(whole + (2 * (size - whole)).floor(), numbers)


OF_ACTIVATIONS = ("act_quant_kwargs", "act_quant_scale", "act_quant_zero_point", "act_pre_scale")
"""Attributes of a weight whose layer changes its input."""
NUMBER = 4
"""Bytes of a scale in a block."""


def packed_weight(weight: Any) -> PackedMatrix | None:
    """The numbers of a weight that torchao quantized, without its activations; None for all others.

    They are those by which torchao multiplies an input in float32. torchao is not imported for that.
    """
    kind = type(weight)
    if kind.__module__.split(".")[0] != "torchao" or weight.dim() != 2 or not weight.is_cpu:
        return None
    if any(getattr(weight, name, None) is not None for name in OF_ACTIVATIONS):
        return None
    known = {"Int8Tensor": _of_int8, "Int4Tensor": _of_int4}
    return known[kind.__name__](weight) if kind.__name__ in known else None


def _of_int8(weight: Any) -> PackedMatrix | None:
    levels, group = weight.qdata, weight.block_size[-1]
    # With groups of columns, torchao rounds the numbers to the dtype of the weight.
    rounded = group < levels.shape[1] and weight.dtype != torch.float32
    if levels.dtype != torch.int8 or rounded or (weight.zero_point is not None and weight.zero_point.any()):
        return None
    return packed_int8(levels, weight.scale, group)


def _of_int4(weight: Any) -> PackedMatrix | None:
    octets = weight.qdata
    if octets.itemsize != 1 or weight.activation_dtype != torch.bfloat16:  # others are rounded to float8
        return None
    return packed_int4(octets.view(torch.uint8), weight.scale.t(), weight.zero_point.t(), weight.block_size[-1])


def packed_int8(levels: torch.Tensor, scales: torch.Tensor, group: int) -> PackedMatrix | None:
    """Integers of 8 bits, of which each ``group`` of columns has a scale; None if it has no whole blocks.

    ``scales`` has a row for each matrix row, or one for all.
    """
    return _packed(INT8, levels.view(torch.uint8), [scales], group)


def packed_int4(octets: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor, group: int) -> PackedMatrix | None:
    """The same for integers of 4 bits with a sign, to which a minimum is added: two columns in each byte."""
    outs, half = octets.shape
    if half % (INT4.numbers // 2):
        return None
    # Sixteen columns in the low halves of bytes, and the next ones in the high halves; -8 becomes 0.
    levels = torch.stack([octets & 15, octets >> 4], -1).view(outs, -1, 2, 16) ^ 8
    return _packed(INT4, (levels[:, :, 0] | levels[:, :, 1] << 4).view(outs, -1), [scales, minima], group)


def _packed(format: BlockFormat, octets: torch.Tensor, numbers: list[torch.Tensor], group: int) -> PackedMatrix | None:
    """Blocks of the numbers that each ``group`` of columns has, and of the octets of levels."""
    header = NUMBER * len(numbers)
    outs, size = len(octets), format.bytes - header
    columns = octets.shape[1] // size * format.numbers
    if not octets.numel() or octets.shape[1] % size or group % format.numbers:
        return None
    blocks = torch.empty(outs, columns // format.numbers, format.bytes, dtype=torch.uint8)
    for place, one in enumerate(numbers):
        fits = one.dim() == 2 and one.shape[0] in (1, outs) and one.shape[1] * group == columns
        if not fits or not one.is_floating_point() or one.itemsize > NUMBER:
            return None
        of_blocks = one.float().repeat_interleave(group // format.numbers, 1).expand(outs, -1).contiguous()
        blocks[..., place * NUMBER : (place + 1) * NUMBER] = of_blocks[..., None].view(torch.uint8)
    blocks[..., header:] = octets.view(outs, -1, size)
    return PackedMatrix(blocks.view(outs, -1), format)
