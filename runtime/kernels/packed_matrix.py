"""Matrices in packed blocks: read from GGUF files, converted from torchao or MXFP4, or quantized to Q8_0 or Q4_0.

When quantizing, the number of largest magnitude in a block becomes 127 or -127 in Q8_0 and -8 in Q4_0. Numbers are
divided by the float32 scale, which is then stored in float16.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hdtool.data.memory import HUGE_PAGE, mapped_memory
from hdtool.runtime.kernels.compiled import Array, compiled
from hdtool.runtime.kernels.gemm_tiles import unpack_matrix
from hdtool.runtime.kernels.matmul import COLUMN_MULTIPLE
from hdtool.runtime.kernels.matrix_formats import FORMATS_BY_NAME, INT4, INT8, BlockFormat

MADV_PAGEOUT = 21
"""Linux's ``madvise`` advice to page memory out, which never loses data."""
ATEN = torch.ops.aten
ROW_ARGUMENTS = {ATEN.embedding.default: 1, ATEN.index.Tensor: 1, ATEN.index_select.default: 2}
"""Position of the index argument in each operation that gathers rows of its first argument."""


def weight_memory(size: int) -> torch.Tensor:
    """Return ``size`` bytes of memory for a weight, in huge pages if the size is at least that of one."""
    if size < HUGE_PAGE:
        return torch.empty(size, dtype=torch.uint8)
    return torch.frombuffer(mapped_memory(size, huge_pages=True), dtype=torch.uint8)


