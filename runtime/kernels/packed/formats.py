"""The formats of blocks that are computed with as they are: those of GGUF files, and two for torchao."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import typeof


@dataclass(frozen=True)
class BlockFormat:
    """Some numbers of a matrix row that share their scales."""

    name: str
    number: int | None
    """In GGUF files, if they have it."""
    numbers: int
    """Weights of a block."""
    bytes: int
    kind: Any
    """An argument whose type states the format in compiled code."""

    def row_bytes(self, columns: int) -> int:
        return columns // self.numbers * self.bytes


FORMATS = {
    one.number: one
    for one in (
        BlockFormat("Q4_0", 2, 32, 18, np.int8(0)),
        BlockFormat("Q4_1", 3, 32, 20, np.uint8(0)),
        BlockFormat("Q8_0", 8, 32, 34, np.int32(0)),
        BlockFormat("Q4_K", 12, 256, 144, np.uint32(0)),
        BlockFormat("Q5_K", 13, 256, 176, np.int64(0)),
        BlockFormat("Q6_K", 14, 256, 210, np.uint64(0)),
    )
}
"""Those of GGUF files, by their number there."""
INT8 = BlockFormat("int8", None, 64, 68, np.float64(0))
"""A scale in float32, and integers of 8 bits that are multiplied by it."""
INT4 = BlockFormat("int4", None, 64, 40, np.complex64(0))
"""A scale and a minimum in float32, and integers of 4 bits: for 32 columns the low halves of 16 bytes, then the high
ones."""
ALL_FORMATS = (*FORMATS.values(), INT8, INT4)
OF_TYPE = {typeof(one.kind): one for one in ALL_FORMATS}  # type: ignore[no-untyped-call]
"""Formats by the type of their argument."""
