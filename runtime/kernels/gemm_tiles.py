"""LLVM code generation for matmul tiles: a few matrix rows by a few input rows.

The matrix is stored in float32, 16 bits or packed blocks and expanded to float32 in registers, so results equal those
of the expanded matrix bit for bit. The order of summation is independent of the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils

from hdtool.runtime.kernels.compiled import BYTES, Record, c_function, caller_of, compiled, generated
from hdtool.runtime.kernels.matrix_formats import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FORMATS,
    BlockCode,
    BlockFormat,
    Expand,
    Tile,
    cases,
)
from hdtool.runtime.kernels.vector_code import CACHE_LINE, CPU, FLOAT, HALF, INDEX, ITEM_SIZE, LANES, SHORT, VectorCode

ELEMENT_TYPES = {FLOAT32: FLOAT, BFLOAT16: SHORT, FLOAT16: HALF}
PREFETCH_DISTANCE = 8192
"""Minimum prefetch distance in bytes; larger tiles prefetch one tile ahead.

On Zen 5, four rows through SmolLM2 took 8.5 ms with 1,440 bytes, 7.1 with 4,096, 7.0 with 8,192 and 7.3 with 16,384.
"""
INTO_L1 = CPU.startswith("znver")
"""True if prefetching into L1 is faster than into L2, as on Zen; on an Intel Xeon, passes took 1.1 times as long."""
SCALED_COLUMNS = 1024
"""Number of columns whose scales are computed ahead and kept on the stack."""
PAIR_ACCUMULATORS = 24 if LANES == 16 else 8
"""Maximum number of sums in a tile of one or two matrix rows, whose operands take fewer registers."""
QUAD_ACCUMULATORS = {16: 16, 8: 4, 4: 8}[LANES]
"""Maximum sums of a tile of four matrix rows; with AVX, Q4_1 took 1.7 times as long with eight as with four."""
TILE_OUT_FEATURES, MAX_TILE_ROWS = 8, 11 if LANES == 8 else max(8, PAIR_ACCUMULATORS // 2)
"""A multiple of all tiles' matrix rows, and the maximum input rows of a tile.

AVX has registers for eleven sums of one matrix row; nine input rows took 0.78 times as long as in two tiles.
"""
MAX_DIRECT_ROWS = 4
"""Maximum input rows that a tile reads in place; more rows are interleaved vector by vector."""


class Operands(NamedTuple):
    """Addresses and sizes of a matmul's operands: compiled code computes ``outputs = inputs @ matrix.T``."""

    matrix: int
    out_features: int
    columns: int
    inputs: int
    rows: int
    """Number of input rows."""
    outputs: int
    output_stride: int
    """Distance between output rows in numbers."""


LoopBody = Callable[[Any, list[Expand], list[Any]], Sequence[Any]]
"""Generates a loop body from the column, an expander per matrix row and the current values; returns the next values."""


class Numbers:
    """Generates code that reads matrix rows of float32 or 16-bit numbers, one or more vectors per step."""

    def __init__(self, code: VectorCode, format: BlockFormat, vectors: int = 1) -> None:
        self.code = code
        self.number, self.size = ELEMENT_TYPES[format], format.bytes
        self.step, self.vectors = LANES * vectors, vectors

    def stride(self, columns: Any) -> Any:
        """Return the size of a matrix row in bytes."""
        return self.code.builder.mul(columns, INDEX(self.size))

    def offset(self, column: Any) -> Any:
        """Return the byte offset of a column in a matrix row."""
        return self.stride(column)

    def loop(self, rows: Sequence[Any], columns: Any, carried: Sequence[Any], body: LoopBody) -> list[Any]:
        """Generate a loop over the columns of several matrix rows; return the final values of ``carried``."""

        def step(column: Any, values: list[Any]) -> Sequence[Any]:
            return body(column, [self._expander(self.code.gep(row, self.offset(column))) for row in rows], values)

        return self.code.loop(columns, carried, step, self.step)

    def _expander(self, address: Any) -> Expand:
        return lambda vector: self.expanded(self.code.gep(address, vector * LANES * self.size))

    def expanded(self, address: Any) -> Any:
        """Return the vector at an address as float32."""
        builder, code = self.code.builder, self.code
        loaded = code.load(address, ir.VectorType(self.number, LANES), self.size)
        if self.number is FLOAT:
            return loaded
        if self.number is HALF:
            return builder.fpext(loaded, code.vector)
        # A bfloat16 is the upper half of a float32.
        return builder.bitcast(builder.shl(builder.zext(loaded, code.words), code.every(16)), code.vector)


