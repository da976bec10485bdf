"""Matmuls ``outputs = inputs @ matrix.T + bias``: a C function per matrix format, called by address.

BLAS is tuned for many rows. With one row, or the few rows of a draft tree, it doesn't reach memory bandwidth; this
kernel reads the matrix once, in memory order, and prefetches ahead.

In prefill, a block of the matrix is multiplied by all groups of input rows while it is in the cache. The order of
summation is independent of the number of rows, so an output row is bitwise the same in any batch.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import cfunc, types

from hdtool.runtime.kernels.compiled import (
    array_at,
    caller_of,
    clear_floats,
    compiled,
    copy_floats,
    generated,
    shared,
    shared_address,
)
from hdtool.runtime.kernels.gemm_tiles import (
    ACCUMULATORS,
    MAX_DIRECT_ROWS,
    MAX_TILE_ROWS,
    TILE_OUT_FEATURES,
    block_size_of,
    call_unpack,
    copy_vectors,
    partial_tile,
    tile,
    tile_out_features,
    unpack_address,
    unpack_of,
)
from hdtool.runtime.kernels.matrix_formats import MatrixKind, by_rows
from hdtool.runtime.kernels.vector_code import CACHE_LINE, INDEX, ITEM_SIZE, LANES, l1_bytes

GROUPS = (2, 4, 6) if LANES == 8 else (ACCUMULATORS // 4, ACCUMULATORS // 2)
"""Possible numbers of input rows per tile; the last rows use the smallest tile that fits. AVX registers hold the twelve
sums of six input rows by two matrix rows, which needs fewer loads per multiplication than smaller tiles."""
SMALL_GROUP, GROUP = GROUPS[0], GROUPS[-1]
MAX_TILE_COLUMNS = 512 if l1_bytes() * 3 // 4 < (GROUP + 2) * 768 * ITEM_SIZE else 768
"""Maximum columns of a tile, a multiple of every format's block size: input and matrix rows of a tile may fill three
quarters of L1. On an Intel Xeon with AVX-512 and 32 KiB of L1, 64 rows by an 8,192 x 2,048 matrix in Q4_0 take 0.82
times as long with 512 columns as with 768, and 256 rows 0.90 times."""
BLOCK_OUT_FEATURES = 64
"""Matrix rows per cache block, which is multiplied by all input rows before the next block is read. On an Intel Xeon
with AMX, 128 rows took 1.05 to 1.1 times as long."""
MAX_INTERLEAVED_ROWS = 128
"""Maximum number of input rows interleaved at once. On an Intel Xeon with AMX, 256 rows took 1.02 times as long."""

_GROUP_OUT_FEATURES = {rows: 4 if rows == SMALL_GROUP else 2 for rows in GROUPS}
"""Matrix rows per tile, by the tile's number of input rows."""
_add, _complete = partial_tile(_GROUP_OUT_FEATURES, last=False), partial_tile(_GROUP_OUT_FEATURES, last=True)


@compiled
def _multiply_many(
    unpack: int,
    block_size: int,
    matrix: int,
    stride: int,
    out_features: int,
    columns: int,
    inputs: int,
    rows: int,
    outputs: int,
    output_stride: int,
) -> None:
    """Compute the matmul for many input rows; see ``_multiply_function``.

    ``out_features`` must be a multiple of ``TILE_OUT_FEATURES``, and ``stride`` is the size of a matrix row in bytes.
    """
    chunks = (rows + MAX_INTERLEAVED_ROWS - 1) // MAX_INTERLEAVED_ROWS
    chunk = (rows + chunks * GROUP - 1) // (chunks * GROUP) * GROUP
    numbers = BLOCK_OUT_FEATURES * (MAX_TILE_COLUMNS + chunk * LANES + GROUP) + chunk * columns + LANES
    memory = np.empty(numbers, np.float32)
    for first in range(0, rows, chunk):
        read, written = inputs + first * columns * ITEM_SIZE, outputs + first * output_stride * ITEM_SIZE
        chunk_rows = min(chunk, rows - first)
        _multiply_together(
            unpack,
            block_size,
            matrix,
            stride,
            out_features,
            columns,
            read,
            chunk_rows,
            written,
            output_stride,
            memory,
        )


