"""The formats of blocks that are computed with as they are: those of GGUF files, and two for torchao."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hdtool.runtime.kernels.matrix_kind import MatrixKind, type_of


@dataclass(frozen=True)
class BlockFormat:
    """Some numbers of a matrix row that share their scales."""

    name: str
    number: int | None
    """In GGUF files, if they have it."""
    numbers: int
    """Weights of a block."""
    bytes: int

    @cached_property
    def kind(self) -> MatrixKind:
        """The format as an argument of compiled code."""
        return MatrixKind(self.name)

    def row_bytes(self, columns: int) -> int:
        return columns // self.numbers * self.bytes


FORMATS = {
    one.number: one
    for one in (
        BlockFormat("Q4_0", 2, 32, 18),
        BlockFormat("Q4_1", 3, 32, 20),
        BlockFormat("Q5_0", 6, 32, 22),
        BlockFormat("Q5_1", 7, 32, 24),
        BlockFormat("Q8_0", 8, 32, 34),
        BlockFormat("Q4_K", 12, 256, 144),
        BlockFormat("Q5_K", 13, 256, 176),
        BlockFormat("Q6_K", 14, 256, 210),
        BlockFormat("IQ4_NL", 20, 32, 18),
        BlockFormat("MXFP4", 39, 32, 17),
    )
}
"""Those of GGUF files, by their number there."""
INT8 = BlockFormat("int8", None, 64, 68)
"""A scale in float32, and integers of 8 bits that are multiplied by it."""
INT4 = BlockFormat("int4", None, 64, 40)
"""A scale and a minimum in float32, and integers of 4 bits: for 32 columns the low halves of 16 bytes, then the high
ones."""
ALL_FORMATS = (*FORMATS.values(), INT8, INT4)
OF_TYPE = {type_of(one.kind): one for one in ALL_FORMATS}
"""Formats by the type of their argument."""
TABLES = {
    "IQ4_NL": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    "MXFP4": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
}
"""What stands for the numbers of four bits, in formats where these are no levels; of MXFP4, twice its numbers."""
TINY_SCALES = 2
"""The first exponents of MXFP4, whose scales are subnormal numbers."""
TINIEST_SCALE = 1 << 21
"""The bits in float32 of the first of them; each further one is twice as large."""
