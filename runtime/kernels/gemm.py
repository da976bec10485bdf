"""``outputs = inputs @ matrix.T + bias`` for one format of matrices as a C function, called by its address.

A prompt has so many rows that nothing waits for memory if all that is read again is in the caches: some columns of some
rows of the matrix are multiplied by groups of input rows, then the next columns. The sums are kept meanwhile, and what
is multiplied next is prefetched. Each sum is added in the order in which few rows are, so a row has the same bits in
every product.

BLAS libraries are optimized for many rows. For one row, or the few rows of a tree, they read the matrix below memory
bandwidth. This kernel reads it once, in the order of memory, and prefetches one tile ahead.

Compiled code that multiplies matrices of several formats, known only when it runs, needs no version for each of them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import cfunc, njit, types

from hdtool.runtime.kernels.compiled import array_at, clear_numbers, compiled, copy_numbers, generated
from hdtool.runtime.kernels.gemm_tiles import (
    FEW_ROWS,
    MOST_OUTS,
    MOST_ROWS,
    SUMS,
    block_numbers,
    copy_vectors,
    outs_beside,
    partial_tile,
    tile,
    unpack_row,
)
from hdtool.runtime.kernels.matrix_kind import MatrixKind, by_rows
from hdtool.runtime.kernels.vector_code import CACHE_LINE, INDEX, ITEM_SIZE, LANES

GROUPS = (2, 4, 6) if LANES == 8 else (SUMS // 4, SUMS // 2)
"""Input rows of a tile; the smallest group that holds the last rows is used for them. AVX has registers for twelve
sums, with which a tile loads less for each multiplication."""
SMALL_GROUP, GROUP = GROUPS[0], GROUPS[-1]
MOST_COLUMNS = 768
"""Columns of a tile, so that its input rows stay in the first cache; whole blocks of all formats."""
BLOCK_OUTS = 64
"""Matrix rows that are multiplied by all input rows before the next ones: their tiles by a group prefetch all of the
next group. On an Intel Xeon with AMX, 128 rows took 1.05 to 1.1 times as long."""
MOST_TOGETHER = 128
"""Input rows that are interleaved at once. There, 256 took 1.02 times as long."""

_GROUP_OUTS = {rows: 4 if rows == SMALL_GROUP else 2 for rows in GROUPS}
"""Matrix rows of a tile, beside these numbers of input rows."""
_add, _complete = partial_tile(_GROUP_OUTS, last=False), partial_tile(_GROUP_OUTS, last=True)


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
    group = SMALL_GROUP
    for size in GROUPS:
        if group < rows - whole:
            group = size
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
    beside = 4 if group == SMALL_GROUP else 2
    for number in range(outs // beside):
        later = far + number // 2 * far_stride
        if last:
            _complete(matrix, stride, columns, inputs, sums, first, outputs, apart, near, later, group)
        else:
            _add(matrix, stride, columns, inputs, sums, first, outputs, apart, near, later, group)
        matrix += beside * stride
        sums += beside * group * LANES * ITEM_SIZE
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


COLUMN_MULTIPLE = 64
"""The number of columns must be a multiple of this."""
MOST_IN_REGISTERS = 18 if LANES == 16 else 11
"""Input rows up to which a matrix is unpacked in registers, once for each tile; for more, ``multiply_many`` is faster.
On an Intel Xeon with AVX-512, 17 rows by 1,536 x 768 numbers in Q4_1 take 0.84 of its time, 20 rows 0.97; of Q6_K they
take 0.97 and 1.15 of it."""
MOST_LONG_ROWS = 8 if LANES == 8 else MOST_IN_REGISTERS
"""The limit for input rows that fill L1 together: eleven by 576 x 1,536 numbers in Q4_1 took 1.3 times as long in
registers on Zen 4 without AVX-512."""
L1_NUMBERS = 8192
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
    long = size != ITEM_SIZE and rows * columns > L1_NUMBERS
    if rows > (MOST_LONG_ROWS if long else MOST_IN_REGISTERS):
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


ARGUMENTS = 9
"""Of a matmul: the matrix, its rows and columns; the inputs and their rows; outputs; bias, or 0; and the first matrix
row to multiply, and the end, between which are whole panels unless it is that of the matrix."""


@cache
def matmul_of(kind: MatrixKind, size: int) -> Any:
    """The matmul for a format; it must be kept as long as its address is used."""

    @cfunc(types.void(*[types.int64] * ARGUMENTS), cache=True)
    def matmul(
        matrix: int, outs: int, columns: int, inputs: int, rows: int, outputs: int, bias: int, first: int, end: int
    ) -> None:
        part = matrix + first * (columns // block_numbers(kind) * size)
        multiply(part, kind, size, end - first, columns, inputs, rows, outputs + first * ITEM_SIZE, outs)
        add_bias(bias, outs, rows, outputs, first, end)

    return matmul


@compiled
def add_bias(bias: int, outs: int, rows: int, outputs: int, first: int, end: int) -> None:
    if bias:
        added, written = array_at(bias, (outs,), types.float32), array_at(outputs, (rows, outs), types.float32)
        for row in range(rows):
            for out in range(first, end):
                written[row, out] += added[out]


@generated(types.int64, *[types.int64] * ARGUMENTS)
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
    """Call the function at an address."""
    kind = ir.FunctionType(ir.VoidType(), [INDEX] * ARGUMENTS)
    called = builder.inttoptr(function, kind.as_pointer())
    builder.call(called, [one, two, three, four, five, six, seven, first, end])
