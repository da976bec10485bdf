"""Matrix formats, and code that unpacks blocks in registers.

Layouts are those of ggml, https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h, and two for torchao. A weight
is ``d * q``, ``d * q + m`` or ``d * q - m``, where each operation rounds once. In GGUF files, ``d`` has at most 17 bits
and, if there is an ``m``, ``q`` has at most 5, so the product is exact and a fused multiply-add gives the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from llvmlite.binding import add_symbol  # type: ignore[import-untyped]
from numba import types
from numba.core.cgutils import add_global_variable

from hdtool.runtime.kernels.compiled import WORD, generated
from hdtool.runtime.kernels.vector_code import FLOAT, HALF, INDEX, LANES, OCTET, SHORT, VectorCode

Case = TypeVar("Case")
Tile = Callable[..., None]
"""Generates a tile's code, given an IR builder, the format and the arguments of ``by_rows``."""


def by_rows(tiles: Mapping[int, Tile]) -> Any:
    """Return an intrinsic that runs the tile ``tiles[rows]``, where ``rows`` is the intrinsic's last argument.

    Arrays are given by address; ``name`` is that of the matrix format.
    """

    @generated(types.int64, None, *[types.int64] * 5)
    def run(
        builder: Any, matrix: Any, name: str, columns: Any, inputs: Any, outputs: Any, output_stride: Any, rows: Any
    ) -> None:
        for _, tile in cases(builder, rows, tiles):
            tile(builder, FORMATS[name], matrix, columns, inputs, outputs, output_stride)

    return run


def cases(builder: Any, number: Any, by_number: Mapping[int, Case]) -> Iterator[tuple[int, Case]]:
    """Generate a switch on ``number``: code emitted in an iteration runs only for that iteration's key."""
    end = builder.append_basic_block("end")
    switch = builder.switch(number, end)
    for key, case in by_number.items():
        block = builder.append_basic_block(f"case_{key}")
        switch.add_case(INDEX(key), block)
        builder.position_at_end(block)
        yield key, case
        builder.branch(end)
    builder.position_at_end(end)


@dataclass(frozen=True)
class BlockFormat:
    """Layout of blocks: consecutive weights of a matrix row that are stored together with their scales."""

    name: str
    block_size: int
    """Weights per block."""
    bytes: int

    def row_bytes(self, columns: int) -> int:
        return columns // self.block_size * self.bytes


GGUF_FORMATS = (
    BlockFormat("Q4_0", 32, 18),
    BlockFormat("Q4_1", 32, 20),
    BlockFormat("Q5_0", 32, 22),
    BlockFormat("Q5_1", 32, 24),
    BlockFormat("Q8_0", 32, 34),
    BlockFormat("Q4_K", 256, 144),
    BlockFormat("Q5_K", 256, 176),
    BlockFormat("Q6_K", 256, 210),
    BlockFormat("IQ4_NL", 32, 18),
    BlockFormat("MXFP4", 32, 17),
)
INT8 = BlockFormat("int8", 64, 68)
"""Blocks of a float32 scale, followed by 8-bit integers."""
INT4 = BlockFormat("int4", 64, 40)
"""Blocks of a float32 scale and minimum and 4-bit integers: 16 bytes per 32 columns, the first 16 in the low halves."""
FLOAT32, BFLOAT16, FLOAT16 = NUMBERS = (
    BlockFormat("float32", 1, 4),
    BlockFormat("bfloat16", 1, 2),
    BlockFormat("float16", 1, 2),
)
"""Numbers that are stored by themselves, as blocks of one."""
ALL_FORMATS = (*GGUF_FORMATS, INT8, INT4)
FORMATS_BY_NAME = {block_format.name: block_format for block_format in ALL_FORMATS}
FORMATS = FORMATS_BY_NAME | {numbers.name: numbers for numbers in NUMBERS}
"""The formats of packed blocks and those of ``NUMBERS``, by name."""
VALUE_TABLES = {
    "IQ4_NL": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    "MXFP4": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
}
"""Values of the 4-bit codes, for formats with a lookup table; the values of MXFP4 are doubled to be integers."""
TINY_SCALES = 2
"""MXFP4 exponents below this give subnormal float32 scales."""
TINIEST_SCALE = 1 << 21
"""Float32 bits of the MXFP4 scale for exponent 0; the scale doubles with each exponent."""