class PackedMatrix:
    """A matrix in packed blocks, with the tensor methods that ``CompactWeight`` and its matmuls use."""

    dtype = torch.uint8

    def __init__(self, blocks: torch.Tensor, format: BlockFormat) -> None:
        """``blocks`` is a uint8 tensor whose rows hold the bytes of one matrix row each."""
        self.blocks, self.format = blocks, format
        self.shape = torch.Size((len(blocks), blocks.shape[1] // format.bytes * format.block_size))
        self.device = blocks.device
        self.nbytes = blocks.nbytes

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> PackedMatrix:
        return PackedMatrix(self.blocks[rows], self.format)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors that hold the blocks."""
        return [self.blocks]

    def stride(self) -> tuple[int, ...]:
        return self.shape[1], 1

    def data_ptr(self) -> int:
        return self.blocks.data_ptr()

    def clone(self) -> PackedMatrix:
        return self

    def float(self) -> torch.Tensor:
        memory = torch.empty(self.shape, dtype=torch.float32)
        unpack_matrix(self.format, self.data_ptr(), len(self), self.shape[1], memory.data_ptr())
        return memory

    def page_out(self) -> None:
        """Let the system page out the blocks; they are read back from their file or swap on use.

        This has an effect only on Linux.
        """
        if sys.platform == "linux":
            first = -(-self.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
            size = (self.data_ptr() + self.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
            if size > 0:
                ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), MADV_PAGEOUT)

    def rows(self, operation: Any, args: Sequence[Any], kwargs: Any) -> torch.Tensor | None:
        """Return the rows that an operation gathers, in float32; None if it doesn't gather whole rows."""
        selected = args[ROW_ARGUMENTS[operation] - 1]
        copies_rows = args[0] == 0 if operation is ATEN.index_select.default else True
        if operation is ATEN.index.Tensor:
            copies_rows = len(selected) == 1 and selected[0] is not None and selected[0].dtype != torch.bool
        if not copies_rows:
            return None
        copied = operation(self.blocks, *args, **kwargs)
        numbers = PackedMatrix(copied.reshape(-1, self.blocks.shape[1]), self.format).float()
        return numbers.view(*copied.shape[:-1], self.shape[1])

    def viewed(self, operation: Any, args: Sequence[Any]) -> PackedMatrix | torch.Tensor | None:
        """Return a view operation's result, or None if the operation doesn't keep or select whole rows."""
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
    """Matrices ``[experts, rows, columns]`` in packed blocks, split into parts, each with some rows of every expert."""

    def __init__(
        self,
        parts: Sequence[PackedMatrix],
        experts: int,
        *,
        is_transposed: bool = False,
        is_interleaved: bool = False,
    ) -> None:
        """Each part holds the same number of rows of each expert, in expert order.

        With ``is_transposed``, the shape is ``[experts, columns, rows]``, as some modules expect. With
        ``is_interleaved``, an expert's rows alternate between the parts instead of following one another.
        """
        first = parts[0]
        super().__init__(first.blocks, first.format)
        self.parts, self.is_transposed, self.is_interleaved = tuple(parts), is_transposed, is_interleaved
        rows, columns = sum(len(part) for part in parts) // experts, first.shape[1]
        self.shape = torch.Size((experts, columns, rows) if is_transposed else (experts, rows, columns))
        self.nbytes = sum(part.nbytes for part in parts)

    def __getitem__(self, experts: slice) -> PackedExperts:
        first, end, step = experts.indices(len(self))
        assert step == 1
        sizes = [len(part) // len(self) for part in self.parts]
        parts = [part[first * size : end * size] for part, size in zip(self.parts, sizes, strict=True)]
        return self._with(parts, end - first, is_transposed=self.is_transposed)

    def _with(self, parts: Sequence[PackedMatrix], experts: int, *, is_transposed: bool) -> PackedExperts:
        return PackedExperts(parts, experts, is_transposed=is_transposed, is_interleaved=self.is_interleaved)

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
        return self._with(self.parts, len(self), is_transposed=not self.is_transposed)

    def page_out(self) -> None:
        for part in self.parts:
            part.page_out()

    def float(self) -> torch.Tensor:
        parts = [part.float().view(len(self), -1, part.shape[1]) for part in self.parts]
        matrix = torch.stack(parts, 2).flatten(1, 2) if self.is_interleaved else torch.cat(parts, 1)
        return matrix.transpose(1, 2) if self.is_transposed else matrix

    def rows(self, operation: Any, args: Sequence[Any], kwargs: Any) -> torch.Tensor | None:
        """Return the experts that an operation gathers, in float32; None if it doesn't gather whole experts."""
        if operation is not ATEN.index.Tensor or len(args[0]) != 1 or args[0][0] is None:
            return None
        chosen = args[0][0]
        if chosen.dtype == torch.bool:
            return None
        matrices = [self[expert : expert + 1].float()[0] for expert in (chosen.flatten() % len(self)).tolist()]
        return torch.stack(matrices).view(*chosen.shape, *self.shape[1:]) if matrices else None

    def viewed(self, operation: Any, args: Sequence[Any]) -> PackedMatrix | torch.Tensor | None:
        if operation is ATEN.transpose.int and {dim % 3 for dim in args} == {1, 2}:
            return self.transpose(1, 2)
        return super().viewed(operation, args)


MAX_QUANTIZED_VALUES = 1 << 18
"""Maximum number of weights quantized at a time, unless a row has more."""
Q8_0, Q4_0, MXFP4 = (FORMATS_BY_NAME[name] for name in ("Q8_0", "Q4_0", "MXFP4"))
HALF_SIZE = 2


def quantize_matrix(weight: torch.Tensor, format: BlockFormat) -> PackedMatrix | None:
    """Quantize a matrix to Q8_0 or Q4_0; return None if a number or a scale is infinite or NaN."""
    rows, columns = weight.shape
    blocks = torch.empty(rows, format.row_bytes(columns), dtype=torch.uint8)
    quantize = QUANTIZERS[format.name]
    step = max(1, MAX_QUANTIZED_VALUES // columns)
    numbers = torch.empty(min(step, rows), columns, dtype=torch.float32)
    for first in range(0, rows, step):
        target = blocks[first : first + step].view(-1, format.bytes)
        part = numbers[: min(step, rows - first)].copy_(weight[first : first + step].detach())
        scales = quantize(part.numpy().reshape(-1, format.block_size), target[:, HALF_SIZE:].numpy())
        half_scales = torch.from_numpy(scales).half()
        if not half_scales.isfinite().all():
            return None
        target[:, :HALF_SIZE] = half_scales[:, None].view(torch.uint8)
    return PackedMatrix(blocks, format)


@compiled
def _q8_0(blocks: Array, levels: Array) -> Array:
    """Write the levels of blocks ``[blocks, numbers]``, rounded to nearest with ties away from zero.

    Return the scales, which are NaN for blocks with infinite or NaN numbers.
    """
    count, size = blocks.shape
    scales = np.empty(count, np.float32)
    for block in range(count):
        scales[block] = abs(_largest_of(blocks[block])) / np.float32(127)
        inverse = np.float32(1) / scales[block] if scales[block] else np.float32(0)
        for place in range(size):
            number = blocks[block, place] * inverse
            magnitude = abs(number)
            whole = np.floor(magnitude)
            level = np.int64(whole + np.floor(np.float32(2) * (magnitude - whole)))
            levels[block, place] = np.uint8(-level if number < 0 else level)
    return scales


@compiled
def _q4_0(blocks: Array, levels: Array) -> Array:
    """Write the levels of blocks ``[blocks, numbers]``, two per byte; return the scales as ``_q8_0`` does."""
    count, size = blocks.shape
    half = size // 2
    scales = np.empty(count, np.float32)
    for block in range(count):
        scales[block] = _largest_of(blocks[block]) / np.float32(-8)
        inverse = np.float32(1) / scales[block] if scales[block] else np.float32(0)
        for place in range(half):
            low = _q4_0_level(blocks[block, place], inverse)
            levels[block, place] = low | _q4_0_level(blocks[block, place + half], inverse) << 4
    return scales


@compiled
def _largest_of(numbers: Array) -> np.float32:
    """Return the first of the numbers of largest magnitude; NaN if one is infinite or NaN."""
    largest, is_finite = numbers[0], True
    for number in numbers:
        is_finite &= np.isfinite(number)
        if abs(number) > abs(largest):
            largest = number
    return largest if is_finite else np.float32(np.nan)


@compiled
def _q4_0_level(number: np.float32, inverse: np.float32) -> np.uint8:
    level = number * inverse + np.float32(8.5)
    return np.uint8(min(max(level, np.float32(0)), np.float32(15)))


QUANTIZERS: dict[str, Callable[[Array, Array], Array]] = {"Q8_0": _q8_0, "Q4_0": _q4_0}
"""Maps a format name to a function that writes the levels of blocks ``[blocks, numbers]`` and returns the scales."""


ACTIVATION_ATTRIBUTES = ("act_quant_kwargs", "act_quant_scale", "act_quant_zero_point", "act_pre_scale")
"""Attributes that are set on a torchao weight if its layer also quantizes or scales inputs."""
SCALE_SIZE = 4
"""Size of a scale in a torchao block in bytes."""


def packed_weight(weight: Any) -> PackedMatrix | None:
    """Pack a weight-only quantized torchao weight without importing torchao; return None for any other weight.

    The packed matrix represents exactly the numbers by which torchao multiplies float32 inputs.
    """
    kind = type(weight)
    if kind.__module__.split(".")[0] != "torchao" or weight.dim() != 2 or not weight.is_cpu:
        return None
    if any(getattr(weight, name, None) is not None for name in ACTIVATION_ATTRIBUTES):
        return None
    converters = {"Int8Tensor": _of_int8, "Int4Tensor": _of_int4}
    return converters[kind.__name__](weight) if kind.__name__ in converters else None


def _of_int8(weight: Any) -> PackedMatrix | None:
    levels, group = weight.qdata, weight.block_size[-1]
    # With several groups per row, torchao rounds to the weight's dtype.
    rounded = group < levels.shape[1] and weight.dtype != torch.float32
    if levels.dtype != torch.int8 or rounded or (weight.zero_point is not None and weight.zero_point.any()):
        return None
    return packed_int8(levels, weight.scale, group)


def _of_int4(weight: Any) -> PackedMatrix | None:
    octets = weight.qdata
    if octets.itemsize != 1 or weight.activation_dtype != torch.bfloat16:  # torchao rounds other inputs to float8
        return None
    return packed_int4(octets.view(torch.uint8), weight.scale.t(), weight.zero_point.t(), weight.block_size[-1])


def packed_int8(levels: torch.Tensor, scales: torch.Tensor, group: int) -> PackedMatrix | None:
    """Pack 8-bit integers with a scale per ``group`` of columns; return None if shapes or dtypes don't fit the format.

    ``scales`` has one row per matrix row, or a single one for all.
    """
    return _packed(INT8, levels.view(torch.uint8), [scales], group)


def packed_int4(octets: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor, group: int) -> PackedMatrix | None:
    """Pack signed 4-bit integers, two columns per byte; return None if shapes or dtypes don't fit the format.

    Each ``group`` of columns has a scale and an offset, the value of level 0.
    """
    out_features, half = octets.shape
    if half % (INT4.block_size // 2):
        return None
    levels = _half_apart(octets.reshape(out_features, -1, 16) ^ 0x88)  # -8 becomes 0
    return _packed(INT4, levels.view(out_features, -1), [scales, offsets], group)


def _half_apart(octets: torch.Tensor) -> torch.Tensor:
    """Repack bytes ``[..., n]`` of two adjacent 4-bit numbers each so that byte ``i`` has numbers ``i`` and ``i + n``.

    In both layouts, the first number is in the lower bits.
    """
    numbers = torch.stack([octets & 15, octets >> 4], -1).flatten(-2)
    return numbers[..., : octets.shape[-1]] | numbers[..., octets.shape[-1] :] << 4


def _packed(format: BlockFormat, octets: torch.Tensor, headers: list[torch.Tensor], group: int) -> PackedMatrix | None:
    """Assemble blocks from levels and each group's ``headers`` (scale, minimum); None if shapes or dtypes don't fit."""
    header = SCALE_SIZE * len(headers)
    out_features, size = len(octets), format.bytes - header
    columns = octets.shape[1] // size * format.block_size
    if not octets.numel() or octets.shape[1] % size or group % format.block_size:
        return None
    blocks = torch.empty(out_features, columns // format.block_size, format.bytes, dtype=torch.uint8)
    for index, header_of_groups in enumerate(headers):
        fits = (
            header_of_groups.dim() == 2
            and header_of_groups.shape[0] in (1, out_features)
            and header_of_groups.shape[1] * group == columns
        )
        if not fits or not header_of_groups.is_floating_point() or header_of_groups.itemsize > SCALE_SIZE:
            return None
        header_of_blocks = (
            header_of_groups.float()
            .repeat_interleave(group // format.block_size, 1)
            .expand(out_features, -1)
            .contiguous()
        )
        blocks[..., index * SCALE_SIZE : (index + 1) * SCALE_SIZE] = header_of_blocks[..., None].view(torch.uint8)
    blocks[..., header:] = octets.view(out_features, -1, size)
    return PackedMatrix(blocks.view(out_features, -1), format)


def packs_mxfp4(blocks: Sequence[int], scales: Sequence[int], experts: Sequence[int]) -> bool:
    """Return True if ``packed_mxfp4`` can pack blocks and scales of these shapes into a weight of shape ``experts``."""
    if len(blocks) != 4 or tuple(blocks[:3]) != tuple(scales) or blocks[3] != MXFP4.bytes - 1:
        return False
    columns = blocks[2] * MXFP4.block_size
    return columns % COLUMN_MULTIPLE == 0 and (blocks[0], columns, blocks[1]) == tuple(experts)


def packed_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> PackedExperts:
    """Pack experts from MXFP4 blocks ``[experts, rows, blocks, bytes]`` and scales, both of uint8.

    A byte in the checkpoint holds two adjacent values, a byte in the packed format two that are half a block apart.
    """
    number, rows, count, _ = blocks.shape
    blocks_ = torch.empty(number, rows, count, MXFP4.bytes, dtype=torch.uint8)
    for expert in range(number):  # one by one, which needs little temporary memory
        blocks_[expert, ..., 0] = scales[expert]
        blocks_[expert, ..., 1:] = _half_apart(blocks[expert])
    return PackedExperts([PackedMatrix(blocks_.view(number * rows, -1), MXFP4)], number, is_transposed=True)
