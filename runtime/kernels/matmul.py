"""Matmuls ``outputs = inputs @ matrix.T + bias``: one C function, and a record of kernels per matrix format.

BLAS is tuned for many rows. With one row, or the few rows of a draft tree, it doesn't reach memory bandwidth; these
kernels read the matrix once, in memory order, and prefetch ahead.

For many rows, as in prefill, ``panel_gemm`` or ``block_gemm`` is used. The order of summation is independent of the
number of rows, so an output row is bitwise the same in any batch.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from hdtool.runtime.kernels import block_gemm, panel_gemm
from hdtool.runtime.kernels.compiled import (
    Record,
    array_at,
    c_function,
    caller_of,
    compiled,
    copy_floats,
    struct_at,
    zeroed_records,
)
from hdtool.runtime.kernels.gemm_tiles import (
    MAX_DIRECT_ROWS,
    MAX_TILE_ROWS,
    TILE_OUT_FEATURES,
    Operands,
    interleave,
    stride_of,
    tile,
    tile_out_features,
    unpack_of,
)
from hdtool.runtime.kernels.matrix_formats import BlockFormat, by_rows
from hdtool.runtime.kernels.transposed_rows import expand_of, transpose_of
from hdtool.runtime.kernels.vector_code import CACHE_LINE, ITEM_SIZE, LANES, line_after

HAS_PANELS = LANES == 16
"""True if ``panel_gemm`` computes many rows; without AVX-512, ``block_gemm`` is up to 1.5 times as fast."""
_multiply_many = panel_gemm.multiply_many if HAS_PANELS else block_gemm.multiply_many
COLUMN_MULTIPLE = 64
"""Required divisor of a matrix's number of columns."""
MAX_REGISTER_ROWS = 20 if LANES == 16 else 11
"""Maximum input rows for which the matrix is unpacked in registers, once per tile.

For more, ``_multiply_many`` is faster with packed formats: on an Intel Xeon with AVX-512, 21 rows take 0.71 to 1.05
times as long, but 1.08 to 1.31 times in bfloat16.
"""
MAX_LONG_REGISTER_ROWS = 8 if LANES == 8 else MAX_REGISTER_ROWS
"""Like ``MAX_REGISTER_ROWS``, for input rows that together exceed L1; with AVX, eleven rows are slower in registers."""
L1_NUMBERS = 8192
MAX_CACHED_VALUES = 1 << 17 if LANES == 16 else 10240
"""Maximum float32 numbers in a tile's prepared input rows, which stay cached between tiles: with AVX-512, in L2."""

_ROW_OUT_FEATURES = (0, *(tile_out_features(rows) for rows in range(1, MAX_TILE_ROWS + 1)))
_single = by_rows({1: tile(1, 1)})
_few = by_rows({rows: tile(_ROW_OUT_FEATURES[rows], rows) for rows in range(1, MAX_DIRECT_ROWS + 1)})
_many = by_rows(
    {
        rows: tile(_ROW_OUT_FEATURES[rows], rows, interleaved=True)
        for rows in range(MAX_DIRECT_ROWS + 1, MAX_TILE_ROWS + 1)
    }
)


MATMUL = np.dtype(
    [
        ("kernels", np.int64),  # address of a record of ``KERNELS``; 0 if there is no matmul
        ("matrix", np.int64),  # address
        ("out_features", np.int64),
        ("columns", np.int64),
        ("bias", np.int64),  # address, 0 for none
        ("factors", np.int64),  # address of the factors that scale the output's columns, 0 for none
    ],
    align=True,
)
KERNELS = np.dtype(
    [
        ("multiply", np.int64),  # address of ``multiply``
        ("block_size", np.int64),  # columns of a block
        ("bytes", np.int64),  # size of a block, in all rows that are stored together
        ("stored_rows", np.int64),  # matrix rows that are stored together, more than 1 in panels
        ("tile_out_features", np.int64),  # divisor of the number of matrix rows that ``tiles`` multiplies
        ("tiles", np.int64),  # address of a function that multiplies matrix rows by a tile of input rows
        ("tile_rows", np.int64),  # maximum prepared input rows of a tile
        ("has_even_tiles", np.bool_),  # False if all tiles but the last have ``tile_rows`` rows
        ("prepare", np.int64),  # address of a function that prepares input rows, 0 if tiles read them in place
        ("prepared_bytes", np.int64),  # size of ``PREPARED_COLUMNS`` columns of a prepared input row
        ("direct_rows", np.int64),  # maximum number of input rows that tiles read in place
        ("unpack", np.int64),  # addresses of the functions that ``_multiply_many`` calls,
        ("expand", np.int64),  # 0 if tiles multiply any number of rows
    ],
    align=True,
)
"""Record of the functions and sizes by which matrices in one format are multiplied."""
PREPARED_COLUMNS = 32
MATMUL_ARGUMENTS = 10
"""Number of arguments of a matmul, of which kernels and arrays are given by address.

They are kernels, matrix, out_features, columns, inputs, rows, outputs, bias (or 0), and the first and end of the matrix
rows to compute, which form whole int8 panels except at the matrix's end.
"""
STEP = types.void(*[types.int64] * MATMUL_ARGUMENTS)
"""Signature of a matmul, and of the other functions that ``call_at`` calls."""
TILES = types.void(*[types.int64] * 8)
"""Signature of ``multiply_tiles``: matrix, its stride, out_features, columns, inputs, outputs, output_stride, rows."""
PREPARE = types.void(*[types.int64] * 5)
"""Signature of C functions that prepare input rows: inputs, columns, rows, address to write to, and rows per tile."""
call_at, call_tiles, call_prepare = caller_of(STEP), caller_of(TILES), caller_of(PREPARE)


