"""Generates LLVM code for int8 tiles, which multiply a panel of weights by a few quantized input rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from hdtool.runtime.kernels.compiled import BYTES, WORD, generated
from hdtool.runtime.kernels.int8_dot_products import (
    ANY_PROCESSOR,
    DOT_OF_PAIRS,
    DOT_OF_SIGNED,
    EXPONENT_SIZE,
    FLOAT_SIZE,
    FLOATS,
    LOW_BITS,
    OCTETS,
    PANEL_ROWS,
    PART,
    PLANE,
    QUADS,
    WORDS,
    DotProduct,
    IntegerCode,
    PanelFormat,
    best_dot,
    panel_format,
)
from hdtool.runtime.kernels.matrix_formats import FORMATS, TINIEST_SCALE, TINY_SCALES, BlockFormat, Tile
from hdtool.runtime.kernels.vector_code import CACHE_LINE, CPU, FLOAT, HALF, INDEX, OCTET, SHORT

VECTORS = PART // PANEL_ROWS
SCALE, SCALED_SUM, CORRECTIONS = PART, PART + 4, PART + 8
"""Byte offsets in the record of a quantized part, which begins with one byte per column.

SCALE: the part's scale. SCALED_SUM: the sum of the part's values. CORRECTIONS: integers to add to the dot products
because of the levels' offset, one for each half of the columns or one for all columns.
"""
RECORD_SIZE = PART + 16
"""Size of a part's record in bytes."""
MAX_LEVEL = 127.0
MIN_MAGNITUDE = 1e-30
"""Parts whose largest magnitude doesn't exceed this become zero, because their scale's inverse might be infinite."""
ROUNDING, ROUNDING_BITS = 12582912.0, 0x4B400000
"""1.5 * 2**23 and its bits; adding it rounds a small number to an integer in the lowest bits of the sum."""


