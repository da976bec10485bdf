"""Generates code that expands a block to float32 in vector registers, with the roundings of the library ``gguf``.

The layouts are those of ggml, https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h, and two for torchao.
A weight is ``d * q``, ``d * q + m`` or ``d * q - m``: each operation rounds once. In GGUF files a ``d`` has at most 17
bits and a ``q`` that something is added to at most 5, so their product is exact, and a fused operation rounds alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

from hdtool.runtime.kernels.compiled import WORD
from hdtool.runtime.kernels.matrix_kind import MatrixKind, type_of
from hdtool.runtime.kernels.vector_code import FLOAT, HALF, LANES, OCTET, VectorCode


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


Expand = Callable[[int], Any]
"""The vector of a block at a place in it, which counts vectors."""
Scale = Callable[[int], Any]
"""One of the block's scales, in all lanes."""
FLOAT_SIZE = 4
MANTISSA_BITS = 23
"""Of a float32."""
LEVELS = [float(level) for level in range(16)]
"""The numbers of four bits."""
PERMUTATION = "llvm.x86.avx512.permvar.sf.512"
SCALES_AHEAD = {"Q4_1": 2, "Q5_1": 2, "Q4_K": 16, "Q5_K": 16, "Q6_K": 16}
"""The scales of a block, and what is added to scaled weights, in formats of which a tile computes them for many blocks
ahead: from memory, a number fills a register without a shuffle, and shuffles limit a tile of few input rows. With a
single scale, or one in float32, a block is faster without."""