class _Packed:
    """Generates code that reads matrix rows of packed blocks, one block per step."""

    def __init__(self, code: VectorCode, format: BlockFormat) -> None:
        self.code, self.format = code, format
        self.blocks = BlockCode(code, self.format)
        self.step, self.vectors = self.format.block_size, self.blocks.vectors

    def stride(self, columns: Any) -> Any:
        return self.offset(columns)

    def offset(self, column: Any) -> Any:
        block = self.code.builder.udiv(column, INDEX(self.format.block_size))
        return self.code.builder.mul(block, INDEX(self.format.bytes))

    def loop(self, rows: Sequence[Any], columns: Any, carried: Sequence[Any], body: LoopBody) -> list[Any]:
        """Generate a loop over the blocks of several matrix rows; return the final values of ``carried``.

        If a format's scales are computed ahead, an extra loop computes them for each ``SCALED_COLUMNS`` columns.
        """
        code, builder, count = self.code, self.code.builder, self.blocks.scales * len(rows)
        size = max(1, SCALED_COLUMNS // self.step * count)
        memory = cgutils.alloca_once(builder, FLOAT, size)  # type: ignore[no-untyped-call]

        def part(first: Any, values: list[Any]) -> Sequence[Any]:
            left = builder.sub(columns, first)
            part_columns = builder.select(
                builder.icmp_signed("<", left, INDEX(SCALED_COLUMNS)), left, INDEX(SCALED_COLUMNS)
            )

            def blocks(column: Any) -> list[tuple[Any, Any]]:
                """Return, for each row, the addresses of its block and of the block's scales."""
                offset = self.offset(builder.add(first, column))
                scales = code.gep(memory, builder.mul(builder.udiv(column, INDEX(self.step)), INDEX(count)))
                return [
                    (code.gep(row, offset), code.gep(scales, position * self.blocks.scales))
                    for position, row in enumerate(rows)
                ]

            def write(column: Any, _: list[Any]) -> Sequence[Any]:
                for block, scales in blocks(column):
                    self.blocks.write_scales(block, scales)
                return []

            def step(column: Any, values: list[Any]) -> Sequence[Any]:
                expanders = [self.blocks.expander(block, scales) for block, scales in blocks(column)]
                return body(builder.add(first, column), expanders, values)

            if count:
                code.loop(part_columns, [], write, self.step)
            return code.loop(part_columns, values, step, self.step)

        return code.loop(columns, carried, part, SCALED_COLUMNS)


def _read(code: VectorCode, format: BlockFormat) -> Any:
    return (Numbers if format in ELEMENT_TYPES else _Packed)(code, format)


def tile_out_features(rows: int) -> int:
    """Return the number of matrix rows in a tile with ``rows`` input rows; it divides ``TILE_OUT_FEATURES``."""
    return max(
        out_features
        for out_features in (1, 2, 4)
        if out_features * rows <= (PAIR_ACCUMULATORS if out_features <= 2 else QUAD_ACCUMULATORS) or out_features == 1
    )


def tile(out_features: int, rows: int, *, interleaved: bool = False) -> Tile:
    """Return a tile generator for ``out_features`` matrix rows and ``rows`` input rows, which may be interleaved."""

    def generate(
        builder: Any, format: BlockFormat, matrix: Any, columns: Any, inputs: Any, outputs: Any, output_stride: Any
    ) -> None:
        code = VectorCode(builder)
        read, zeros = _read(code, format), [_zero(code)] * (out_features * rows)
        stride = read.stride(columns)
        sums = _sums(code, read, matrix, stride, columns, inputs, zeros, rows, interleaved, prefetches=True)
        _write_totals(code, sums, rows, outputs, output_stride)

    return generate


def partial_tile(out_features: Mapping[int, int], *, is_last: bool) -> Any:
    """Return an intrinsic for a tile over a range of columns of a float32 matrix; ``is_last`` marks the final range.

    ``out_features`` maps each number of interleaved input rows, the intrinsic's last argument, to a number of matrix
    rows. ``stride`` is the distance between matrix rows in bytes. ``sums`` holds one vector per sum, carried from range
    to range and ignored if ``is_first``. The tile prefetches one byte per column at both ``near`` and ``far``.
    """

    @generated(*[types.int64] * 5, types.boolean, *[types.int64] * 5)
    def run(
        builder: Any,
        matrix: Any,
        stride: Any,
        columns: Any,
        inputs: Any,
        sums: Any,
        is_first: Any,
        outputs: Any,
        output_stride: Any,
        near: Any,
        far: Any,
        rows: Any,
    ) -> None:
        code = VectorCode(builder)
        for number, features in cases(builder, rows, out_features):
            start = builder.inttoptr(sums, FLOAT.as_pointer())
            addresses = [code.gep(start, LANES * vector) for vector in range(features * number)]
            kept = [code.load(address, code.vector, ITEM_SIZE) for address in addresses]
            before = [builder.select(is_first, _zero(code), sum_) for sum_ in kept]
            read = Numbers(code, FLOAT32, CACHE_LINE // LANES)
            totals = _sums(
                code, read, matrix, stride, columns, inputs, before, number, interleaved=True, prefetched=(near, far)
            )
            if is_last:
                _write_totals(code, totals, number, outputs, output_stride)
            else:
                for total, address in zip(totals, addresses, strict=True):
                    builder.store(total, builder.bitcast(address, code.vector.as_pointer())).align = ITEM_SIZE

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
    """Generate code that adds the products of matrix and input rows to the sums ``first``; return the new sums.

    Sums are ordered by matrix row. ``prefetches`` also prefetches later matrix rows; ``prefetched`` are addresses at
    which to prefetch one byte per column.
    """
    builder, out_features = code.builder, len(first) // rows
    start = builder.inttoptr(matrix, BYTES)
    addresses = [code.gep(start, builder.mul(stride, INDEX(out))) for out in range(out_features)]
    numbers = builder.inttoptr(inputs, FLOAT.as_pointer())
    size = builder.mul(stride, INDEX(out_features))
    distance = builder.select(builder.icmp_signed(">", size, INDEX(PREFETCH_DISTANCE)), size, INDEX(PREFETCH_DISTANCE))

    def multiply(column: Any, expanders: list[Expand], sums: list[Any]) -> list[Any]:
        if prefetches:
            ahead = builder.add(distance, builder.mul(read.offset(column), INDEX(out_features)))
            _prefetch(code, code.gep(start, ahead), read, out_features)
        for address in prefetched:
            code.prefetch(builder.inttoptr(builder.add(address, column), BYTES))
        for vector in range(read.vectors):
            at = builder.add(column, INDEX(vector * LANES))
            weights = [expand(vector) for expand in expanders]
            for row, address in enumerate(_input_addresses(code, numbers, at, columns, rows, interleaved)):
                factor = code.load(address, code.vector, ITEM_SIZE)
                for out, weight in enumerate(weights):
                    sum_ = out * rows + row
                    sums[sum_] = code.multiply_add(weight, factor, sums[sum_])
        return sums

    sums_after: list[Any] = read.loop(addresses, columns, first, multiply)
    return sums_after


def _write_totals(code: VectorCode, sums: Sequence[Any], rows: int, outputs: Any, output_stride: Any) -> None:
    """Reduce each vector of sums to a total, up to ``LANES`` vectors at once, and write the totals."""
    builder, out_features = code.builder, len(sums) // rows
    rows_at_once = LANES // out_features
    written = builder.inttoptr(outputs, FLOAT.as_pointer())
    for first in range(0, rows, rows_at_once):
        chunk = range(first, min(first + rows_at_once, rows))
        row_sums = [sums[out * rows + row] for row in chunk for out in range(out_features)]
        totals = code.sums_of([*row_sums, *[_zero(code)] * (LANES - len(row_sums))])
        for row in chunk:
            outputs_of_row = code.part(totals, (row - first) * out_features, out_features)
            target = code.gep(written, builder.mul(output_stride, INDEX(row)))
            builder.store(outputs_of_row, builder.bitcast(target, outputs_of_row.type.as_pointer())).align = ITEM_SIZE


def _input_addresses(
    code: VectorCode, inputs: Any, column: Any, columns: Any, rows: int, interleaved: bool
) -> list[Any]:
    """Return the address of each input row's vector at a column."""
    builder = code.builder
    if interleaved:
        first = code.gep(inputs, builder.mul(column, INDEX(rows)))
        return [code.gep(first, row * LANES) for row in range(rows)]
    return [code.gep(inputs, builder.add(builder.mul(columns, INDEX(row)), column)) for row in range(rows)]


def _prefetch(code: VectorCode, ahead: Any, read: Any, out_features: int) -> None:
    """Prefetch the memory at address ``ahead``, as many bytes as a step reads from all matrix rows together."""
    size = read.format.bytes if isinstance(read, _Packed) else read.size * read.step
    for byte in range(0, max(out_features * size, CACHE_LINE), CACHE_LINE):
        code.prefetch(code.gep(ahead, byte), nearest=INTO_L1)


@generated(types.int64, None, types.int64, types.int64)
def unpack_row(builder: Any, matrix: Any, name: str, columns: Any, written: Any) -> None:
    """Write a row of a matrix in the named format, expanded to float32, to address ``written``."""
    code = VectorCode(builder)
    read = _read(code, FORMATS[name])
    first, numbers = builder.inttoptr(matrix, BYTES), builder.inttoptr(written, FLOAT.as_pointer())

    def write(column: Any, expanders: list[Expand], _: list[Any]) -> list[Any]:
        code.prefetch(code.gep(first, builder.add(read.offset(column), INDEX(PREFETCH_DISTANCE))), nearest=INTO_L1)
        (expand,) = expanders
        for vector in range(read.vectors):
            at = code.gep(numbers, builder.add(column, INDEX(vector * LANES)))
            builder.store(expand(vector), builder.bitcast(at, code.vector.as_pointer())).align = ITEM_SIZE
        return []

    read.loop([first], columns, [], write)


UNPACK = types.void(*[types.int64] * 5)
"""Signature of a format's C function ``unpack_rows``."""
call_unpack = caller_of(UNPACK)


@c_function(UNPACK)
def unpack_of(format: BlockFormat) -> Any:
    """Return the function that expands a format's matrix rows to float32."""
    name = format.name

    def unpack_rows(matrix: int, stride: int, rows: int, columns: int, written: int) -> None:
        for row in range(rows):
            unpack_row(matrix + row * stride, name, columns, written + row * columns * ITEM_SIZE)

    return unpack_rows


def unpack_matrix(format: BlockFormat, matrix: int, rows: int, columns: int, written: int) -> None:
    """Write rows of a matrix, expanded to float32, to address ``written``."""
    unpack_of(format).ctypes(matrix, format.row_bytes(columns), rows, columns, written)


@generated(*[types.int64] * 4)
def copy_vectors(builder: Any, read: Any, count: Any, written: Any, stride: Any) -> None:
    """Copy ``count`` float32 numbers; in the copy, each vector starts ``stride`` vectors after the previous one."""
    code = VectorCode(builder)
    first, numbers = builder.inttoptr(read, FLOAT.as_pointer()), builder.inttoptr(written, FLOAT.as_pointer())

    def write(column: Any, _: list[Any]) -> list[Any]:
        target = code.gep(numbers, builder.mul(column, stride))
        vector = code.load(code.gep(first, column), code.vector, ITEM_SIZE)
        builder.store(vector, builder.bitcast(target, code.vector.as_pointer())).align = ITEM_SIZE
        return []

    code.loop(count, [], write)


@compiled
def interleave(inputs: int, rows: int, columns: int, written: int, group: int) -> None:
    """Interleave a group's rows vector by vector, in the order in which a tile reads them.

    ``group`` is the number of rows in the interleaved layout, at least ``rows``. Without interleaving, rows
    whose stride is a power of two would share one cache set.
    """
    for row in range(rows):
        read, target = inputs + row * columns * ITEM_SIZE, written + row * LANES * ITEM_SIZE
        copy_vectors(read, columns, target, group)


@compiled
def stride_of(kernels: Record, columns: int) -> int:
    """Return the size of a matrix row or panel in bytes; ``kernels`` is a record of ``matmul.KERNELS``."""
    return columns // kernels.block_size * kernels.bytes  # type: ignore[no-any-return]


@compiled
def rows_per_chunk(rows: int, maximum: int, group: int) -> int:
    """Return the size of chunks, in whole groups, that split rows evenly into as few chunks as ``maximum`` allows."""
    chunks = (rows + maximum - 1) // maximum
    return (rows + chunks * group - 1) // (chunks * group) * group