@compiled
def _multiply_together(
    unpack: int,
    block_size: int,
    matrix: int,
    stride: int,
    out_features: int,
    columns: int,
    inputs: int,
    rows: int,
    outputs: int,
    output_stride: int,
    memory: npt.NDArray[np.float32],
) -> None:
    """Multiply the matrix by up to ``MAX_INTERLEAVED_ROWS`` input rows, using ``memory`` as scratch space."""
    width = columns * ITEM_SIZE
    whole = rows // GROUP * GROUP
    group = SMALL_GROUP
    for size in GROUPS:
        if group < rows - whole:
            group = size
    unpacked = line_after(memory.ctypes.data)
    sums = unpacked + BLOCK_OUT_FEATURES * MAX_TILE_COLUMNS * ITEM_SIZE
    last = sums + (rows + GROUP - 1) // GROUP * GROUP * BLOCK_OUT_FEATURES * LANES * ITEM_SIZE
    interleaved = last + GROUP * BLOCK_OUT_FEATURES * ITEM_SIZE
    for row in range(0, whole, GROUP):
        interleave(inputs + row * width, GROUP, columns, interleaved + row * width, GROUP)
    if whole < rows:
        rest = interleaved + whole * width
        clear_floats(rest, group * columns)
        interleave(inputs + whole * width, rows - whole, columns, rest, group)
    for out in range(0, out_features, BLOCK_OUT_FEATURES):
        block_rows, to = min(BLOCK_OUT_FEATURES, out_features - out), outputs + out * ITEM_SIZE
        for column in range(0, columns, MAX_TILE_COLUMNS):
            block_columns = min(MAX_TILE_COLUMNS, columns - column)
            final = column + block_columns == columns
            block_at = matrix + out * stride + bytes_before(column, block_size, columns, stride)
            later = (
                matrix + (out + block_rows) * stride
                if final
                else block_at + bytes_before(block_columns, block_size, columns, stride)
            )
            block, between = block_at, stride
            if stride != width:  # float32 is read in place
                block, between = unpacked, block_columns * ITEM_SIZE
                call_unpack(unpack, (block_at, stride, block_rows, block_columns, unpacked))
            for row in range(0, rows, GROUP):
                group_rows = GROUP if row < whole else group
                read, kept = interleaved + row * width, sums + row * BLOCK_OUT_FEATURES * LANES * ITEM_SIZE
                read += column * group_rows * ITEM_SIZE
                written, from_row = (
                    (to + row * output_stride * ITEM_SIZE, output_stride) if row < whole else (last, block_rows)
                )
                before = row // GROUP * (BLOCK_OUT_FEATURES // 4)  # matrix rows already prefetched by earlier groups
                far = later + before % BLOCK_OUT_FEATURES * stride + before // BLOCK_OUT_FEATURES * block_columns
                near = read + group_rows * width
                _multiply_group(
                    block,
                    between,
                    block_rows,
                    block_columns,
                    read,
                    written,
                    from_row,
                    kept,
                    group_rows,
                    column == 0,
                    final,
                    near,
                    far,
                    stride,
                )
        for row in range(whole, rows):
            copy_floats(last + (row - whole) * block_rows * ITEM_SIZE, block_rows, to + row * output_stride * ITEM_SIZE)


