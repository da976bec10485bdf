"""Random blocks in the formats of GGUF files, and their numbers by the library ``gguf``."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from hdtool.runtime.kernels.packed.formats import FORMATS, BlockFormat
from hdtool.runtime.kernels.packed.matrix import PackedMatrix

NAMES = {one.name: one for one in FORMATS.values()}
SCALES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where a block has numbers in float16."""
LONGEST_BLOCK = 256


def some_matrix(format: BlockFormat, outs: int, columns: int, seed: int = 0) -> PackedMatrix:
    """A matrix with scales as models have them, and all other bits at random."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (outs * columns // format.numbers, format.bytes), dtype=np.uint8)
    for first in SCALES[format.name]:
        set_scales(blocks, first, (0.01 * random.standard_normal(len(blocks))).astype(np.float16))
    return PackedMatrix(torch.from_numpy(blocks.reshape(outs, -1)), format)


def set_scales(blocks: npt.NDArray[np.uint8], first: int, scales: npt.NDArray[np.float16]) -> None:
    blocks[:, first : first + 2] = scales[:, None].view(np.uint8)


def expected(matrix: PackedMatrix) -> npt.NDArray[np.float32]:
    with np.errstate(all="ignore"):
        return np.ascontiguousarray(dequantize(matrix.blocks.numpy(), GGMLQuantizationType(matrix.format.number)))
