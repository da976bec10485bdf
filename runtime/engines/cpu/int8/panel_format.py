"""Panels: some rows of a packed matrix side by side, so that each lane of a vector belongs to one of them.

A panel has the weights of its rows in parts of 32 columns. A part has the lowest four bits of these weights, with four
columns of a row in each lane, and then what they have beyond four bits. The numbers of a part are ``scale * (level -
offset) + minimum``, with the scale and the minimum of the block.
"""

from __future__ import annotations

from dataclasses import dataclass

from hdtool.runtime.kernels.packed.formats import TABLES, BlockFormat
from hdtool.runtime.kernels.vector_code import has_feature

PANEL_ROWS = 16 if has_feature("avx512bw") else 8
"""As many as a vector register has numbers of 32 bits, where the processor multiplies octets in it.

Panels are in memory only, so they may differ between processors.
"""
PART = 32
"""Columns."""
QUAD = 4
"""Columns of a lane: the instructions of processors multiply and add four octets for each."""
QUADS = PART // QUAD
PLANE = PANEL_ROWS * QUAD
"""Bytes of a vector of octets."""
LOW_BITS = 4
"""Bits of a level that are apart from the others."""
EXPONENT_SIZE, HALF_SIZE, FLOAT_SIZE = 1, 2, 4


@dataclass(frozen=True)
class PanelFormat:
    """Where a panel has what a part needs."""

    high_bits: int
    """Bits of a level beyond four."""
    offset: int = 0
    """What is subtracted from a level: GGUF files have signed ones."""
    has_minima: bool = False
    parts: int = 1
    """Parts that have a header of scales in common."""
    scales: int = 1
    """Scales of a part: of all its columns, or of each half."""
    has_factors: bool = False
    """Whether a part has integers by which it multiplies the scales and minima of its header."""
    scale_size: int = HALF_SIZE
    """Bytes of a scale in the header: of an exponent, a float16 or a float32."""
    table: tuple[int, ...] = ()
    """What stands for the four bits of a level; empty where they are the level itself."""

    @property
    def level_bits(self) -> int:
        return max(self.table).bit_length() if self.table else LOW_BITS + self.high_bits

    @property
    def header(self) -> int:
        """The bytes of a header: a scale for each row, then a minimum."""
        return self.scale_size * PANEL_ROWS * (1 + self.has_minima)

    @property
    def octets(self) -> int:
        """Bytes of the factors of a part."""
        return PANEL_ROWS * (self.scales + self.has_minima) if self.has_factors else 0

    @property
    def part(self) -> int:
        """Bytes of a part."""
        return self.octets + PLANE * (QUADS // 2 + self.high_bits)

    @property
    def group(self) -> int:
        """Bytes of a header and its parts."""
        return self.header + self.parts * self.part

    def bytes(self, columns: int) -> int:
        """Bytes of a panel."""
        return columns // PART // self.parts * self.group


def _without_sign(name: str, offset: int) -> tuple[int, ...]:
    return tuple(number + offset for number in TABLES[name])


PANEL_FORMATS = {
    "Q4_0": PanelFormat(0, offset=8),
    "Q4_1": PanelFormat(0, has_minima=True),
    "Q5_0": PanelFormat(1, offset=16),
    "Q5_1": PanelFormat(1, has_minima=True),
    "Q8_0": PanelFormat(4, offset=128),
    "Q4_K": PanelFormat(0, has_minima=True, parts=8, has_factors=True),
    "Q5_K": PanelFormat(1, has_minima=True, parts=8, has_factors=True),
    "Q6_K": PanelFormat(2, offset=32, parts=8, scales=2, has_factors=True),
    "IQ4_NL": PanelFormat(0, offset=128, table=_without_sign("IQ4_NL", 128)),
    "MXFP4": PanelFormat(0, offset=12, scale_size=EXPONENT_SIZE, table=_without_sign("MXFP4", 12)),
    "int4": PanelFormat(0, offset=8, has_minima=True, parts=2, scale_size=FLOAT_SIZE),
    "int8": PanelFormat(4, offset=128, parts=2, scale_size=FLOAT_SIZE),
}


def panel_format(format: BlockFormat) -> PanelFormat:
    return PANEL_FORMATS[format.name]
