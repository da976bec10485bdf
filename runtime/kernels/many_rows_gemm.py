"""Matrix product of many input rows on a CPU, at the speed of its multiplications.

A prompt has so many rows that nothing waits for memory if all that is read again is in the caches: some rows of the
matrix are unpacked to float32, and groups of input rows are multiplied by them, some columns at a time. Each sum is
added in the order in which few rows are, so a row has the same bits in every product.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from hdtool.runtime.kernels.gemm_tiles import MOST_OUTS, SUMS, copy_vectors, partial_tile, unpack_row
from hdtool.runtime.kernels.memory.raw_memory import clear_numbers, copy_numbers
from hdtool.runtime.kernels.vector_code import CACHE_LINE, ITEM_SIZE, LANES

GROUP, SMALL_GROUP = SUMS // 2, SUMS // 4
"""Input rows of a tile, and of that of the last rows if they are no more."""
MOST_COLUMNS = 768
"""Columns of a tile, so that its input rows stay in the first cache."""
BLOCK_NUMBERS = 1 << 16
"""Numbers of the matrix that are multiplied by all input rows before the next ones: they stay in the second cache."""
MOST_TOGETHER = 256
"""Input rows that are interleaved at once."""

_OUTS = {rows: SUMS // rows for rows in (GROUP, SMALL_GROUP)}
"""Matrix rows of a tile, beside these numbers of input rows."""
_add, _complete = partial_tile(_OUTS, last=False), partial_tile(_OUTS, last=True)


@njit(cache=True, nogil=True)
def multiply_many(
    matrix: int, kind: Any, stride: int, outs: int, columns: int, inputs: int, rows: int, outputs: int, apart: int
) -> None:
    """``outs``, a multiple of ``MOST_OUTS``, rows of a matrix times input rows; see ``small_batch_gemm.multiply``."""
    together = min(rows, MOST_TOGETHER)
    block = max(1, BLOCK_NUMBERS // columns // MOST_OUTS) * MOST_OUTS
    memory = np.empty((block + together + GROUP) * columns + block * GROUP * (LANES + 1) + LANES, np.float32)
    for first in range(0, rows, together):
        read, written = inputs + first * columns * ITEM_SIZE, outputs + first * apart * ITEM_SIZE
        some = min(together, rows - first)
        _multiply_together(matrix, kind, stride, outs, columns, read, some, written, apart, block, memory)


@njit(cache=True, nogil=True)
def _multiply_together(
    matrix: int,
    kind: Any,
    stride: int,
    outs: int,
    columns: int,
    inputs: int,
    rows: int,
    outputs: int,
    apart: int,
    block: int,
    memory: npt.NDArray[np.float32],
) -> None:
    """The same for so many input rows that they stay in the cache."""
    unpacked = line_after(memory.ctypes.data)
    width = columns * ITEM_SIZE
    sums = unpacked + block * width
    interleaved = sums + block * GROUP * LANES * ITEM_SIZE
    whole = rows // GROUP * GROUP
    for row in range(0, whole, GROUP):
        interleave(inputs + row * width, GROUP, columns, interleaved + row * width, GROUP)
    rest = interleaved + whole * width
    last = rest + GROUP * width
    group = GROUP if rows - whole > SMALL_GROUP else SMALL_GROUP
    if whole < rows:
        clear_numbers(rest, group * columns)
        interleave(inputs + whole * width, rows - whole, columns, rest, group)
    for out in range(0, outs, block):
        many = min(block, outs - out)
        for place in range(many):
            unpack_row(matrix + (out + place) * stride, kind, columns, unpacked + place * width)
        to = outputs + out * ITEM_SIZE
        for row in range(0, whole, GROUP):
            read, written = interleaved + row * width, to + row * apart * ITEM_SIZE
            _multiply_group(unpacked, many, columns, read, written, apart, sums, GROUP)
        if whole < rows:
            _multiply_group(unpacked, many, columns, rest, last, many, sums, group)
            for row in range(whole, rows):
                copy_numbers(last + (row - whole) * many * ITEM_SIZE, many, to + row * apart * ITEM_SIZE)


@njit(cache=True, nogil=True)
def _multiply_group(
    matrix: int, outs: int, columns: int, inputs: int, outputs: int, apart: int, sums: int, group: int
) -> None:
    """Multiply rows of a float32 matrix by a group of interleaved input rows."""
    stride, beside = columns * ITEM_SIZE, SUMS // group
    parts = (columns + MOST_COLUMNS - 1) // MOST_COLUMNS
    part = (columns + parts * LANES - 1) // (parts * LANES) * LANES
    for column in range(0, columns, part):
        place, read = matrix + column * ITEM_SIZE, inputs + column * group * ITEM_SIZE
        wide = min(part, columns - column)
        kept, to = sums, outputs
        for _ in range(0, outs, beside):
            if column + wide < columns:
                _add(place, stride, wide, read, kept, column == 0, to, apart, group)
            else:
                _complete(place, stride, wide, read, kept, column == 0, to, apart, group)
            place += beside * stride
            kept += SUMS * LANES * ITEM_SIZE
            to += beside * ITEM_SIZE


@njit(cache=True, nogil=True)
def line_after(address: int) -> int:
    """The next address where a cache line begins: a vector that crosses two of them takes two reads."""
    return (address + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE


@njit(cache=True, nogil=True)
def interleave(inputs: int, rows: int, columns: int, written: int, group: int) -> None:
    """Write the rows of a group vector by vector, as a tile reads them.

    Rows that are a power of two apart would share one set of the cache.
    """
    for row in range(rows):
        read, to = inputs + row * columns * ITEM_SIZE, written + row * LANES * ITEM_SIZE
        copy_vectors(read, columns, to, group)