class Kernels:
    """A record of ``KERNELS`` that stays at its address while this object lives."""

    def __init__(self, **fields: int) -> None:
        self._records = zeroed_records(KERNELS)
        self.address: int = self._records.ctypes.data
        for name, value in {"multiply": _multiply_function().address, **fields}.items():
            self._records[name] = value


@cache
def matmul_of(format: BlockFormat) -> Kernels:
    """Compile a format's matmul; keep the result alive as long as its address is used."""
    unpack, expand = (transpose_of, expand_of) if HAS_PANELS else (unpack_of, unpack_of)
    return Kernels(
        block_size=format.block_size,
        bytes=format.bytes,
        stored_rows=1,
        tile_out_features=TILE_OUT_FEATURES,
        tiles=_tiles_of(format).address,
        tile_rows=MAX_TILE_ROWS,
        has_even_tiles=True,
        prepare=0 if format.bytes == ITEM_SIZE else _interleave_function().address,  # float32 needs no unpacking
        prepared_bytes=PREPARED_COLUMNS * ITEM_SIZE,
        direct_rows=MAX_DIRECT_ROWS,
        unpack=unpack(format).address,
        expand=expand(format).address,
    )


@c_function(TILES)
def _tiles_of(format: BlockFormat) -> Any:
    """Return ``multiply_tiles`` for a format."""
    name = format.name

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
                _single(matrix + out * stride, name, columns, inputs, outputs + out * ITEM_SIZE, output_stride, 1)
        elif rows <= MAX_DIRECT_ROWS:
            for out in range(0, out_features, _ROW_OUT_FEATURES[rows]):
                _few(matrix + out * stride, name, columns, inputs, outputs + out * ITEM_SIZE, output_stride, rows)
        else:
            for out in range(0, out_features, _ROW_OUT_FEATURES[rows]):
                _many(matrix + out * stride, name, columns, inputs, outputs + out * ITEM_SIZE, output_stride, rows)

    return multiply_tiles


@c_function(PREPARE)
def _interleave_function() -> Any:
    def interleave_tiles(inputs: int, columns: int, rows: int, written: int, tile_rows: int) -> None:
        """Interleave the input rows of each tile, except of tiles that read them in place."""
        for row in range(0, rows, tile_rows):
            count, offset = min(tile_rows, rows - row), row * columns * ITEM_SIZE
            if count > MAX_DIRECT_ROWS:
                interleave(inputs + offset, count, columns, written + offset, count)
            else:
                copy_floats(inputs + offset, count * columns, written + offset)

    return interleave_tiles