@compiled
def _multiply_group(
    matrix: int,
    stride: int,
    out_features: int,
    columns: int,
    inputs: int,
    outputs: int,
    output_stride: int,
    sums: int,
    group: int,
    first: bool,
    last: bool,
    near: int,
    far: int,
    far_stride: int,
) -> None:
    """Multiply rows of a float32 matrix by a group of interleaved input rows, over a range of columns.

    ``first`` and ``last`` tell whether this is the first or last range; ``sums`` carries the sums in between. Each tile
    prefetches one byte per column at ``near``, the next group of input rows, and at ``far``, matrix rows needed later.
    Two tiles share a prefetched matrix row, which spreads memory traffic over more groups.
    """
    features = 4 if group == SMALL_GROUP else 2
    for number in range(out_features // features):
        later = far + number // 2 * far_stride
        if last:
            _complete(matrix, stride, columns, inputs, sums, first, outputs, output_stride, near, later, group)
        else:
            _add(matrix, stride, columns, inputs, sums, first, outputs, output_stride, near, later, group)
        matrix += features * stride
        sums += features * group * LANES * ITEM_SIZE
        outputs += features * ITEM_SIZE
        near += columns


@compiled
def bytes_before(column: int, block_size: int, columns: int, stride: int) -> int:
    """Return the byte offset of a column in a matrix row."""
    return column // block_size * (stride // (columns // block_size))


@compiled
def line_after(address: int) -> int:
    """Round an address up to the start of a cache line; a vector that crosses a line takes two loads."""
    return (address + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE


@compiled
def interleave(inputs: int, rows: int, columns: int, written: int, group: int) -> None:
    """Interleave a group's rows vector by vector, in the order in which a tile reads them.

    ``group`` is the number of rows in the interleaved layout, at least ``rows``. Without interleaving, rows that
    lie a power of two apart in memory would share one cache set.
    """
    for row in range(rows):
        read, target = inputs + row * columns * ITEM_SIZE, written + row * LANES * ITEM_SIZE
        copy_vectors(read, columns, target, group)


COLUMN_MULTIPLE = 64
"""Required divisor of a matrix's number of columns."""
MAX_REGISTER_ROWS = 18 if LANES == 16 else 11
"""Maximum input rows for which the matrix is unpacked in registers, once per tile; for more, ``_multiply_many`` is
faster. On an Intel Xeon with AVX-512 and a 1,536 x 768 matrix in Q4_1, unpacking in registers takes 0.84 times as long
as ``_multiply_many`` with 17 rows and 0.97 with 20; in Q6_K, 0.97 and 1.15."""
MAX_LONG_REGISTER_ROWS = 8 if LANES == 8 else MAX_REGISTER_ROWS
"""Like ``MAX_REGISTER_ROWS``, for input rows that together exceed L1. On Zen 4 without AVX-512, eleven rows by a 576 x
1,536 matrix in Q4_1 took 1.3 times as long in registers as in ``_multiply_many``."""
L1_NUMBERS = 8192
MAX_CACHED_VALUES = 1 << 17 if LANES == 16 else 10240
"""Maximum size of an input group in numbers, so that it stays cached between tiles: in L2 with AVX-512, where rereading
inputs is faster than unpacking the matrix again."""

_ROW_OUT_FEATURES = (0, *(tile_out_features(rows) for rows in range(1, MAX_TILE_ROWS + 1)))
_single = by_rows({1: tile(1, 1)})
_few = by_rows({rows: tile(_ROW_OUT_FEATURES[rows], rows) for rows in range(1, MAX_DIRECT_ROWS + 1)})
_many = by_rows(
    {
        rows: tile(_ROW_OUT_FEATURES[rows], rows, interleaved=True)
        for rows in range(MAX_DIRECT_ROWS + 1, MAX_TILE_ROWS + 1)
    }
)


TILES = types.void(*[types.int64] * 8)
"""Signature of a format's C function ``multiply_tiles``."""
MULTIPLY = types.void(*[types.int64] * 11)
TILES_PREFIX, MULTIPLY_NAME = "hdtool_multiply_tiles_", "hdtool_multiply"
"""Names of shared functions; the name of the format follows the prefix."""
call_tiles, _tiles_address = caller_of(TILES), shared_address(TILES_PREFIX)
_multiply: Any = types.ExternalFunction(MULTIPLY_NAME, MULTIPLY)


@shared(TILES, TILES_PREFIX)
def _tiles_of(kind: MatrixKind) -> Any:
    """Return ``multiply_tiles`` for a format."""

    def multiply_tiles(
        matrix: int,
        stride: int,
        out_features: int,
        columns: int,
        inputs: int,
        outputs: int,
        output_stride: int,
        rows: int,
    ) -> None:
        """Multiply ``out_features`` matrix rows by up to ``MAX_TILE_ROWS`` input rows.

        More than ``MAX_DIRECT_ROWS`` input rows must be interleaved. ``out_features`` must be a multiple of
        ``TILE_OUT_FEATURES``, or less than that with a single input row.
        """
        if out_features < TILE_OUT_FEATURES:
            for out in range(out_features):
                _single(matrix + out * stride, kind, columns, inputs, outputs + out * ITEM_SIZE, output_stride, 1)
        elif rows <= MAX_DIRECT_ROWS:
            for out in range(0, out_features, _ROW_OUT_FEATURES[rows]):
                _few(matrix + out * stride, kind, columns, inputs, outputs + out * ITEM_SIZE, output_stride, rows)
        else:
            for out in range(0, out_features, _ROW_OUT_FEATURES[rows]):
                _many(matrix + out * stride, kind, columns, inputs, outputs + out * ITEM_SIZE, output_stride, rows)

    return multiply_tiles


@shared(MULTIPLY, MULTIPLY_NAME)
def _multiply_function() -> Any:
    """Return ``multiply``, a matmul for matrices of any format."""

    def multiply(
        tiles: int,
        unpack: int,
        block_size: int,
        size: int,
        matrix: int,
        out_features: int,
        columns: int,
        inputs: int,
        rows: int,
        outputs: int,
        output_stride: int,
    ) -> None:
        """Compute ``outputs = inputs @ matrix.T`` on arrays given by address; inputs and outputs are float32.

        ``tiles`` and ``unpack`` are the addresses of the format's functions. A block has ``block_size`` weights and
        ``size`` bytes. ``output_stride`` is the distance between output rows in numbers. ``columns`` must be a multiple
        of ``COLUMN_MULTIPLE`` and of ``block_size``.
        """
        stride = columns // block_size * size
        whole = out_features - out_features % TILE_OUT_FEATURES
        long = size != ITEM_SIZE and rows * columns > L1_NUMBERS
        if rows > (MAX_LONG_REGISTER_ROWS if long else MAX_REGISTER_ROWS):
            _multiply_many(unpack, block_size, matrix, stride, whole, columns, inputs, rows, outputs, output_stride)
        elif rows <= MAX_DIRECT_ROWS or size == ITEM_SIZE:  # float32 needs no unpacking
            # All matrix rows at once, unless several groups of input rows share them while they are cached.
            out, step = 0, whole if rows <= MAX_DIRECT_ROWS else TILE_OUT_FEATURES
            while out < whole:
                read, written = matrix + out * stride, outputs + out * ITEM_SIZE
                _multiply_few(tiles, read, stride, step, columns, inputs, rows, written, output_stride)
                out += step
        else:
            interleaved = np.empty(rows * columns + LANES, np.float32)
            _multiply_interleaved(
                tiles, matrix, stride, whole, columns, inputs, rows, outputs, output_stride, interleaved
            )
        if whole < out_features:
            for row in range(rows):
                read, written = inputs + row * columns * ITEM_SIZE, outputs + (row * output_stride + whole) * ITEM_SIZE
                last = matrix + whole * stride
                call_tiles(tiles, (last, stride, out_features - whole, columns, read, written, output_stride, 1))

    return multiply


@compiled
def _multiply_few(
    tiles: int,
    matrix: int,
    stride: int,
    out_features: int,
    columns: int,
    inputs: int,
    rows: int,
    outputs: int,
    output_stride: int,
) -> None:
    """Multiply the matrix by input rows that are read in place, at most ``MAX_DIRECT_ROWS`` at a time."""
    row = 0
    while row < rows:
        tile_rows = min(rows - row, MAX_DIRECT_ROWS)
        read, written = inputs + row * columns * ITEM_SIZE, outputs + row * output_stride * ITEM_SIZE
        call_tiles(tiles, (matrix, stride, out_features, columns, read, written, output_stride, tile_rows))
        row += tile_rows


@compiled
def _multiply_interleaved(
    tiles: int,
    matrix: int,
    stride: int,
    out_features: int,
    columns: int,
    inputs: int,
    rows: int,
    outputs: int,
    output_stride: int,
    interleaved: npt.NDArray[np.float32],
) -> None:
    """Multiply the matrix by interleaved input rows, in groups of up to ``MAX_TILE_ROWS`` rows, fewer if they are long.

    ``interleaved`` is scratch memory for all input rows; see ``interleave``.
    """
    aligned = line_after(interleaved.ctypes.data)
    max_rows = min(MAX_TILE_ROWS, max(MAX_DIRECT_ROWS, MAX_CACHED_VALUES // columns))
    groups = (rows + max_rows - 1) // max_rows
    row = 0
    for group in range(groups):
        group_rows = (rows - row) // (groups - group)
        offset = row * columns * ITEM_SIZE
        interleave(inputs + offset, group_rows, columns, aligned + offset, group_rows)
        row += group_rows
    out, step = 0, out_features if groups == 1 else TILE_OUT_FEATURES
    while out < out_features:
        row = 0
        for group in range(groups):
            group_rows, first = (rows - row) // (groups - group), row * columns * ITEM_SIZE
            written = outputs + (row * output_stride + out) * ITEM_SIZE
            # For example, nine rows are split into five and four, which are read in place.
            read = aligned + first if group_rows > MAX_DIRECT_ROWS else inputs + first
            part = matrix + out * stride
            call_tiles(tiles, (part, stride, step, columns, read, written, output_stride, group_rows))
            row += group_rows
        out += step


MATMUL_ARGUMENTS = 9
"""Number of arguments of a matmul: matrix, out_features, columns, inputs, rows, outputs, bias (or 0), and the first and
end of the matrix rows to compute, which form whole panels except at the matrix's end. Arrays are given by address."""


@cache
def matmul_of(kind: MatrixKind, size: int) -> Any:
    """Compile the matmul for a format whose numbers or blocks have ``size`` bytes.

    Keep the result alive as long as its address is used.
    """

    _tiles_of(kind)
    unpack_of(kind)
    _multiply_function()

    @cfunc(types.void(*[types.int64] * MATMUL_ARGUMENTS), cache=True)
    def matmul(
        matrix: int,
        out_features: int,
        columns: int,
        inputs: int,
        rows: int,
        outputs: int,
        bias: int,
        first: int,
        end: int,
    ) -> None:
        block_size = block_size_of(kind)
        part, written = matrix + first * (columns // block_size * size), outputs + first * ITEM_SIZE
        _multiply(
            _tiles_address(kind),
            unpack_address(kind),
            block_size,
            size,
            part,
            end - first,
            columns,
            inputs,
            rows,
            written,
            out_features,
        )
        add_bias(bias, out_features, rows, outputs, first, end)

    return matmul


@compiled
def add_bias(bias: int, out_features: int, rows: int, outputs: int, first: int, end: int) -> None:
    if bias:
        added, written = (
            array_at(bias, (out_features,), types.float32),
            array_at(outputs, (rows, out_features), types.float32),
        )
        for row in range(rows):
            for out in range(first, end):
                written[row, out] += added[out]


@generated(types.int64, *[types.int64] * MATMUL_ARGUMENTS)
def call_at(
    builder: Any,
    function: Any,
    one: Any,
    two: Any,
    three: Any,
    four: Any,
    five: Any,
    six: Any,
    seven: Any,
    first: Any,
    end: Any,
) -> None:
    """Call a matmul, or another function with the same signature, by address."""
    kind = ir.FunctionType(ir.VoidType(), [INDEX] * MATMUL_ARGUMENTS)
    called = builder.inttoptr(function, kind.as_pointer())
    builder.call(called, [one, two, three, four, five, six, seven, first, end])
