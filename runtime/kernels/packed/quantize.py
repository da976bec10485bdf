"""Rounds weights to blocks of Q8_0 and Q4_0, as the reference code of ggml does.

A block of Q8_0 has the scale by which its largest number becomes 127. One of Q4_0 has the scale by which the number
that is largest without its sign becomes -8. Numbers are divided by the scale in float32; then it is stored in float16.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hdtool.runtime.kernels.packed.formats import FORMATS, BlockFormat
from hdtool.runtime.kernels.packed.matrix import PackedMatrix

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