@c_function(STEP)
def _multiply_function() -> Any:
    def multiply(
        kernels_at: int,
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
        """Compute ``outputs[:, first:end]``; inputs and outputs are float32.

        ``columns`` must be a multiple of ``COLUMN_MULTIPLE`` and of the format's block size.
        """
        kernels = struct_at(kernels_at, KERNELS)
        part = matrix + first // kernels.stored_rows * stride_of(kernels, columns)
        into = outputs + first * ITEM_SIZE
        _multiply(kernels, Operands(part, end - first, columns, inputs, rows, into, out_features))
        if bias:
            added = array_at(bias, (out_features,), types.float32)
            written = array_at(outputs, (rows, out_features), types.float32)
            for row in range(rows):
                for out in range(first, end):
                    written[row, out] += added[out]

    return multiply


@compiled
def _multiply(kernels: Record, operands: Operands) -> None:
    """Multiply the matrix by all input rows."""
    matrix, out_features, columns, inputs, rows, outputs, output_stride = operands
    is_long = kernels.bytes != ITEM_SIZE and rows * columns > L1_NUMBERS
    width, tiled = columns * ITEM_SIZE, out_features
    if kernels.stored_rows == 1:
        tiled -= out_features % kernels.tile_out_features
    of_tiles = Operands(matrix, tiled, columns, inputs, rows, outputs, output_stride)
    if not tiled:
        pass
    elif kernels.unpack and rows > (MAX_LONG_REGISTER_ROWS if is_long else MAX_REGISTER_ROWS):
        _multiply_many(kernels, of_tiles)
    elif kernels.prepare and rows > kernels.direct_rows:
        memory = np.empty(rows * _prepared_bytes(kernels, columns) + CACHE_LINE, np.uint8)
        _multiply_prepared(kernels, of_tiles, memory)
    else:
        _multiply_tiles(kernels, of_tiles, width, _even_rows(rows, MAX_DIRECT_ROWS))
    if tiled < out_features:
        last, written = matrix + tiled * stride_of(kernels, columns), outputs + tiled * ITEM_SIZE
        rest = Operands(last, out_features - tiled, columns, inputs, rows, written, output_stride)
        _multiply_tiles(kernels, rest, width, 1)


@compiled
def _prepared_bytes(kernels: Record, columns: int) -> int:
    """Return the size of a prepared input row in bytes."""
    return columns // PREPARED_COLUMNS * kernels.prepared_bytes  # type: ignore[no-any-return]


@compiled
def _multiply_prepared(kernels: Record, operands: Operands, memory: npt.NDArray[np.uint8]) -> None:
    """Write prepared input rows to ``memory`` and multiply the matrix by them; the last panel may have padding rows."""
    matrix, out_features, columns, inputs, rows, outputs, output_stride = operands
    prepared, size = line_after(memory.ctypes.data), _prepared_bytes(kernels, columns)
    tile_rows = min(kernels.tile_rows, max(MAX_DIRECT_ROWS, MAX_CACHED_VALUES * ITEM_SIZE // size))
    if kernels.has_even_tiles:
        tile_rows = _even_rows(rows, tile_rows)
    call_prepare(kernels.prepare, (inputs, columns, rows, prepared, tile_rows))
    whole = out_features - out_features % kernels.tile_out_features
    of_panels = Operands(matrix, whole, columns, prepared, rows, outputs, output_stride)
    _multiply_tiles(kernels, of_panels, size, tile_rows)
    if whole < out_features:
        last = matrix + whole // kernels.stored_rows * stride_of(kernels, columns)
        written = np.empty((rows, kernels.stored_rows), np.float32)
        at: Any = np.int64(written.ctypes.data)
        width = written.shape[1]
        _multiply_tiles(kernels, Operands(last, width, columns, prepared, rows, at, width), size, tile_rows)
        for row in range(rows):
            target = outputs + (row * output_stride + whole) * ITEM_SIZE
            copy_floats(written[row].ctypes.data, out_features - whole, target)


@compiled
def _even_rows(rows: int, max_rows: int) -> int:
    """Return the number of input rows per tile that splits them evenly into as few tiles as ``max_rows`` allows."""
    tiles = max(1, (rows + max_rows - 1) // max_rows)
    return max(1, (rows + tiles - 1) // tiles)


@compiled
def _multiply_tiles(kernels: Record, operands: Operands, input_bytes: int, tile_rows: int) -> None:
    """Multiply the matrix by input rows of ``input_bytes`` bytes, in tiles of ``tile_rows`` rows."""
    matrix, out_features, columns, inputs, rows, outputs, output_stride = operands
    stride = stride_of(kernels, columns)
    # All matrix rows at once, unless several tiles of input rows share them while they are cached.
    out, step = 0, out_features if rows <= tile_rows else min(out_features, kernels.tile_out_features)
    while out < out_features:
        part = matrix + out // kernels.stored_rows * stride
        for row in range(0, rows, tile_rows):
            read, written = inputs + row * input_bytes, outputs + (row * output_stride + out) * ITEM_SIZE
            count = min(tile_rows, rows - row)
            call_tiles(kernels.tiles, (part, stride, step, columns, read, written, output_stride, count))
        out += step
