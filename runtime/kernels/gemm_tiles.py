"""Generates the code of a product's tiles: some rows of a matrix by some input rows.

The matrix holds numbers of 32 or 16 bits, or the blocks of a GGUF file. They become float32 in registers, so the
results have the bits of the product with the expanded matrix. Each sum is added in one order whatever the number of
rows, so a row has the same bits alone and beside others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils

from hdtool.runtime.kernels.compiled import BYTES, generated
from hdtool.runtime.kernels.matrix_kind import MatrixKind, Tile, cases, type_of
from hdtool.runtime.kernels.packed_formats import OF_TYPE, Blocks, Expand
from hdtool.runtime.kernels.vector_code import CACHE_LINE, CPU, FLOAT, HALF, INDEX, ITEM_SIZE, LANES, SHORT, VectorCode

FLOAT32, BFLOAT16, FLOAT16 = MatrixKind("float32"), MatrixKind("bfloat16"), MatrixKind("float16")
NUMBERS = {type_of(FLOAT32): (FLOAT, 4), type_of(BFLOAT16): (SHORT, 2), type_of(FLOAT16): (HALF, 2)}
PREFETCHED = 8192
"""Bytes from what is read to what is prefetched, unless the rows of a tile are longer. A pass of four rows through
SmolLM2 on Zen 5 took 8.5 ms with one tile, 1,440 bytes, 8.3 with 2,048, 7.1 with 4,096, 7.0 with 8,192 and 7.3 with
16,384."""
INTO_L1 = CPU.startswith("znver")
"""Zen prefetches faster into its first cache. An Intel Xeon with AMX read 15 to 22 GB/s this way and 23 to 29 into the
second one; a pass of one row took 11.5 and 10.5 ms."""
PART_COLUMNS = 1024
"""Columns of a tile whose scales are computed at once, on the stack."""
SUMS = 16 if LANES == 16 else 8
"""Sums of a tile, which must fit into the registers with what is multiplied: AVX has 16 registers, ARM needs four for
what AVX-512 has in one."""
SUMS_OF_PAIR = 24 if LANES == 16 else 8
"""Those of a tile of one or two matrix rows, beside which the numbers of both fit as well."""
SUMS_OF_FOUR = 4 if LANES == 8 else SUMS
"""Those of a tile of four matrix rows. Beside more sums, the registers of AVX do not hold their scales and minima: with
eight sums, two input rows by 1,536 x 576 numbers in Q4_1 took 166 µs on Zen 4 without AVX-512, and 97 with four."""
MOST_OUTS, MOST_ROWS = 8, 11 if LANES == 8 else max(8, SUMS_OF_PAIR // 2)
"""Matrix rows of which a tile multiplies a divisor, and input rows of a tile, at most. AVX has registers for eleven
sums of one matrix row: nine rows by 1,536 x 576 numbers in Q4_1 take 0.78 of the time of tiles of five and four."""
FEW_ROWS = 4
"""Input rows of a tile up to which they are read where they are; more of them are interleaved, vector by vector."""


Body = Callable[[Any, list[Expand], list[Any]], Sequence[Any]]
"""Makes the next values of a loop from a column, a function for each matrix row, which gives the numbers of it from the
column on, and the last values."""


class _Numbers:
    """Generates the code that reads the rows of a matrix of numbers, in steps of one vector or more."""

    def __init__(self, code: VectorCode, kind: Any, vectors: int = 1) -> None:
        self.code = code
        self.number, self.size = NUMBERS[kind]
        self.step, self.vectors = LANES * vectors, vectors

    def stride(self, columns: Any) -> Any:
        """The bytes of a matrix row."""
        return self.code.builder.mul(columns, INDEX(self.size))

    def offset(self, column: Any) -> Any:
        """The bytes of a matrix row before a column."""
        return self.stride(column)

    def loop(self, rows: Sequence[Any], columns: Any, carried: Sequence[Any], body: Body) -> list[Any]:
        """A loop over the steps of some matrix rows."""

        def step(column: Any, values: list[Any]) -> Sequence[Any]:
            return body(column, [self._expander(self.code.after(row, self.offset(column))) for row in rows], values)

        return self.code.loop(columns, carried, step, self.step)

    def _expander(self, address: Any) -> Expand:
        return lambda place: self._expanded(self.code.after(address, place * LANES * self.size))

    def _expanded(self, address: Any) -> Any:
        builder, code = self.code.builder, self.code
        found = code.load(address, ir.VectorType(self.number, LANES), self.size)
        if self.number is FLOAT:
            return found
        if self.number is HALF:
            return builder.fpext(found, code.vector)
        # The bits of a bfloat16 are the upper half of those of a float32.
        return builder.bitcast(builder.shl(builder.zext(found, code.words), code.every(16)), code.vector)


class _Packed:
    """The same for a matrix of blocks, in steps of one block."""

    def __init__(self, code: VectorCode, kind: Any) -> None:
        self.code = code
        self.format = OF_TYPE[kind]
        self.blocks = Blocks(code, self.format)
        self.step, self.vectors = self.format.numbers, self.blocks.vectors

    def stride(self, columns: Any) -> Any:
        return self.offset(columns)

    def offset(self, column: Any) -> Any:
        block = self.code.builder.udiv(column, INDEX(self.format.numbers))
        return self.code.builder.mul(block, INDEX(self.format.bytes))

    def loop(self, rows: Sequence[Any], columns: Any, carried: Sequence[Any], body: Body) -> list[Any]:
        """The same. Where scales are computed ahead, a part of the columns has a loop for them and one for the rest."""
        code, builder, count = self.code, self.code.builder, self.blocks.scales * len(rows)
        size = max(1, PART_COLUMNS // self.step * count)
        memory = cgutils.alloca_once(builder, FLOAT, size)  # type: ignore[no-untyped-call]

        def part(first: Any, values: list[Any]) -> Sequence[Any]:
            left = builder.sub(columns, first)
            some = builder.select(builder.icmp_signed("<", left, INDEX(PART_COLUMNS)), left, INDEX(PART_COLUMNS))

            def blocks(column: Any) -> list[tuple[Any, Any]]:
                """The addresses of a block of each row, and of its scales."""
                offset = self.offset(builder.add(first, column))
                scales = code.after(memory, builder.mul(builder.udiv(column, INDEX(self.step)), INDEX(count)))
                return [
                    (code.after(row, offset), code.after(scales, place * self.blocks.scales))
                    for place, row in enumerate(rows)
                ]

            def write(column: Any, _: list[Any]) -> Sequence[Any]:
                for block, scales in blocks(column):
                    self.blocks.write_scales(block, scales)
                return []

            def step(column: Any, values: list[Any]) -> Sequence[Any]:
                expanders = [self.blocks.expander(block, scales) for block, scales in blocks(column)]
                return body(builder.add(first, column), expanders, values)

            if count:
                code.loop(some, [], write, self.step)
            return code.loop(some, values, step, self.step)

        return code.loop(columns, carried, part, PART_COLUMNS)


def _read(code: VectorCode, kind: Any) -> Any:
    return (_Numbers if kind in NUMBERS else _Packed)(code, kind)


def outs_beside(rows: int) -> int:
    """The matrix rows of a tile with this number of input rows; a divisor of ``MOST_OUTS``."""
    return max(outs for outs in (1, 2, 4) if outs * rows <= (SUMS_OF_PAIR if outs <= 2 else SUMS_OF_FOUR) or outs == 1)


def tile(outs: int, rows: int, *, interleaved: bool = False) -> Tile:
    """The multiplication of ``outs`` rows of a matrix by ``rows`` input rows, which may be interleaved."""

    def generate(builder: Any, kind: Any, matrix: Any, columns: Any, inputs: Any, outputs: Any, apart: Any) -> None:
        code = VectorCode(builder)
        read, zeros = _read(code, kind), [_zero(code)] * (outs * rows)
        stride = read.stride(columns)
        sums = _sums(code, read, matrix, stride, columns, inputs, zeros, rows, interleaved, prefetches=True)
        _write_totals(code, sums, rows, outputs, apart)

    return generate


def partial_tile(outs: Mapping[int, int], *, last: bool) -> Any:
    """An intrinsic that does so for some columns of a float32 matrix, which may be the ``last`` ones.

    Rows of the matrix are ``stride`` bytes from each other. ``sums`` has the sums of the columns before, a vector each,
    but for the ``first`` columns. As many bytes as there are columns are prefetched ``near`` and ``far``. The number of
    interleaved input rows, its last argument, is a key of ``outs``, the matrix rows beside them.
    """

    @generated(*[types.int64] * 5, types.boolean, *[types.int64] * 5)
    def run(
        builder: Any,
        matrix: Any,
        stride: Any,
        columns: Any,
        inputs: Any,
        sums: Any,
        first: Any,
        outputs: Any,
        apart: Any,
        near: Any,
        far: Any,
        rows: Any,
    ) -> None:
        code = VectorCode(builder)
        for number, beside in cases(builder, rows, outs):
            start = builder.inttoptr(sums, FLOAT.as_pointer())
            places = [code.after(start, LANES * place) for place in range(beside * number)]
            kept = [code.load(place, code.vector, ITEM_SIZE) for place in places]
            before = [builder.select(first, _zero(code), one) for one in kept]
            read = _Numbers(code, type_of(FLOAT32), CACHE_LINE // LANES)
            found = _sums(
                code, read, matrix, stride, columns, inputs, before, number, interleaved=True, prefetched=(near, far)
            )
            if last:
                _write_totals(code, found, number, outputs, apart)
            else:
                for sum_, place in zip(found, places, strict=True):
                    builder.store(sum_, builder.bitcast(place, code.vector.as_pointer())).align = ITEM_SIZE

    return run


def _zero(code: VectorCode) -> Any:
    return ir.Constant(code.vector, [0.0] * LANES)


def _sums(
    code: VectorCode,
    read: Any,
    matrix: Any,
    stride: Any,
    columns: Any,
    inputs: Any,
    first: Sequence[Any],
    rows: int,
    interleaved: bool,
    prefetches: bool = False,
    prefetched: Sequence[Any] = (),
) -> list[Any]:
    """The sums, matrix row by matrix row, after the products of these columns are added to the ``first`` ones.

    With ``prefetches``, later rows of the matrix are fetched from memory meanwhile; at the ``prefetched`` addresses, as
    many bytes as there are columns.
    """
    builder, outs = code.builder, len(first) // rows
    start = builder.inttoptr(matrix, BYTES)
    places = [code.after(start, builder.mul(stride, INDEX(out))) for out in range(outs)]
    numbers = builder.inttoptr(inputs, FLOAT.as_pointer())
    size = builder.mul(stride, INDEX(outs))
    distance = builder.select(builder.icmp_signed(">", size, INDEX(PREFETCHED)), size, INDEX(PREFETCHED))

    def multiply(column: Any, expanders: list[Expand], sums: list[Any]) -> list[Any]:
        if prefetches:
            ahead = builder.add(distance, builder.mul(read.offset(column), INDEX(outs)))
            _prefetch(code, code.after(start, ahead), read, outs)
        for address in prefetched:
            code.prefetch(builder.inttoptr(builder.add(address, column), BYTES))
        for place in range(read.vectors):
            at = builder.add(column, INDEX(place * LANES))
            weights = [expand(place) for expand in expanders]
            for row, address in enumerate(_input_places(code, numbers, at, columns, rows, interleaved)):
                factor = code.load(address, code.vector, ITEM_SIZE)
                for out, weight in enumerate(weights):
                    sum_ = out * rows + row
                    sums[sum_] = code.multiply_add(weight, factor, sums[sum_])
        return sums

    found: list[Any] = read.loop(places, columns, first, multiply)
    return found


def _write_totals(code: VectorCode, sums: Sequence[Any], rows: int, outputs: Any, apart: Any) -> None:
    """Write the totals of sums, as many at once as a vector has lanes."""
    builder, outs = code.builder, len(sums) // rows
    together = LANES // outs
    written = builder.inttoptr(outputs, FLOAT.as_pointer())
    for first in range(0, rows, together):
        some = range(first, min(first + together, rows))
        of_rows = [sums[out * rows + row] for row in some for out in range(outs)]
        totals = code.sums_of([*of_rows, *[_zero(code)] * (LANES - len(of_rows))])
        for row in some:
            found = code.part(totals, (row - first) * outs, outs)
            where = code.after(written, builder.mul(apart, INDEX(row)))
            builder.store(found, builder.bitcast(where, found.type.as_pointer())).align = ITEM_SIZE


def _input_places(code: VectorCode, inputs: Any, at: Any, columns: Any, rows: int, interleaved: bool) -> list[Any]:
    """The addresses of each input row's numbers at a column."""
    builder = code.builder
    if interleaved:
        first = code.after(inputs, builder.mul(at, INDEX(rows)))
        return [code.after(first, row * LANES) for row in range(rows)]
    return [code.after(inputs, builder.add(builder.mul(columns, INDEX(row)), at)) for row in range(rows)]


