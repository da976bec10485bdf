"""Transposes matrix rows, so that a vector holds one column of ``LANES`` rows, and expands them lane by lane.

A lane has every ``LANES``-th column. Numbers are expanded to float32 and transposed. Packed blocks are transposed as
bytes and expanded when their lane is needed, which takes less memory and fewer shuffles. They need AVX-512, as a vector
must have as many lanes as a row has bytes that are transposed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from hdtool.runtime.kernels.compiled import BYTES, WORD, c_function, caller_of, compiled, generated
from hdtool.runtime.kernels.gemm_tiles import ELEMENT_TYPES, Numbers
from hdtool.runtime.kernels.matrix_formats import (
    FORMATS,
    INT4,
    PRECOMPUTED_SCALES,
    VALUE_TABLES,
    BlockCode,
    BlockFormat,
    Expand,
)
from hdtool.runtime.kernels.vector_code import CACHE_LINE, INDEX, ITEM_SIZE, LANES, OCTET, FloatCode, VectorCode

SQUARE = 16
"""Number of rows, and of bytes of each row, that are transposed at once."""
VECTOR_BYTES = LANES * ITEM_SIZE
FIRST_LEVELS = {
    "Q4_0": (2,),
    "Q4_1": (4,),
    "Q5_0": (6,),
    "Q5_1": (8,),
    "Q8_0": (2, 18),
    "Q4_K": range(16, 144, SQUARE),
    "Q5_K": range(16, 176, SQUARE),
    "Q6_K": range(0, 192, SQUARE),
    "IQ4_NL": (2,),
    "MXFP4": (1,),
    "int8": range(4, 68, SQUARE),
    "int4": (8, 24),
}
"""Offsets in a block at which the levels of 16 or 32 columns, or some of their bits, start."""
FIFTH_BITS = {"Q5_0": 2, "Q5_1": 4}
"""Offset in a block of the word with the highest bit of each level."""


OCTETS = ir.VectorType(OCTET, SQUARE)
PAIRS = (0, 1), (2, 3)
"""Words of the lower and upper half of a 128-bit part."""
TRANSPOSE = types.void(*[types.int64] * 5)
"""Signature of a format's C function ``transpose_rows``."""
EXPAND = types.void(*[types.int64] * 7)
"""Signature of a format's C function ``expand_lane``."""
call_transpose, call_expand = caller_of(TRANSPOSE), caller_of(EXPAND)


@c_function(TRANSPOSE)
def transpose_of(format: BlockFormat) -> Any:
    """Return the function that transposes rows of a format into memory that ``expand_lane`` reads."""
    name = format.name

    def transpose_rows(matrix: int, stride: int, rows: int, columns: int, written: int) -> None:
        _transpose_rows(matrix, name, stride, rows, columns, written)

    return transpose_rows


@c_function(EXPAND)
def expand_of(format: BlockFormat) -> Any:
    """Return the function that expands some columns of one lane of transposed rows to float32."""
    name = format.name

    def expand_lane(panel: int, row_columns: int, lane: int, first: int, columns: int, written: int, step: int) -> None:
        _expand_lane(panel, name, row_columns, lane, first, columns, written, step)

    return expand_lane


@generated(types.int64, None, *[types.int64] * 4)
def _transpose_rows(builder: Any, matrix: Any, name: str, stride: Any, rows: Any, columns: Any, written: Any) -> None:
    """Transpose the first ``LANES`` of ``rows`` matrix rows; if there are fewer, the last is repeated.

    At ``written``, there must be room for ``transposed_size(columns)`` numbers.
    """
    code, format = FloatCode(builder), FORMATS[name]
    addresses = [builder.inttoptr(address, BYTES) for address in row_addresses(builder, matrix, stride, rows)]

    def write_numbers(column: Any, _: list[Any]) -> list[Any]:
        numbers = Numbers(code, format)
        vectors = [numbers.expanded(code.gep(address, numbers.offset(column))) for address in addresses]
        for lane, vector in enumerate(transposed(code, vectors)):
            code.store(vector, _number_address(builder, written, columns, INDEX(lane), column))
        return []

    if format in ELEMENT_TYPES:
        code.loop(columns, [], write_numbers)
        return

    def write_block(column: Any, _: list[Any]) -> list[Any]:
        index = builder.udiv(column, INDEX(format.block_size))
        block = [code.gep(address, builder.mul(index, INDEX(format.bytes))) for address in addresses]
        _BlockWriter(code, format, _Layout(builder, format, written, columns, index)).write(block)
        return []

    code.loop(columns, [], write_block, format.block_size)