Expand = Callable[[int], Any]
"""Generates code that unpacks the vector at an index of a block."""
Scale = Callable[[int], Any]
"""Generates code that broadcasts the scale at an index of a block to all lanes."""
FLOAT_SIZE = 4
MANTISSA_BITS = 23
LEVELS = [float(level) for level in range(16)]
"""Values of 4-bit integers."""
FLOAT16_VALUES = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
"""Float32 value of every float16, indexed by its bits: broadcasting it from memory is faster than converting."""
FLOAT16_VALUES.flags.writeable = False
FLOAT16_TABLE = "hdtool_float16_values"
add_symbol(FLOAT16_TABLE, FLOAT16_VALUES.ctypes.data)
PERMUTATION = "llvm.x86.avx512.permvar.sf.512"
PRECOMPUTED_SCALES = {"Q4_1": 2, "Q5_1": 2, "Q4_K": 16, "Q5_K": 16, "Q6_K": 16}
"""Number of scales and addends per block, for formats whose scales a tile computes ahead for many blocks.

Broadcasting them from memory saves shuffles, the bottleneck of tiles with few input rows. Formats with a single scale
or with float32 scales are faster without.
"""


class BlockCode:
    """Generates code that unpacks blocks of a format."""

    has_scaled_tables = LANES == 16
    """True if a table of all levels can be multiplied by the scale that a vector's weights share."""

    def __init__(self, code: VectorCode, format: BlockFormat) -> None:
        self.code, self.builder = code, code.builder
        self.vectors = format.block_size // LANES
        self.scales = PRECOMPUTED_SCALES.get(format.name, 0)
        self._format = format
        self._expander = getattr(self, f"_{format.name.lower()}")

    def write_scales(self, block: Any, target: Any) -> None:
        """Write a block's scales as float32 at address ``target``, from which ``expander`` reads them."""
        if self.scales == 2:
            # One instruction converts four numbers; only the first two are scales.
            four = self.builder.fpext(self.code.load(block, ir.VectorType(HALF, 4)), ir.VectorType(FLOAT, 4))
            scales = self.code.part(four, 0, self.scales)
        else:
            scales = self.sixteen_scales(block)
        self.builder.store(scales, self.builder.bitcast(target, scales.type.as_pointer())).align = FLOAT_SIZE

    def expander(self, block: Any, scales: Any) -> Expand:
        """Generate the code shared by all vectors of a block; return a function that generates each vector's own code.

        ``scales`` is the address to which ``write_scales`` wrote.
        """

        @cache
        def scale(vector: int) -> Any:
            return self.code.splat(self.code.load(self.code.gep(scales, vector), FLOAT, FLOAT_SIZE))

        expand: Expand = self._expander(block, scale)
        return expand

    def _q4_0(self, block: Any, _: Scale) -> Expand:
        return self._by_level(block, 2, [level - 8 for level in LEVELS], self._half(block, 0), None)

    def _q4_1(self, block: Any, scale: Scale) -> Expand:
        return self._by_level(block, 4, LEVELS, scale(0), scale(1))

    def _by_level(self, block: Any, first: int, levels: list[float], scale: Any, minimum: Any) -> Expand:
        """Return an expander of 4-bit numbers, stored first in the low and then in the high halves of 16 bytes."""
        if self.has_scaled_tables:
            table = self._scaled(ir.Constant(self.code.vector, levels), scale, minimum)
            low = self._bytes(block, first)
            indices = low, self.builder.lshr(low, self.code.every(4))
            return lambda vector: self._permuted(table, indices[vector])

        def expand(vector: int) -> Any:
            half, byte = divmod(vector * LANES, 16)
            level = self._float(self._plus(self._bits(self._bytes(block, first + byte), 4 * half, 4), int(levels[0])))
            return self._scaled(level, scale, minimum)

        return expand

    def _q5_0(self, block: Any, _: Scale) -> Expand:
        scale = self._half(block, 0)
        return lambda vector: self._scaled(self._level_of_5_bits(block, 2, vector, -16), scale, None)

    def _q5_1(self, block: Any, scale: Scale) -> Expand:
        return lambda vector: self._scaled(self._level_of_5_bits(block, 4, vector, 0), scale(0), scale(1))

    def _level_of_5_bits(self, block: Any, first: int, vector: int, lowest: int) -> Any:
        """Return a vector of levels, from 4-bit numbers stored as in ``_by_level`` plus a 32-bit word of fifth bits."""
        half, byte = divmod(vector * LANES, 16)
        low = self._bits(self._bytes(block, first + 4 + byte), 4 * half, 4)
        high_bits = self.code.splat(self.code.load(self.code.gep(block, first), WORD))
        masks = [1 << bit for bit in range(vector * LANES, (vector + 1) * LANES)]
        selected = self.builder.and_(high_bits, self.code.integers(masks))
        is_set = self.builder.icmp_unsigned("!=", selected, self.code.every(0))
        high = self.builder.select(is_set, self.code.every(lowest + 16), self.code.every(lowest))
        return self._float(self.builder.add(low, high))

    def _iq4_nl(self, block: Any, _: Scale) -> Expand:
        return self._by_table(block, 2, self._half(block, 0))

    def _mxfp4(self, block: Any, _: Scale) -> Expand:
        return self._by_table(block, 1, self._spread(block, self._power_of_two))

    def _power_of_two(self, block: Any) -> Any:
        builder = self.builder
        exponent = builder.zext(self.code.load(block, OCTET), WORD)
        tiny = builder.shl(WORD(TINIEST_SCALE), exponent)
        normal = builder.shl(builder.sub(exponent, WORD(1)), WORD(MANTISSA_BITS))
        is_tiny = builder.icmp_unsigned("<", exponent, WORD(TINY_SCALES))
        return builder.bitcast(builder.select(is_tiny, tiny, normal), FLOAT)

    def _by_table(self, block: Any, first: int, scale: Any) -> Expand:
        """Return an expander that looks up 4-bit indices, stored as in ``_by_level``, in the format's table."""
        table = VALUE_TABLES[self._format.name]
        if self.has_scaled_tables:
            return self._by_level(block, first, [float(number) for number in table], scale, None)
        octets = self.code.load(self.code.gep(block, first), ir.VectorType(OCTET, 16))
        low = self.builder.and_(octets, self.code.integers([15] * 16, OCTET))
        high = self.builder.lshr(octets, self.code.integers([4] * 16, OCTET))
        halves = [self.code.lookup(table, indices) for indices in (low, high)]

        def expand(vector: int) -> Any:
            half, byte = divmod(vector * LANES, 16)
            level = self.builder.sext(self.code.part(halves[half], byte, LANES), self.code.words)
            return self._scaled(self._float(level), scale, None)

        return expand

    def _q8_0(self, block: Any, _: Scale) -> Expand:
        return self._by_signed_byte(block, 2, self._half(block, 0))

    def _int8(self, block: Any, _: Scale) -> Expand:
        return self._by_signed_byte(block, 4, self._number(block, 0))

    def _int4(self, block: Any, _: Scale) -> Expand:
        both = self._number(block, 0), self._number(block, 4)
        halves = [self._by_level(block, first, [level - 8 for level in LEVELS], *both) for first in (8, 24)]
        return lambda vector: halves[vector * LANES // 32](vector % (32 // LANES))

    def _by_signed_byte(self, block: Any, first: int, scale: Any) -> Expand:
        def expand(vector: int) -> Any:
            return self.builder.fmul(self._float(self._bytes(block, first + vector * LANES, signed=True)), scale)

        return expand

    def _q4_k(self, block: Any, scale: Scale) -> Expand:
        def expand(vector: int) -> Any:
            part, byte = divmod(vector * LANES, 32)
            bytes_ = self._bytes(block, 16 + part // 2 * 32 + byte)
            if self.has_scaled_tables:
                index = self.builder.lshr(bytes_, self.code.every(4)) if part % 2 else bytes_
                return self._permuted(tables(part), index)
            return self._scaled(self._float(self._bits(bytes_, part % 2 * 4, 4)), scale(part), scale(8 + part))

        @cache
        def tables(part: int) -> Any:
            return self._scaled(ir.Constant(self.code.vector, LEVELS), scale(part), scale(8 + part))

        return expand

    def _q5_k(self, block: Any, scale: Scale) -> Expand:
        def expand(vector: int) -> Any:
            part, byte = divmod(vector * LANES, 32)
            low = self._bits(self._bytes(block, 48 + part // 2 * 32 + byte), part % 2 * 4, 4)
            high = self._bits(self._bytes(block, 16 + byte), part, 1)
            return self._scaled(self._float(self._joined(low, high)), scale(part), scale(8 + part))

        return expand

    def _q6_k(self, block: Any, scale: Scale) -> Expand:
        def expand(vector: int) -> Any:
            part, byte = divmod(vector * LANES, 32)
            half, quarter = divmod(part, 4)
            low = self._bytes(block, half * 64 + quarter % 2 * 32 + byte)
            high = self._bytes(block, 128 + half * 32 + byte)
            joined = self._joined(self._bits(low, quarter // 2 * 4, 4), self._bits(high, quarter * 2, 2))
            level = self._float(self._plus(joined, -32))
            return self._scaled(level, scale(part * 2 + byte // 16), None)

        return expand

    def sixteen_scales(self, block: Any) -> Any:
        """Return a K-quants block's scales, followed by its addends if there are any, as a vector."""
        return self._scales_of_parts(block) if self._format.name == "Q6_K" else self._scales_and_minima(block)

    def _scales_of_parts(self, block: Any) -> Any:
        """Return the scales of a block's 16 parts, stored in 8 bits each, multiplied by the block's scale."""
        octets = self.code.load(self.code.gep(block, 192), ir.VectorType(OCTET, 16))
        whole = self.builder.sext(octets, ir.VectorType(WORD, 16))
        return self.builder.fmul(self._half(block, 208, 16), self.builder.sitofp(whole, ir.VectorType(FLOAT, 16)))

    def _scales_and_minima(self, block: Any) -> Any:
        """Return a block's eight scales and eight negated minima, stored in 6 bits each."""
        builder = self.builder
        first, second, third = (self.code.load(self.code.gep(block, 4 + 4 * word), WORD) for word in range(3))

        def upper(word: Any) -> Any:
            return builder.and_(builder.lshr(word, WORD(2)), WORD(0x30303030))

        def lower(word: Any) -> Any:
            return builder.and_(word, WORD(0x0F0F0F0F))

        words = (
            builder.and_(first, WORD(0x3F3F3F3F)),
            builder.or_(lower(third), upper(first)),
            builder.and_(second, WORD(0x3F3F3F3F)),
            builder.or_(lower(builder.lshr(third, WORD(4))), upper(second)),
        )
        packed: Any = ir.Constant(ir.VectorType(WORD, 4), ir.Undefined)
        for index, word in enumerate(words):
            packed = builder.insert_element(packed, word, WORD(index))
        octets = builder.bitcast(packed, ir.VectorType(OCTET, 16))
        numbers = builder.uitofp(builder.zext(octets, ir.VectorType(WORD, 16)), ir.VectorType(FLOAT, 16))
        both = self._half(block, 0, 8), builder.fneg(self._half(block, 2, 8))
        return builder.fmul(numbers, builder.shuffle_vector(*both, self.code.integers(list(range(16)))))

    def _scaled(self, level: Any, scale: Any, added: Any) -> Any:
        if added is not None and self._format not in (INT8, INT4):
            return self.code.multiply_add(level, scale, added)
        weights = self.builder.fmul(level, scale)
        return weights if added is None else self.builder.fadd(weights, added)

    def _permuted(self, table: Any, indices: Any) -> Any:
        """Look up each index in a table of 16 numbers; only the lowest four bits of an index are used."""
        return self.code.call(PERMUTATION, self.code.vector, table, indices)

    def _spread(self, block: Any, read: Callable[[Any], Any], lanes: int = LANES) -> Any:
        """Broadcast the number that ``read`` computes from a block's address to all lanes."""
        return self.code.splat(read(block), lanes)

    def _number(self, block: Any, offset: int) -> Any:
        """Broadcast the float32 at an offset in a block to all lanes."""
        return self._spread(block, lambda address: self.code.load(self.code.gep(address, offset), FLOAT))

    def _half(self, block: Any, offset: int, lanes: int = LANES) -> Any:
        """Broadcast the float16 at an offset in a block to all lanes, as float32."""

        def read(address: Any) -> Any:
            bits = self.builder.zext(self.code.load(self.code.gep(address, offset), SHORT), INDEX)
            return self.code.load(self.builder.gep(self._float16_table, [INDEX(0), bits]), FLOAT, FLOAT_SIZE)

        return self._spread(block, read, lanes)

    @property
    def _float16_table(self) -> Any:
        module = self.builder.module
        if FLOAT16_TABLE not in module.globals:
            add_global_variable(module, ir.ArrayType(FLOAT, len(FLOAT16_VALUES)), FLOAT16_TABLE)  # type: ignore[no-untyped-call]
        return module.globals[FLOAT16_TABLE]

    def _bytes(self, block: Any, offset: int, *, signed: bool = False) -> Any:
        """Return ``LANES`` bytes of a block as 32-bit integers, one per lane."""
        octets = self.code.load(self.code.gep(block, offset), ir.VectorType(OCTET, LANES))
        return (self.builder.sext if signed else self.builder.zext)(octets, self.code.words)

    def _bits(self, words: Any, first: int, count: int) -> Any:
        shifted = self.builder.lshr(words, self.code.every(first)) if first else words
        return shifted if first + count == 8 else self.builder.and_(shifted, self.code.every((1 << count) - 1))

    def _joined(self, low: Any, high: Any) -> Any:
        return self.builder.or_(low, self.builder.shl(high, self.code.every(4)))

    def _plus(self, words: Any, added: int) -> Any:
        return self.builder.add(words, self.code.every(added)) if added else words

    def _float(self, words: Any) -> Any:
        return self.builder.sitofp(words, self.code.vector)
