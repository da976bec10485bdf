"""Matrix product of many input rows on a CPU, at the speed of its multiplications.

A prompt has so many rows that nothing waits for memory if all that is read again is in the caches: some columns of some
rows of the matrix are multiplied by groups of input rows, then the next columns. The sums are kept meanwhile, and what
is multiplied next is prefetched. Each sum is added in the order in which few rows are, so a row has the same bits in
every product.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from hdtool.runtime.kernels.gemm_tiles import SUMS, block_numbers, copy_vectors, partial_tile, unpack_row
from hdtool.runtime.kernels.memory.raw_memory import clear_numbers, copy_numbers
from hdtool.runtime.kernels.vector_code import CACHE_LINE, ITEM_SIZE, LANES

GROUP, SMALL_GROUP = SUMS // 2, SUMS // 4
"""Input rows of a tile, and of that of the last rows if they are no more."""
MOST_COLUMNS = 768
"""Columns of a tile, so that its input rows stay in the first cache; whole blocks of all formats."""
BLOCK_OUTS = 64
"""Matrix rows that are multiplied by all input rows before the next ones: their tiles by a group prefetch all of the
next group. On an Intel Xeon with AMX, 128 rows took 1.05 to 1.1 times as long."""
MOST_TOGETHER = 128
"""Input rows that are interleaved at once. There, 256 took 1.02 times as long."""

_OUTS = {rows: SUMS // rows for rows in (GROUP, SMALL_GROUP)}
"""Matrix rows of a tile, beside these numbers of input rows."""
_add, _complete = partial_tile(_OUTS, last=False), partial_tile(_OUTS, last=True)


@njit(cache=True, nogil=True)
def multiply_many(
    matrix: int, kind: Any, stride: int, outs: int, columns: int, inputs: int, rows: int, outputs: int, apart: int
) -> None:
    """``outs``, a multiple of ``MOST_OUTS``, rows of a matrix times input rows; see ``small_batch_gemm.multiply``."""
    parts = (rows + MOST_TOGETHER - 1) // MOST_TOGETHER
    together = (rows + parts * GROUP - 1) // (parts * GROUP) * GROUP
    numbers = BLOCK_OUTS * (MOST_COLUMNS + together * LANES + GROUP) + together * columns + LANES
    memory = np.empty(numbers, np.float32)
    for first in range(0, rows, together):
        read, written = inputs + first * columns * ITEM_SIZE, outputs + first * apart * ITEM_SIZE
        some = min(together, rows - first)
        _multiply_together(matrix, kind, stride, outs, columns, read, some, written, apart, memory)


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
    memory: npt.NDArray[np.float32],
) -> None:
    """The same for so many input rows as are interleaved at once."""
    width = columns * ITEM_SIZE
    whole = rows // GROUP * GROUP
    group = GROUP if rows - whole > SMALL_GROUP else SMALL_GROUP
    unpacked = line_after(memory.ctypes.data)
    sums = unpacked + BLOCK_OUTS * MOST_COLUMNS * ITEM_SIZE
    last = sums + (rows + GROUP - 1) // GROUP * GROUP * BLOCK_OUTS * LANES * ITEM_SIZE
    interleaved = last + GROUP * BLOCK_OUTS * ITEM_SIZE
    for row in range(0, whole, GROUP):
        interleave(inputs + row * width, GROUP, columns, interleaved + row * width, GROUP)
    if whole < rows:
        rest = interleaved + whole * width
        clear_numbers(rest, group * columns)
        interleave(inputs + whole * width, rows - whole, columns, rest, group)
    for out in range(0, outs, BLOCK_OUTS):
        many, to = min(BLOCK_OUTS, outs - out), outputs + out * ITEM_SIZE
        for column in range(0, columns, MOST_COLUMNS):
            wide = min(MOST_COLUMNS, columns - column)
            final = column + wide == columns
            place = matrix + out * stride + bytes_before(column, kind, columns, stride)
            later = matrix + (out + many) * stride if final else place + bytes_before(wide, kind, columns, stride)
            block, between = place, stride
            if stride != width:  # numbers of 32 bits are read where they are
                block, between = unpacked, wide * ITEM_SIZE
                for row in range(many):
                    unpack_row(place + row * stride, kind, wide, unpacked + row * between)
            for row in range(0, rows, GROUP):
                some = GROUP if row < whole else group
                read, kept = interleaved + row * width, sums + row * BLOCK_OUTS * LANES * ITEM_SIZE
                read += column * some * ITEM_SIZE
                written, from_row = (to + row * apart * ITEM_SIZE, apart) if row < whole else (last, many)
                before = row // GROUP * (BLOCK_OUTS // 4)  # the rows that earlier groups prefetch
                far = later + before % BLOCK_OUTS * stride + before // BLOCK_OUTS * wide
                near = read + some * width
                _multiply_group(
                    block,
                    between,
                    many,
                    wide,
                    read,
                    written,
                    from_row,
                    kept,
                    some,
                    column == 0,
                    final,
                    near,
                    far,
                    stride,
                )
        for row in range(whole, rows):
            copy_numbers(last + (row - whole) * many * ITEM_SIZE, many, to + row * apart * ITEM_SIZE)


@njit(cache=True, nogil=True)
def _multiply_group(
    matrix: int,
    stride: int,
    outs: int,
    columns: int,
    inputs: int,
    outputs: int,
    apart: int,
    sums: int,
    group: int,
    first: bool,
    last: bool,
    near: int,
    far: int,
    far_stride: int,
) -> None:
    """Multiply rows of a float32 matrix by a group of interleaved input rows, for the ``first`` or ``last`` columns.

    ``near`` is the next group and ``far`` a row of the matrix that is multiplied later: a tile prefetches as many bytes
    of both as it has columns. Two tiles prefetch the same row, so that fetches from memory spread over more groups.
    """
    beside = SUMS // group
    for number in range(outs // beside):
        later = far + number // 2 * far_stride
        if last:
            _complete(matrix, stride, columns, inputs, sums, first, outputs, apart, near, later, group)
        else:
            _add(matrix, stride, columns, inputs, sums, first, outputs, apart, near, later, group)
        matrix += beside * stride
        sums += SUMS * LANES * ITEM_SIZE
        outputs += beside * ITEM_SIZE
        near += columns


@njit(cache=True, nogil=True)
def bytes_before(column: int, kind: Any, columns: int, stride: int) -> int:
    """The bytes of a matrix row before a column."""
    return column // block_numbers(kind) * (stride // (columns // block_numbers(kind)))  # type: ignore[no-any-return]


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