@compiled
def transposed_size(columns: int) -> int:
    """Return how many numbers ``LANES`` transposed rows take at most: each lane's columns end with a cache line.

    Packed blocks take less than a third of it; see ``_Layout``.
    """
    return LANES * (columns + CACHE_LINE // ITEM_SIZE)


def row_addresses(builder: Any, first: Any, stride: Any, rows: Any) -> list[Any]:
    """Return the addresses of ``LANES`` rows; if there are fewer, the last is repeated."""
    last = builder.sub(rows, INDEX(1))
    numbers = [builder.select(builder.icmp_signed("<", INDEX(row), last), INDEX(row), last) for row in range(LANES)]
    return [builder.add(first, builder.mul(number, stride)) for number in numbers]


def _number_address(builder: Any, first: Any, columns: Any, lane: Any, column: Any) -> Any:
    """Return the address of a vector of transposed numbers, which are ordered by lane."""
    lane_size = builder.add(builder.mul(columns, INDEX(ITEM_SIZE)), INDEX(CACHE_LINE))
    return builder.add(builder.add(first, builder.mul(lane, lane_size)), builder.mul(column, INDEX(ITEM_SIZE)))


@generated(types.int64, None, *[types.int64] * 6)
def _expand_lane(
    builder: Any,
    panel: Any,
    name: str,
    row_columns: Any,
    lane: Any,
    first: Any,
    columns: Any,
    written: Any,
    step: Any,
) -> None:
    """Expand the columns of a lane between ``first`` and ``first + columns``.

    They are written with a stride of ``step`` numbers. ``panel`` is the address of transposed rows of ``row_columns``
    columns.
    """
    code, format = FloatCode(builder), FORMATS[name]
    step_bytes = builder.mul(step, INDEX(ITEM_SIZE))

    def store(vector: Any, column: Any) -> None:
        number = builder.udiv(column, INDEX(LANES))
        code.store(vector, builder.add(written, builder.mul(number, step_bytes)))

    def copy_number(column: Any, _: list[Any]) -> list[Any]:
        at = _number_address(builder, panel, row_columns, lane, builder.add(first, column))
        store(code.read(at), column)
        return []

    if format in ELEMENT_TYPES:
        code.loop(columns, [], copy_number)
        return

    def expand_block(column: Any, _: list[Any]) -> list[Any]:
        index = builder.udiv(builder.add(first, column), INDEX(format.block_size))
        layout = _Layout(builder, format, panel, row_columns, index)
        expand = _BlockReader(code, format, layout, lane).columns()
        for vector in range(format.block_size // LANES):
            store(expand(vector), builder.add(column, INDEX(vector * LANES)))
        return []

    code.loop(columns, [], expand_block, format.block_size)


class _Layout:
    """Addresses of a transposed block: first the factors of all blocks, then four parts with the levels of all.

    Factors are vectors with one number of each row: scales, addends and words of fifth bits. Part ``k`` has the bytes
    k, k + 4, k + 8 and k + 12 of each square. A block takes at most 1,088 bytes for 64 columns (int8), where float32
    numbers take 4,096.
    """

    def __init__(self, builder: Any, format: BlockFormat, start: Any, columns: Any, block: Any) -> None:
        self._builder, self._start, self._block = builder, start, block
        self.squares = list(FIRST_LEVELS[format.name])
        scales = PRECOMPUTED_SCALES.get(format.name, 2 if format is INT4 else 1)
        self.factors = scales + (format.name in FIFTH_BITS)
        blocks = builder.udiv(columns, INDEX(format.block_size))
        self._levels = builder.add(start, builder.mul(blocks, INDEX(self.factors * VECTOR_BYTES)))
        self._part = builder.add(builder.mul(blocks, INDEX(len(self.squares) * 4 * SQUARE)), INDEX(CACHE_LINE))

    def factor(self, index: int) -> Any:
        """Return the address of a vector of factors."""
        place = self._builder.add(self._builder.mul(self._block, INDEX(self.factors)), INDEX(index))
        return self._builder.add(self._start, self._builder.mul(place, INDEX(VECTOR_BYTES)))

    def levels(self, part: Any, square: int) -> Any:
        """Return the address of four bytes of each row in a square."""
        builder = self._builder
        place = builder.add(builder.mul(self._block, INDEX(len(self.squares))), INDEX(square))
        first = builder.add(self._levels, builder.mul(part, self._part))
        return builder.add(first, builder.mul(place, INDEX(4 * SQUARE)))


class _TransposedCode(BlockCode):
    """Generates code for blocks of ``LANES`` rows at once, whose scales differ between lanes.

    A format's method must call ``_spread`` before it returns the expander, for the same factors in the same order:
    ``_BlockWriter`` stores them, and ``_BlockReader`` reads them back.
    """

    has_scaled_tables = False

    def _by_level(self, block: Any, first: int, levels: list[float], scale: Any, minimum: Any) -> Expand:
        values = ir.Constant(self.code.vector, levels)

        def expand(vector: int) -> Any:
            indices = self._bytes(block, first)
            # ``_permuted`` ignores all but the lowest four bits.
            indices = self.builder.lshr(indices, self.code.every(4)) if vector else indices
            return self._scaled(self._permuted(values, indices), scale, minimum)

        return expand

    def _by_table(self, block: Any, first: int, scale: Any) -> Expand:
        return self._by_level(block, first, [float(number) for number in VALUE_TABLES[self._format.name]], scale, None)


class _BlockWriter(_TransposedCode):
    """Generates code that transposes a block of ``LANES`` rows, which is given as a list of addresses."""

    def __init__(self, code: FloatCode, format: BlockFormat, layout: _Layout) -> None:
        super().__init__(code, format)
        self._float_code, self._layout, self._factors = code, layout, list[Any]()

    def write(self, block: Sequence[Any]) -> None:
        if self.scales == 16:
            one_row = BlockCode(self.code, self._format)
            self._factors = transposed(self.code, [one_row.sixteen_scales(address) for address in block])
        elif self.scales:
            for index in range(self.scales):
                self._half(block, 2 * index)  # ``_spread`` collects the factors
        else:
            self._expander(block, None)
        if bits := FIFTH_BITS.get(self._format.name):
            self._factors.append(
                self._gathered(block, lambda address: self.code.load(self.code.gep(address, bits), WORD))
            )
        assert len(self._factors) == self._layout.factors, self._format.name
        for index, vector in enumerate(self._factors):
            self._float_code.store(vector, self._layout.factor(index))
        for square, offset in enumerate(self._layout.squares):
            rows = [self.code.load(self.code.gep(address, offset), OCTETS) for address in block]
            for part, vector in enumerate(_transposed_octets(self.code, rows)):
                self._float_code.store(vector, self._layout.levels(INDEX(part), square))

    def _spread(self, block: Any, read: Callable[[Any], Any], lanes: int = LANES) -> Any:
        self._factors.append(self._gathered(block, read))
        return self._factors[-1]

    def _gathered(self, block: Any, read: Callable[[Any], Any]) -> Any:
        numbers = [read(address) for address in block]
        vector: Any = ir.Constant(ir.VectorType(numbers[0].type, LANES), ir.Undefined)
        for lane, number in enumerate(numbers):
            vector = self.builder.insert_element(vector, number, WORD(lane))
        return vector


class _BlockReader(_TransposedCode):
    """Generates code that expands a lane of a transposed block: vector ``k`` has column ``LANES * k + lane``."""

    def __init__(self, code: FloatCode, format: BlockFormat, layout: _Layout, lane: Any) -> None:
        super().__init__(code, format)
        self._float_code, self._layout, self._lane, self._count = code, layout, lane, 0
        self._part = self.builder.and_(lane, INDEX(3))
        self._place = self.builder.mul(self.builder.udiv(lane, INDEX(4)), INDEX(SQUARE))

    def columns(self) -> Expand:
        expand: Expand = self._expander(None, lambda index: self._float_code.read(self._layout.factor(index)))
        return expand

    def _spread(self, block: Any, read: Callable[[Any], Any], lanes: int = LANES) -> Any:
        self._count += 1
        return self._float_code.read(self._layout.factor(self._count - 1))

    def _bytes(self, block: Any, offset: int, *, signed: bool = False) -> Any:
        first = self._layout.levels(self._part, self._layout.squares.index(offset))
        octets = self._float_code.read(self.builder.add(first, self._place), OCTETS)
        return (self.builder.sext if signed else self.builder.zext)(octets, self.code.words)

    def _level_of_5_bits(self, block: Any, first: int, vector: int, lowest: int) -> Any:
        low = self._bits(self._bytes(block, first + 4), 4 * vector, 4)
        words = self._float_code.read(self._layout.factor(self._layout.factors - 1), self.code.words)
        bit = self.builder.add(self._lane, INDEX(vector * LANES))
        shift = self.code.splat(self.builder.trunc(bit, WORD))
        high = self.builder.and_(self.builder.lshr(words, shift), self.code.every(1))
        return self._float(self._plus(self._joined(low, high), lowest))


def _transposed_octets(code: VectorCode, rows: list[Any]) -> list[Any]:
    """Transpose a square of 16 rows of 16 bytes; vector ``k`` of the result holds columns k, k + 4, k + 8 and k + 12.

    Vectors of four rows are transposed first, so that each word has one column of four rows, then the words of all
    four vectors.
    """
    words, groups = ir.VectorType(WORD, 16), range(0, 16, 4)
    fours = [
        code.concatenate(code.concatenate(*rows[row : row + 2]), code.concatenate(*rows[row + 2 : row + 4]))
        for row in range(0, SQUARE, 4)
    ]
    by_part = [4 * row + part for part in range(4) for row in range(4)]
    fours = [_shuffled(code, code.builder.bitcast(four, words), by_part) for four in fours]
    by_column = [16 * part + 4 * row + column for part in range(4) for column in range(4) for row in range(4)]
    octets = ir.VectorType(OCTET, 64)
    fours = [_shuffled(code, code.builder.bitcast(four, octets), by_column) for four in fours]
    low, high = ([start + 16 * which + word for start in groups for word in pair for which in (0, 1)] for pair in PAIRS)
    first, second, third, fourth = (code.builder.bitcast(four, words) for four in fours)
    halves = [
        (
            code.builder.shuffle_vector(first, second, code.integers(order)),
            code.builder.shuffle_vector(third, fourth, code.integers(order)),
        )
        for order in (low, high)
    ]
    low, high = ([start + 16 * which + word for start in groups for which in (0, 1) for word in pair] for pair in PAIRS)
    joined = [code.builder.shuffle_vector(*half, code.integers(order)) for half in halves for order in (low, high)]
    return [code.builder.bitcast(vector, octets) for vector in joined]


def _shuffled(code: VectorCode, vector: Any, order: list[int]) -> Any:
    return code.builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), code.integers(order))


def transposed(code: VectorCode, vectors: list[Any]) -> list[Any]:
    """Transpose a square: exchange the upper right and lower left quarters, then those of each quarter, and so on."""
    half, lanes = LANES // 2, range(LANES)
    while half:
        left = code.integers([lane if not lane & half else lane - half + LANES for lane in lanes])
        right = code.integers([lane + half if not lane & half else lane + LANES for lane in lanes])
        for row in lanes:
            if not row & half:
                pair = vectors[row], vectors[row + half]
                vectors[row], vectors[row + half] = (code.builder.shuffle_vector(*pair, part) for part in (left, right))
        half //= 2
    return vectors
