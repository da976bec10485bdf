"""Weights that torchao quantized to 8 or 4 bits, in blocks that our product takes."""

from __future__ import annotations

from typing import Any

import torch

from hdtool.runtime.kernels.packed.formats import INT4, INT8, BlockFormat
from hdtool.runtime.kernels.packed.matrix import PackedMatrix

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