def _prefetch(code: VectorCode, ahead: Any, read: Any, outs: int) -> None:
    """Prefetch as much as is read, in the order of memory."""
    size = read.format.bytes if isinstance(read, _Packed) else read.size * read.step
    for byte in range(0, max(outs * size, CACHE_LINE), CACHE_LINE):
        code.prefetch(code.after(ahead, byte), nearest=INTO_L1)


@generated(types.int64, None, types.int64, types.int64)
def unpack_row(builder: Any, matrix: Any, kind: Any, columns: Any, written: Any) -> None:
    """Write a matrix row as float32 numbers."""
    code = VectorCode(builder)
    read = _read(code, kind)
    first, numbers = builder.inttoptr(matrix, BYTES), builder.inttoptr(written, FLOAT.as_pointer())

    def write(column: Any, expanders: list[Expand], _: list[Any]) -> list[Any]:
        code.prefetch(code.after(first, builder.add(read.offset(column), INDEX(PREFETCHED))), nearest=INTO_L1)
        (expand,) = expanders
        for place in range(read.vectors):
            at = code.after(numbers, builder.add(column, INDEX(place * LANES)))
            builder.store(expand(place), builder.bitcast(at, code.vector.as_pointer())).align = ITEM_SIZE
        return []

    read.loop([first], columns, [], write)


@generated(*[types.int64] * 4)
def copy_vectors(builder: Any, read: Any, count: Any, written: Any, apart: Any) -> None:
    """Write a row of float32 numbers with its vectors ``apart`` vectors from each other."""
    code = VectorCode(builder)
    first, numbers = builder.inttoptr(read, FLOAT.as_pointer()), builder.inttoptr(written, FLOAT.as_pointer())

    def write(column: Any, _: list[Any]) -> list[Any]:
        to = code.after(numbers, builder.mul(column, apart))
        found = code.load(code.after(first, column), code.vector, ITEM_SIZE)
        builder.store(found, builder.bitcast(to, code.vector.as_pointer())).align = ITEM_SIZE
        return []

    code.loop(count, [], write)


@generated(None, returns=types.int64)
def block_numbers(builder: Any, kind: Any) -> Any:
    """The numbers of a block; 1 for a matrix without blocks."""
    return INDEX(OF_TYPE[kind].numbers if kind in OF_TYPE else 1)
