"""Random blocks in formats of GGUF and torchao, with reference values from ``gguf`` and numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from hdtool.runtime.kernels.int8_matmul import Panels, int8_matmul_of
from hdtool.runtime.kernels.linear_layers import multiply
from hdtool.runtime.kernels.matrix_formats import ALL_FORMATS, INT4, INT8, BlockFormat
from hdtool.runtime.kernels.packed_matrix import PackedMatrix
from hdtool.runtime.kernels.vector_code import EXPANDS_FLOAT16

NAMES = {one.name: one for one in ALL_FORMATS}
SCALES: dict[str, tuple[int, ...]] = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,)}
SCALES |= {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "MXFP4": (0,)}
SCALES |= {"int8": (0,), "int4": (0, 4)}
"""Offsets in a block of float16 scales, of float32 scales for torchao, or of the 8-bit exponent for MXFP4."""
MAX_BLOCK_SIZE = 256
needs_blocks = pytest.mark.skipif(not EXPANDS_FLOAT16, reason="blocks are expanded by transformers here")


def some_matrix(format: BlockFormat, outs: int, columns: int, seed: int = 0, scale: float = 0.01) -> PackedMatrix:
    """Create a matrix with random bits, and with scales of this standard deviation."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (outs * columns // format.block_size, format.bytes), dtype=np.uint8)
    for first in SCALES[format.name]:
        set_scales(blocks, format, first, scale * random.standard_normal(len(blocks)))
    return PackedMatrix(torch.from_numpy(blocks.reshape(outs, -1)), format)


def set_scales(blocks: npt.NDArray[np.uint8], format: BlockFormat, first: int, scales: npt.ArrayLike) -> None:
    numbers = _stored(format, scales).reshape(-1, 1)
    blocks[:, first : first + numbers.itemsize] = numbers.view(np.uint8)


def _stored(format: BlockFormat, scales: npt.ArrayLike) -> npt.NDArray[Any]:
    """Convert scales to the format's type. For MXFP4, round down to a power of two and clip to the largest."""
    if format.name != "MXFP4":
        return np.asarray(scales, np.float32 if format in (INT8, INT4) else np.float16)
    size = np.nan_to_num(np.abs(np.asarray(scales, np.float64)), nan=np.inf)
    with np.errstate(divide="ignore"):
        return np.asarray(np.clip(np.floor(np.log2(size)) + 128, 0, 255), np.uint8)


def expected(matrix: PackedMatrix) -> npt.NDArray[np.float32]:
    if matrix.format is INT8:
        return _of_int8(matrix.blocks.numpy())
    if matrix.format is INT4:
        return _of_int4(matrix.blocks.numpy())
    with np.errstate(all="ignore"):
        return np.ascontiguousarray(dequantize(matrix.blocks.numpy(), GGMLQuantizationType[matrix.format.name]))


def int8_linear(input: torch.Tensor, panels: Panels, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply like ``torch.nn.functional.linear``, with a contiguous float32 input that is rounded to 8 bits."""
    return multiply(int8_matmul_of(panels.format).address, panels.data_ptr(), panels.shape, input, bias)


def _of_int8(rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    blocks = rows.reshape(len(rows), -1, INT8.bytes)
    scales = np.ascontiguousarray(blocks[..., :4]).view(np.float32)
    with np.errstate(all="ignore"):
        return (blocks[..., 4:].view(np.int8).astype(np.float32) * scales).reshape(len(rows), -1)


def _of_int4(rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    blocks = rows.reshape(len(rows), -1, INT4.bytes)
    scales, minima = (np.ascontiguousarray(blocks[..., first : first + 4]).view(np.float32) for first in (0, 4))
    octets = blocks[..., 8:].reshape(*blocks.shape[:2], 2, 16)
    levels = np.concatenate([octets & 15, octets >> 4], -1).reshape(*blocks.shape[:2], INT4.block_size)
    with np.errstate(all="ignore"):
        return ((levels.astype(np.float32) - 8) * scales + minima).reshape(len(rows), -1)
