"""Weights that torchao quantized to int8, in blocks that our product takes."""

from __future__ import annotations

from typing import Any

import torch

from hdtool.runtime.kernels.packed.formats import INT8
from hdtool.runtime.kernels.packed.matrix import PackedMatrix

SCALE_BYTES = INT8.bytes - INT8.numbers
OF_ACTIVATIONS = ("act_quant_kwargs", "act_quant_scale", "act_quant_zero_point", "act_pre_scale")
"""Attributes of a weight whose layer changes its input."""


def packed_int8(weight: Any) -> PackedMatrix | None:
    """The numbers of a torchao ``Int8Tensor`` that quantizes a weight alone; None for all others.

    The numbers are those that torchao multiplies a float32 input by: integers times scales in float32.
    """
    if not is_int8(weight) or any(getattr(weight, name, None) is not None for name in OF_ACTIVATIONS):
        return None
    levels, scales, zero = weight.qdata, weight.scale, weight.zero_point
    if levels.dtype != torch.int8 or levels.dim() != 2 or not levels.is_cpu or (zero is not None and zero.any()):
        return None
    group = weight.block_size[-1]
    # With groups of columns, torchao rounds the numbers to the dtype of the weight.
    if group < levels.shape[1] and weight.dtype != torch.float32:
        return None
    return packed_levels(levels, scales, group)


def packed_levels(levels: torch.Tensor, scales: torch.Tensor, group: int) -> PackedMatrix | None:
    """Integers of 8 bits, of which each ``group`` of columns has a scale; None if it has no whole blocks.

    ``scales`` has a row for each matrix row, or one for all.
    """
    outs, columns = levels.shape
    if not levels.numel() or scales.dim() != 2 or group % INT8.numbers or scales.shape[1] * group != columns:
        return None
    if scales.shape[0] not in (1, outs) or not scales.is_floating_point() or scales.itemsize > SCALE_BYTES:
        return None
    of_blocks = scales.float().repeat_interleave(group // INT8.numbers, 1).expand(outs, -1)
    blocks = torch.empty(outs, columns // INT8.numbers, INT8.bytes, dtype=torch.uint8)
    blocks[..., :SCALE_BYTES] = of_blocks.contiguous()[..., None].view(torch.uint8)
    blocks[..., SCALE_BYTES:] = levels.view(torch.uint8).view(outs, -1, INT8.numbers)
    return PackedMatrix(blocks.view(outs, -1), INT8)


def is_int8(weight: object) -> bool:
    """Whether a weight is an ``Int8Tensor``; torchao is not imported for that."""
    kind = type(weight)
    return kind.__name__ == "Int8Tensor" and kind.__module__.split(".")[0] == "torchao"