@generated(types.int64, None, types.int64, types.int64)
def quantize_row(builder: Any, read: Any, name: str, columns: Any, written: Any) -> None:
    """Quantize a row of float32 values to int8 for a matrix in the named format, and write one record per part."""
    code = IntegerCode(builder, ANY_PROCESSOR)
    form = panel_format(FORMATS[name])
    numbers, records = builder.inttoptr(read, FLOAT.as_pointer()), builder.inttoptr(written, BYTES)

    def write(part: Any, _: list[Any]) -> list[Any]:
        first = code.gep(numbers, builder.mul(part, INDEX(PART)))
        record = code.gep(records, builder.mul(part, INDEX(RECORD_SIZE)))
        vectors = [code.load(code.gep(first, place * PANEL_ROWS), FLOATS, 4) for place in range(VECTORS)]
        largest = _largest(code, vectors)
        scale = builder.fadd(builder.fdiv(largest, FLOAT(MAX_LEVEL)), _zero_or_nan(code, vectors))
        inverse = builder.fdiv(FLOAT(MAX_LEVEL), largest)
        inverse = builder.select(builder.fcmp_ordered(">", largest, FLOAT(MIN_MAGNITUDE)), inverse, FLOAT(0.0))
        levels = [_rounded(code, vector, code.splat(inverse, PANEL_ROWS)) for vector in vectors]
        for place, level in enumerate(levels):
            octets = builder.trunc(level, ir.VectorType(OCTET, PANEL_ROWS))
            _store(builder, octets, code.gep(record, place * PANEL_ROWS))
        halves = [_sum(code, levels[: VECTORS // 2]), _sum(code, levels[VECTORS // 2 :])]
        whole = builder.add(*halves)
        _store(builder, scale, code.gep(record, SCALE))
        _store(builder, builder.fmul(scale, builder.sitofp(whole, FLOAT)), code.gep(record, SCALED_SUM))
        for place, total in enumerate(halves if form.scales == 2 else [whole]):
            correction = builder.mul(total, WORD(-form.offset))
            _store(builder, correction, code.gep(record, CORRECTIONS + 4 * place))
        return []

    code.loop(builder.udiv(columns, INDEX(PART)), [], write, 1)


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.bitcast(address, value.type.as_pointer())).align = 1


def _largest(code: IntegerCode, vectors: list[Any]) -> Any:
    """Return the largest magnitude in any lane of the vectors."""

    def larger(first: Any, second: Any) -> Any:
        return code.builder.select(code.builder.fcmp_ordered(">", first, second), first, second)

    largest = reduce(larger, [code.call(f"llvm.fabs.v{PANEL_ROWS}f32", FLOATS, vector) for vector in vectors])
    return code.reduce(largest, larger)


def _zero_or_nan(code: IntegerCode, vectors: list[Any]) -> Any:
    """Return 0, or NaN if any value is infinite or NaN, so that the outputs become NaN as well."""
    zero = ir.Constant(FLOATS, [0.0] * PANEL_ROWS)
    products = zero
    for vector in vectors:
        products = code.scaled(vector, zero, products)
    return code.reduce(products, code.builder.fadd)


def _rounded(code: IntegerCode, vector: Any, inverse: Any) -> Any:
    shifted = code.scaled(vector, inverse, ir.Constant(FLOATS, [ROUNDING] * PANEL_ROWS))
    return code.builder.sub(code.builder.bitcast(shifted, WORDS), code.constant(ROUNDING_BITS, WORD, PANEL_ROWS))


def _sum(code: IntegerCode, vectors: list[Any]) -> Any:
    return code.reduce(reduce(code.builder.add, vectors), code.builder.add)


SIGN = 128
"""Highest bit of a byte; flipping it subtracts 128 from an unsigned level, which makes the level signed."""
MAX_PAIR_BITS = 6
"""Maximum number of level bits with which the sum of two products always fits into 16 bits."""
PANEL_PREFETCH_DISTANCE = 8192
"""Prefetch distance in bytes for at least ``FAR_PREFETCH_ROWS`` input rows."""
ONE_ROW_PREFETCH_DISTANCE = 1024 if CPU in ("znver3", "znver4") else PANEL_PREFETCH_DISTANCE
"""Prefetch distance in bytes for one input row.

With so little to compute, Zen 4's hardware prefetcher keeps up with memory. Other processors' prefetchers don't: a pass
of SmolLM2 took 3.3 ms on Zen 5 with 1,024 bytes, 2.7 ms with 4,096, 2.6 ms with 8,192 and 2.8 ms with 16,384. On an
Intel Xeon with AMX, the pass took 8.4 ms with 1,024 bytes and 7.5 ms with 8,192.
"""
FAR_PREFETCH_ROWS = 2
"""Minimum number of input rows for which tiles use ``PANEL_PREFETCH_DISTANCE``."""
INT8_TILE_ROWS = 12 if PANEL_ROWS == 16 else 4
"""Maximum input rows per tile, whose sums must fit into registers: AVX-512 has 32, AVX2 16.

On an Intel Xeon with AMX, 12 rows in Q4_K took 0.77 to 0.90 times as long as with tiles of 8, and 33 rows 0.80 to 0.88.
"""


class _Part:
    """Generates the code that reads one part of a panel."""

    def __init__(self, code: IntegerCode, form: PanelFormat, panel: Any, part: Any, prefetched: int) -> None:
        """``prefetched`` is the prefetch distance in bytes."""
        builder = code.builder
        self._code, self._form = code, form
        group, place = builder.udiv(part, INDEX(form.parts)), builder.urem(part, INDEX(form.parts))
        header = code.gep(panel, builder.mul(group, INDEX(form.group)))
        octets = code.gep(header, builder.add(INDEX(form.header), builder.mul(place, INDEX(form.part))))
        self._levels = code.gep(octets, form.octets)
        # Prefetch the headers between groups as well; otherwise each group would wait for memory once.
        for byte in range(0, form.part + form.header, CACHE_LINE):
            code.prefetch(code.gep(self._levels, prefetched + byte))
        self.scales = [self._scale(header)] * form.scales
        self._signed = form.offset == SIGN and code.dot == DOT_OF_SIGNED
        self.has_offset = form.offset != 0 and not self._signed
        self.minimum = self._scale(code.gep(header, form.scale_size * PANEL_ROWS)) if form.has_minima else None
        if form.octets:
            factors = [self._factor(code.gep(octets, PANEL_ROWS * scale)) for scale in range(form.scales)]
            self.scales = [builder.fmul(scale, factor) for scale, factor in zip(self.scales, factors, strict=True)]
        if form.octets and form.has_minima:
            below = builder.fmul(self.minimum, self._factor(code.gep(octets, PANEL_ROWS)))
            self.minimum = builder.fneg(below)

    def _scale(self, address: Any) -> Any:
        if self._form.scale_size == FLOAT_SIZE:
            return self._code.load(address, FLOATS)
        if self._form.scale_size == EXPONENT_SIZE:
            return self._power_of_2(self._code.load(address, ir.VectorType(OCTET, PANEL_ROWS)))
        return self._code.builder.fpext(self._code.load(address, ir.VectorType(HALF, PANEL_ROWS)), FLOATS)

    def _power_of_2(self, exponents: Any) -> Any:
        """Return the powers of two whose exponents MXFP4 stores as scales."""
        builder, code = self._code.builder, self._code
        words = builder.zext(exponents, ir.VectorType(WORD, PANEL_ROWS))

        def every(number: int) -> Any:
            return code.constant(number, WORD, PANEL_ROWS)

        tiny, usual = builder.shl(every(TINIEST_SCALE), words), builder.shl(builder.sub(words, every(1)), every(23))
        is_tiny = builder.icmp_unsigned("<", words, every(TINY_SCALES))
        return builder.bitcast(builder.select(is_tiny, tiny, usual), FLOATS)

    def _factor(self, address: Any) -> Any:
        builder, words = self._code.builder, ir.VectorType(WORD, PANEL_ROWS)
        octets = self._code.load(address, ir.VectorType(OCTET, PANEL_ROWS))
        # The scales of Q6_K are signed bytes; other factors are unsigned and have 6 bits.
        return builder.sitofp((builder.sext if self._form.scales == 2 else builder.zext)(octets, words), FLOATS)

    def quads(self) -> Iterator[tuple[int, list[Any]]]:
        """Yield ``(quad, levels)`` for each quad of columns in the part: its index and its levels in all rows.

        ``levels`` has one vector, or two with the lower and upper bits if sums of whole levels wouldn't fit into 16
        bits.
        """
        table, split = self._form.table, self._form.high_bits == LOW_BITS
        for first in range(QUADS // 2):
            pair = self._bits(first * PLANE)
            upper = self._bits((QUADS // 2 + first) * PLANE) if split else (None, None)
            for quad, low, high in zip((first, QUADS // 2 + first), pair, upper, strict=True):
                if table:
                    yield quad, self._of_table(table, low)
                elif not split:
                    yield quad, [self._joined(low, quad)]
                elif self._code.dot == DOT_OF_PAIRS:
                    yield quad, [low, high]
                else:
                    yield quad, [self._eight_bits(low, high)]

    def _of_table(self, table: tuple[int, ...], indices: Any) -> list[Any]:
        if self._signed:
            return [self._code.table_lookup([level - SIGN for level in table], indices)]
        if self._form.level_bits > MAX_PAIR_BITS and self._code.dot == DOT_OF_PAIRS:
            parts = [level & 15 for level in table], [level >> LOW_BITS for level in table]
            return [self._code.table_lookup(part, indices) for part in parts]
        return [self._code.table_lookup(table, indices)]

    def _eight_bits(self, low: Any, high: Any) -> Any:
        """Join lower and upper bits into 8-bit levels; if levels are signed, subtract the offset."""
        levels = self._code.builder.or_(low, self._shifted(high, LOW_BITS))
        return self._code.builder.xor(levels, self._code.constant(SIGN)) if self._signed else levels

    def _bits(self, offset: int) -> tuple[Any, Any]:
        """Load a vector of bytes and return their lower and upper four bits."""
        octets = self._code.load(self._code.gep(self._levels, offset), OCTETS)
        return self._masked(octets, 15), self._masked(self._shifted(octets, -LOW_BITS), 15)

    def _joined(self, low: Any, quad: int) -> Any:
        """Add the upper bits of a quad's levels to ``low``; one vector stores the upper bits of several quads."""
        bits = self._form.high_bits
        if not bits:
            return low
        plane, place = divmod(quad, QUADS // bits)
        octets = self._code.load(self._code.gep(self._levels, (QUADS // 2 + plane) * PLANE), OCTETS)
        upper = self._shifted(octets, LOW_BITS - bits * place)
        return self._code.builder.or_(low, self._masked(upper, ((1 << bits) - 1) << LOW_BITS))

    def _masked(self, octets: Any, mask: int) -> Any:
        return self._code.builder.and_(octets, self._code.constant(mask))

    def _shifted(self, octets: Any, left: int) -> Any:
        """Shift bytes in pairs, because x86 cannot shift single bytes; callers mask the bits that cross over."""
        builder, kind = self._code.builder, ir.VectorType(SHORT, PLANE // 2)
        if left == 0:
            return octets
        pairs, count = builder.bitcast(octets, kind), self._code.constant(abs(left), SHORT, PLANE // 2)
        return builder.bitcast((builder.shl if left > 0 else builder.lshr)(pairs, count), OCTETS)


def panel_tile(rows: int, dot: str | None = None) -> Tile:
    """Return a function that generates the code of a tile, which multiplies a panel by ``rows`` quantized rows."""
    used = dot or best_dot()
    prefetched = PANEL_PREFETCH_DISTANCE if rows >= FAR_PREFETCH_ROWS else ONE_ROW_PREFETCH_DISTANCE

    def generate(
        builder: Any, format: BlockFormat, panel: Any, columns: Any, inputs: Any, outputs: Any, output_stride: Any
    ) -> None:
        code = IntegerCode(builder, used)
        form = panel_format(format)
        first, records = builder.inttoptr(panel, BYTES), builder.inttoptr(inputs, BYTES)
        count = builder.udiv(columns, INDEX(PART))

        def multiply(part: Any, sums: list[Any]) -> list[Any]:
            weights = _Part(code, form, first, part, prefetched)
            places = [builder.add(builder.mul(count, INDEX(row)), part) for row in range(rows)]
            read = [code.gep(records, builder.mul(place, INDEX(RECORD_SIZE))) for place in places]
            totals = _totals(code, form, weights, read)
            return [_added(code, weights, row, *row_sums) for row, *row_sums in zip(read, totals, sums, strict=True)]

        sums = code.loop(count, [ir.Constant(FLOATS, [0.0] * PANEL_ROWS)] * rows, multiply, 1)
        written = builder.inttoptr(outputs, FLOAT.as_pointer())
        for row, outputs_of_row in enumerate(sums):
            target = code.gep(written, builder.mul(output_stride, INDEX(row)))
            builder.store(outputs_of_row, builder.bitcast(target, FLOATS.as_pointer())).align = 4

    return generate


def _totals(code: IntegerCode, form: PanelFormat, weights: _Part, read: list[Any]) -> list[list[Any]]:
    """Return the integer dot products of each input row with a part, one for each of the part's scales."""
    planes = 2 if form.level_bits > MAX_PAIR_BITS and code.dot == DOT_OF_PAIRS else 1
    bits = LOW_BITS if planes == 2 else form.level_bits
    largest = (1 << bits) - 1
    dots = [[[DotProduct(code, largest) for _ in range(planes)] for _ in range(form.scales)] for _ in read]
    for quad, levels in weights.quads():
        scale = quad // (QUADS // form.scales)
        for row, row_dots in zip(read, dots, strict=True):
            inputs = code.quad(row, quad)
            for level, dot in zip(levels, row_dots[scale], strict=True):
                dot.add(level, inputs)
    return [[_whole(code, planes_) for planes_ in row_dots] for row_dots in dots]


def _whole(code: IntegerCode, planes: list[DotProduct]) -> Any:
    low, *upper = [plane.total() for plane in planes]
    for high in upper:
        low = code.builder.add(low, code.builder.shl(high, code.constant(LOW_BITS, WORD, PANEL_ROWS)))
    return low


def _added(code: IntegerCode, weights: _Part, row: Any, totals: list[Any], added: Any) -> Any:
    """Return a row's sums with a part's contribution added."""
    builder = code.builder
    input_scale = code.broadcast(code.gep(row, SCALE), FLOAT)
    for place, (total, scale) in enumerate(zip(totals, weights.scales, strict=True)):
        if weights.has_offset:
            total = builder.add(total, code.broadcast(code.gep(row, CORRECTIONS + 4 * place), WORD))
        added = code.scaled(builder.sitofp(total, FLOATS), builder.fmul(scale, input_scale), added)
    if weights.minimum is not None:
        added = code.scaled(weights.minimum, code.broadcast(code.gep(row, SCALED_SUM), FLOAT), added)
    return added
