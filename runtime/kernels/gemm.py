"""Matmuls ``outputs = inputs @ matrix.T + bias``: a C function per matrix format, called by address.

BLAS is tuned for many rows. With one row, or the few rows of a draft tree, it doesn't reach memory bandwidth; this
kernel reads the matrix once, in memory order, and prefetches ahead.

For many rows, as in prefill, ``panel_gemm`` or ``block_gemm`` is used. The order of summation is independent of the
number of rows, so an output row is bitwise the same in any batch.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import cfunc, types

from hdtool.runtime.kernels import block_gemm, panel_gemm
from hdtool.runtime.kernels.compiled import (
    array_at,
    caller_of,
    compiled,
    generated,
    shared,
    shared_address,
)
from hdtool.runtime.kernels.gemm_tiles import (
    MAX_DIRECT_ROWS,
    MAX_TILE_ROWS,
    TILE_OUT_FEATURES,
    block_size_of,
    interleave,
    tile,
    tile_out_features,
    unpack_address,
    unpack_of,
)
from hdtool.runtime.kernels.matrix_formats import MatrixKind, by_rows
from hdtool.runtime.kernels.transposed_rows import expand_address, expand_of, transpose_address, transpose_of
from hdtool.runtime.kernels.vector_code import CACHE_LINE, INDEX, ITEM_SIZE, LANES, line_after

HAS_PANELS = LANES == 16
"""True if ``panel_gemm`` computes many rows. Without AVX-512, it takes 1.5 times as long as ``block_gemm`` with 12 rows
and equally long with 128."""
_multiply_many = panel_gemm.multiply_many if HAS_PANELS else block_gemm.multiply_many
# The functions of a format that ``_multiply_many`` calls; ``block_gemm`` calls one.
_unpack_of, _expand_of = (transpose_of, expand_of) if HAS_PANELS else (unpack_of, unpack_of)
_unpack_address, _expand_address = (
    (transpose_address, expand_address) if HAS_PANELS else (unpack_address, unpack_address)
)
COLUMN_MULTIPLE = 64
"""Required divisor of a matrix's number of columns."""
MAX_REGISTER_ROWS = 20 if LANES == 16 else 11
"""Maximum input rows for which the matrix is unpacked in registers, once per tile; for more, ``_multiply_many`` is
faster with packed formats. On an Intel Xeon with AVX-512, 21 rows in Q4_0, Q4_1, Q8_0, Q4_K and Q6_K take 0.71 to 1.05
times as long in ``_multiply_many``, 18 rows 0.82 to 1.08 times, and in bfloat16 1.08 to 1.31 and 1.18 to 1.51 times."""
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
MULTIPLY = types.void(*[types.int64] * 12)
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
        expand: int,
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

        ``tiles``, ``unpack`` and ``expand`` are the addresses of the format's functions; the last two are those that
        ``_multiply_many`` calls, ``expand`` only if ``HAS_PANELS``. A block has ``block_size`` weights and ``size``
        bytes. ``output_stride`` is the distance between output rows in numbers. ``columns`` must be a multiple of
        ``COLUMN_MULTIPLE`` and of ``block_size``.
        """
        stride = columns // block_size * size
        whole = out_features - out_features % TILE_OUT_FEATURES
        long = size != ITEM_SIZE and rows * columns > L1_NUMBERS
        if not whole:
            pass
        elif rows > (MAX_LONG_REGISTER_ROWS if long else MAX_REGISTER_ROWS):
            second = expand if HAS_PANELS else block_size
            _multiply_many(unpack, second, matrix, stride, whole, columns, inputs, rows, outputs, output_stride)
        elif rows <= MAX_DIRECT_ROWS or size == ITEM_SIZE:  # float32 needs no unpacking
            # All matrix rows at once, unless several groups of input rows share them while they are cached.
            out, step = 0, whole if rows <= MAX_DIRECT_ROWS else TILE_OUT_FEATURES
            while out < whole:
                read, written = matrix + out * stride, outputs + out * ITEM_SIZE
                _multiply_few(tiles, read, stride, step, columns, inputs, rows, written, output_stride)
                out += step
        else:
            interleaved = np.empty(rows * columns + CACHE_LINE // ITEM_SIZE, np.float32)
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


MATMUL = np.dtype(
    [
        ("function", np.int64),  # address of the C function that ``matmul_of`` returns; 0 if there is no matmul
        ("matrix", np.int64),  # address
        ("out_features", np.int64),
        ("columns", np.int64),
        ("bias", np.int64),  # address, 0 for none
    ],
    align=True,
)
MATMUL_ARGUMENTS = 9
"""Number of arguments of a matmul: matrix, out_features, columns, inputs, rows, outputs, bias (or 0), and the first and
end of the matrix rows to compute, which form whole int8 panels except at the matrix's end. Arrays are given by
address."""


@cache
def matmul_of(kind: MatrixKind, size: int) -> Any:
    """Compile the matmul for a format whose numbers or blocks have ``size`` bytes.

    Keep the result alive as long as its address is used.
    """

    _tiles_of(kind)
    _unpack_of(kind)
    _expand_of(kind)
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
            _unpack_address(kind),
            _expand_address(kind),
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
