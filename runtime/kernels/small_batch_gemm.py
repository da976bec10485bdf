"""Matrix product of small batches on a CPU, at the bandwidth of memory.

BLAS libraries are optimized for many rows. For one row, or the few rows of a tree, they read the matrix below memory
bandwidth. This kernel reads it once, in the order of memory, and prefetches one tile ahead.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from hdtool.runtime.kernels.gemm_tiles import (
    FEW_ROWS,
    MOST_OUTS,
    MOST_ROWS,
    block_numbers,
    outs_beside,
    tile,
    unpack_row,
)
from hdtool.runtime.kernels.many_rows_gemm import interleave, line_after, multiply_many
from hdtool.runtime.kernels.tile_choice import by_rows
from hdtool.runtime.kernels.vector_code import ITEM_SIZE, LANES

COLUMN_MULTIPLE = 64
"""The number of columns must be a multiple of this."""
MOST_IN_REGISTERS = 18 if LANES == 16 else 11
"""Input rows up to which a matrix is unpacked in registers, once for each tile; for more, ``multiply_many`` is faster.
On an Intel Xeon with AVX-512, 17 rows by 1,536 x 768 numbers in Q4_1 take 0.84 of its time, 20 rows 0.97; of Q6_K they
take 0.97 and 1.15 of it."""
NEAR_NUMBERS = 1 << 17 if LANES == 16 else 10240
"""Numbers of a group of input rows that stay in a cache, where each tile of matrix rows finds them again: the second
one of processors with AVX-512, which reads them faster than a matrix is unpacked once more."""

_OUTS = (0, *(outs_beside(rows) for rows in range(1, MOST_ROWS + 1)))
_single = by_rows({1: tile(1, 1)})
_few = by_rows({rows: tile(_OUTS[rows], rows) for rows in range(1, FEW_ROWS + 1)})
_many = by_rows({rows: tile(_OUTS[rows], rows, interleaved=True) for rows in range(FEW_ROWS + 1, MOST_ROWS + 1)})


@njit(cache=True, nogil=True)
def multiply(
    matrix: int,
    kind: Any,
    size: int,
    outs: int,
    columns: int,
    inputs: int,
    rows: int,
    outputs: int,
    apart: int,
) -> None:
    """``outputs = inputs @ matrix.T``, given by addresses of arrays, float32 but for the matrix.

    ``kind`` and ``size`` are the format of the matrix and the bytes of its numbers or blocks. The outputs of input rows
    are ``apart`` numbers from each other. ``columns`` must be a multiple of ``COLUMN_MULTIPLE`` and of the numbers of a
    block.
    """
    stride = columns // block_numbers(kind) * size
    whole = outs - outs % MOST_OUTS
    if rows > MOST_IN_REGISTERS:
        multiply_many(matrix, kind, stride, whole, columns, inputs, rows, outputs, apart)
    elif rows <= FEW_ROWS or size == ITEM_SIZE:  # numbers of 32 bits cost nothing to unpack
        for out in range(0, whole, MOST_OUTS):
            written = outputs + out * ITEM_SIZE
            _multiply_few(matrix + out * stride, kind, stride, columns, inputs, rows, written, apart)
    else:
        interleaved = np.empty(rows * columns + LANES, np.float32)
        _multiply_interleaved(matrix, kind, stride, whole, columns, inputs, rows, outputs, apart, interleaved)
    for out in range(whole, outs):
        for row in range(rows):
            read, written = inputs + row * columns * ITEM_SIZE, outputs + (row * apart + out) * ITEM_SIZE
            _single(matrix + out * stride, kind, columns, read, written, apart, 1)


@njit(cache=True, nogil=True)
def _multiply_few(
    matrix: int, kind: Any, stride: int, columns: int, inputs: int, rows: int, outputs: int, apart: int
) -> None:
    """Multiply ``MOST_OUTS`` matrix rows; the outputs of input rows are ``apart`` numbers from each other."""
    row = 0
    while row < rows:
        some = min(rows - row, FEW_ROWS)
        read, written = inputs + row * columns * ITEM_SIZE, outputs + row * apart * ITEM_SIZE
        for out in range(0, MOST_OUTS, _OUTS[some]):
            _few(matrix + out * stride, kind, columns, read, written + out * ITEM_SIZE, apart, some)
        row += some


@njit(cache=True, nogil=True)
def _multiply_interleaved(
    matrix: int,
    kind: Any,
    stride: int,
    outs: int,
    columns: int,
    inputs: int,
    rows: int,
    outputs: int,
    apart: int,
    interleaved: npt.NDArray[np.float32],
) -> None:
    """Multiply by groups of up to ``MOST_ROWS`` input rows, fewer of long ones.

    These are written vector by vector first. A tile reads them in the order of memory then; rows that are a power of
    two apart would share one set of the cache.
    """
    aligned = line_after(interleaved.ctypes.data)
    most = min(MOST_ROWS, max(FEW_ROWS, NEAR_NUMBERS // columns))
    groups = (rows + most - 1) // most
    row = 0
    for group in range(groups):
        some = (rows - row) // (groups - group)
        offset = row * columns * ITEM_SIZE
        interleave(inputs + offset, some, columns, aligned + offset, some)
        row += some
    for out in range(0, outs, MOST_OUTS):
        row = 0
        for group in range(groups):
            some, first = (rows - row) // (groups - group), row * columns * ITEM_SIZE
            tile_rows, written = matrix + out * stride, outputs + (row * apart + out) * ITEM_SIZE
            if some > FEW_ROWS:
                read = aligned + first
                for place in range(0, MOST_OUTS, _OUTS[some]):
                    to = written + place * ITEM_SIZE
                    _many(tile_rows + place * stride, kind, columns, read, to, apart, some)
            else:  # nine rows are five and four
                _multiply_few(tile_rows, kind, stride, columns, inputs + first, some, written, apart)
            row += some


@njit(cache=True, nogil=True)
def unpack(matrix: int, kind: Any, size: int, outs: int, columns: int, written: int) -> None:
    """Write a matrix as float32 numbers."""
    stride = columns // block_numbers(kind) * size
    for out in range(outs):
        unpack_row(matrix + out * stride, kind, columns, written + out * columns * ITEM_SIZE)