class Blocks:
    """The blocks of one format."""

    def __init__(self, code: VectorCode, format: BlockFormat) -> None:
        self.code, self.builder = code, code.builder
        self.vectors = format.numbers // LANES
        self.scales = SCALES_AHEAD.get(format.name, 0)
        self._format = format
        self._expander = getattr(self, f"_{format.name.lower()}")

    def write_scales(self, block: Any, written: Any) -> None:
        """Write the scales that ``expander`` reads."""
        if self.scales == 2:
            # One instruction converts four numbers; the last two are no scales.
            four = self.builder.fpext(self.code.load(block, ir.VectorType(HALF, 4)), ir.VectorType(FLOAT, 4))
            found = self.code.part(four, 0, self.scales)
        else:
            found = self._scales_of_parts(block) if self._format.name == "Q6_K" else self._scales_and_minima(block)
        self.builder.store(found, self.builder.bitcast(written, found.type.as_pointer())).align = FLOAT_SIZE

    def expander(self, block: Any, scales: Any) -> Expand:
        """Generate what all vectors of a block share; the function that is returned generates one of them.

        ``scales`` is the address that ``write_scales`` wrote to.
        """

        @cache
        def scale(place: int) -> Any:
            return self._number(self.code.after(scales, place), FLOAT_SIZE)

        found: Expand = self._expander(block, scale)
        return found

    def _q4_0(self, block: Any, _: Scale) -> Expand:
        return self._by_level(block, 2, [level - 8 for level in LEVELS], self._half(block, 0), None)

    def _q4_1(self, block: Any, scale: Scale) -> Expand:
        return self._by_level(block, 4, LEVELS, scale(0), scale(1))

    def _by_level(self, block: Any, first: int, levels: list[float], scale: Any, minimum: Any) -> Expand:
        """Half bytes: the low ones of 16 bytes, then the high ones."""
        if LANES == 16:
            table = self._scaled(ir.Constant(self.code.vector, levels), scale, minimum)
            low = self._bytes(block, first)
            indices = low, self.builder.lshr(low, self.code.every(4))
            return lambda place: self._permuted(table, indices[place])

        def expand(place: int) -> Any:
            half, byte = divmod(place * LANES, 16)
            level = self._float(self._plus(self._bits(self._bytes(block, first + byte), 4 * half, 4), int(levels[0])))
            return self._scaled(level, scale, minimum)

        return expand

    def _q5_0(self, block: Any, _: Scale) -> Expand:
        scale = self._half(block, 0)
        return lambda place: self._scaled(self._level_of_5_bits(block, 2, place, -16), scale, None)

    def _q5_1(self, block: Any, scale: Scale) -> Expand:
        return lambda place: self._scaled(self._level_of_5_bits(block, 4, place, 0), scale(0), scale(1))

    def _level_of_5_bits(self, block: Any, first: int, place: int, lowest: int) -> Any:
        """The highest bits of 32 numbers, then half bytes as those of ``_by_level``."""
        half, byte = divmod(place * LANES, 16)
        low = self._bits(self._bytes(block, first + 4 + byte), 4 * half, 4)
        of_all = self.code.splat(self.code.load(self.code.after(block, first), WORD))
        masks = [1 << bit for bit in range(place * LANES, (place + 1) * LANES)]
        one = self.builder.and_(of_all, self.code.integers(masks))
        is_set = self.builder.icmp_unsigned("!=", one, self.code.every(0))
        high = self.builder.select(is_set, self.code.every(lowest + 16), self.code.every(lowest))
        return self._float(self.builder.add(low, high))

    def _iq4_nl(self, block: Any, _: Scale) -> Expand:
        return self._by_table(block, 2, self._half(block, 0))

    def _mxfp4(self, block: Any, _: Scale) -> Expand:
        builder = self.builder
        exponent = builder.zext(self.code.load(block, OCTET), WORD)
        tiny = builder.shl(WORD(TINIEST_SCALE), exponent)
        usual = builder.shl(builder.sub(exponent, WORD(1)), WORD(MANTISSA_BITS))
        is_tiny = builder.icmp_unsigned("<", exponent, WORD(TINY_SCALES))
        scale = builder.bitcast(builder.select(is_tiny, tiny, usual), FLOAT)
        return self._by_table(block, 1, self.code.splat(scale))

    def _by_table(self, block: Any, first: int, scale: Any) -> Expand:
        """Half bytes that are places in a table, in the order of ``_by_level``."""
        table = TABLES[self._format.name]
        if LANES == 16:
            return self._by_level(block, first, [float(number) for number in table], scale, None)
        octets = self.code.load(self.code.after(block, first), ir.VectorType(OCTET, 16))
        low = self.builder.and_(octets, self.code.integers([15] * 16, OCTET))
        high = self.builder.lshr(octets, self.code.integers([4] * 16, OCTET))
        halves = [self.code.looked_up(table, indices) for indices in (low, high)]

        def expand(place: int) -> Any:
            half, byte = divmod(place * LANES, 16)
            level = self.builder.sext(self.code.part(halves[half], byte, LANES), self.code.words)
            return self._scaled(self._float(level), scale, None)

        return expand

    def _q8_0(self, block: Any, _: Scale) -> Expand:
        return self._by_signed_byte(block, 2, self._half(block, 0))

    def _int8(self, block: Any, _: Scale) -> Expand:
        return self._by_signed_byte(block, 4, self._number(block))

    def _int4(self, block: Any, _: Scale) -> Expand:
        both = self._number(block), self._number(self.code.after(block, 4))
        halves = [self._by_level(block, first, [level - 8 for level in LEVELS], *both) for first in (8, 24)]
        return lambda place: halves[place * LANES // 32](place % (32 // LANES))

    def _by_signed_byte(self, block: Any, first: int, scale: Any) -> Expand:
        def expand(place: int) -> Any:
            return self.builder.fmul(self._float(self._bytes(block, first + place * LANES, signed=True)), scale)

        return expand

    def _q4_k(self, block: Any, scale: Scale) -> Expand:
        def expand(place: int) -> Any:
            part, byte = divmod(place * LANES, 32)
            bytes_ = self._bytes(block, 16 + part // 2 * 32 + byte)
            if LANES == 16:
                index = self.builder.lshr(bytes_, self.code.every(4)) if part % 2 else bytes_
                return self._permuted(tables(part), index)
            return self._scaled(self._float(self._bits(bytes_, part % 2 * 4, 4)), scale(part), scale(8 + part))

        @cache
        def tables(part: int) -> Any:
            return self._scaled(ir.Constant(self.code.vector, LEVELS), scale(part), scale(8 + part))

        return expand

    def _q5_k(self, block: Any, scale: Scale) -> Expand:
        def expand(place: int) -> Any:
            part, byte = divmod(place * LANES, 32)
            low = self._bits(self._bytes(block, 48 + part // 2 * 32 + byte), part % 2 * 4, 4)
            high = self._bits(self._bytes(block, 16 + byte), part, 1)
            return self._scaled(self._float(self._joined(low, high)), scale(part), scale(8 + part))

        return expand

    def _q6_k(self, block: Any, scale: Scale) -> Expand:
        def expand(place: int) -> Any:
            part, byte = divmod(place * LANES, 32)
            half, quarter = divmod(part, 4)
            low = self._bytes(block, half * 64 + quarter % 2 * 32 + byte)
            high = self._bytes(block, 128 + half * 32 + byte)
            joined = self._joined(self._bits(low, quarter // 2 * 4, 4), self._bits(high, quarter * 2, 2))
            level = self._float(self._plus(joined, -32))
            return self._scaled(level, scale(part * 2 + byte // 16), None)

        return expand

    def _scales_of_parts(self, block: Any) -> Any:
        """The scales of halves of parts of 32 numbers; in the block they have 8 bits each."""
        octets = self.code.load(self.code.after(block, 192), ir.VectorType(OCTET, 16))
        whole = self.builder.sext(octets, ir.VectorType(WORD, 16))
        return self.builder.fmul(self._half(block, 208, 16), self.builder.sitofp(whole, ir.VectorType(FLOAT, 16)))

    def _scales_and_minima(self, block: Any) -> Any:
        """Eight scales and what is added to a weight, eight minima times -1; in the block they have 6 bits each, in 12
        bytes."""
        builder = self.builder
        first, second, third = (self.code.load(self.code.after(block, 4 + 4 * word), WORD) for word in range(3))

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
        for place, word in enumerate(words):
            packed = builder.insert_element(packed, word, WORD(place))
        octets = builder.bitcast(packed, ir.VectorType(OCTET, 16))
        numbers = builder.uitofp(builder.zext(octets, ir.VectorType(WORD, 16)), ir.VectorType(FLOAT, 16))
        both = self._half(block, 0, 8), builder.fneg(self._half(block, 2, 8))
        return builder.fmul(numbers, builder.shuffle_vector(*both, self.code.integers(list(range(16)))))

    def _scaled(self, level: Any, scale: Any, added: Any) -> Any:
        if added is not None and self._format.number is not None:
            return self.code.multiply_add(level, scale, added)
        weights = self.builder.fmul(level, scale)
        return weights if added is None else self.builder.fadd(weights, added)

    def _permuted(self, table: Any, indices: Any) -> Any:
        """The numbers of a table at the places that the four lowest bits of indices state."""
        return self.code.call(PERMUTATION, self.code.vector, table, indices)

    def _number(self, address: Any, align: int = 1) -> Any:
        """A float32 in all lanes."""
        return self.code.splat(self.code.load(address, FLOAT, align))

    def _half(self, block: Any, offset: int, lanes: int = LANES) -> Any:
        """A float16 of a block in all lanes, as float32."""
        number = self.code.splat(self.code.load(self.code.after(block, offset), HALF), lanes)
        return self.builder.fpext(number, ir.VectorType(FLOAT, lanes))

    def _bytes(self, block: Any, offset: int, *, signed: bool = False) -> Any:
        """Bytes of a block as integers of 32 bits, one in each lane."""
        found = self.code.load(self.code.after(block, offset), ir.VectorType(OCTET, LANES))
        return (self.builder.sext if signed else self.builder.zext)(found, self.code.words)

    def _bits(self, words: Any, first: int, count: int) -> Any:
        shifted = self.builder.lshr(words, self.code.every(first)) if first else words
        return shifted if first + count == 8 else self.builder.and_(shifted, self.code.every((1 << count) - 1))

    def _joined(self, low: Any, high: Any) -> Any:
        return self.builder.or_(low, self.builder.shl(high, self.code.every(4)))

    def _plus(self, words: Any, added: int) -> Any:
        return self.builder.add(words, self.code.every(added)) if added else words

    def _float(self, words: Any) -> Any:
        return self.builder.sitofp(words, self.code.vector)
