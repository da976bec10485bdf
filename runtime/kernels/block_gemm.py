"""Matmuls of many input rows, as in prefill, on processors without AVX-512.

A block of the matrix is expanded to float32 and multiplied by all groups of input rows while it is in the cache. The
lanes of a vector are partial sums of one output, as in ``gemm_tiles``. With the registers of AVX-512, ``panel_gemm`` is
faster.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hdtool.runtime.kernels.compiled import Record, clear_floats, compiled, copy_floats
from hdtool.runtime.kernels.gemm_tiles import Operands, call_unpack, interleave, partial_tile, rows_per_chunk, stride_of
from hdtool.runtime.kernels.vector_code import CACHE_LINE, ITEM_SIZE, LANES, l1_bytes, line_after

GROUPS = (2, 4, 6) if LANES == 8 else (2, 4)
"""Possible numbers of input rows per tile; the last rows use the smallest tile that fits.

AVX registers hold the sums of at most six input rows by two matrix rows; smaller tiles need more loads per product.
"""
SMALL_GROUP, GROUP = GROUPS[0], GROUPS[-1]
MAX_TILE_COLUMNS = 512 if l1_bytes() * 3 // 4 < (GROUP + 2) * 768 * ITEM_SIZE else 768
"""Maximum columns of a tile, whose rows may fill 3/4 of L1; a multiple of every format's block size."""
BLOCK_OUT_FEATURES = 64
"""Matrix rows per cache block, which is multiplied by all input rows before the next block is read."""
MAX_INTERLEAVED_ROWS = (128 + GROUP - 1) // GROUP * GROUP
"""Maximum number of input rows interleaved at once."""

_GROUP_OUT_FEATURES = {rows: 4 if rows == SMALL_GROUP else 2 for rows in GROUPS}
"""Matrix rows per tile, by the tile's number of input rows."""
_add, _complete = partial_tile(_GROUP_OUT_FEATURES, is_last=False), partial_tile(_GROUP_OUT_FEATURES, is_last=True)


@compiled
def multiply_many(kernels: Record, operands: Operands) -> None:
    """Compute the matmul for many input rows; ``kernels`` is a record of ``matmul.KERNELS``.

    ``out_features`` must be a multiple of ``TILE_OUT_FEATURES``.
    """
    matrix, out_features, columns, inputs, rows, outputs, output_stride = operands
    chunk = rows_per_chunk(rows, MAX_INTERLEAVED_ROWS, GROUP)
    numbers = (
        BLOCK_OUT_FEATURES * (MAX_TILE_COLUMNS + chunk * LANES + GROUP) + chunk * columns + CACHE_LINE // ITEM_SIZE
    )
    memory = np.empty(numbers, np.float32)
    for first in range(0, rows, chunk):
        read, written = inputs + first * columns * ITEM_SIZE, outputs + first * output_stride * ITEM_SIZE
        count = min(chunk, rows - first)
        part = Operands(matrix, out_features, columns, read, count, written, output_stride)
        _multiply_together(kernels, part, memory)


@compiled
def _multiply_together(kernels: Record, operands: Operands, memory: npt.NDArray[np.float32]) -> None:
    """Multiply the matrix by up to ``MAX_INTERLEAVED_ROWS`` input rows, using ``memory`` as scratch space."""
    matrix, out_features, columns, inputs, rows, outputs, output_stride = operands
    stride, block_size = stride_of(kernels, columns), kernels.block_size
    width = columns * ITEM_SIZE
    whole = rows // GROUP * GROUP
    group = SMALL_GROUP
    for size in GROUPS:
        if group < rows - whole:
            group = size
    unpacked = line_after(memory.ctypes.data)
    sums = unpacked + BLOCK_OUT_FEATURES * MAX_TILE_COLUMNS * ITEM_SIZE
    rest_outputs = sums + (rows + GROUP - 1) // GROUP * GROUP * BLOCK_OUT_FEATURES * LANES * ITEM_SIZE
    interleaved = rest_outputs + GROUP * BLOCK_OUT_FEATURES * ITEM_SIZE
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
            is_last = column + block_columns == columns
            stored = matrix + out * stride + _bytes_before(column, block_size, columns, stride)
            next_block = (
                matrix + (out + block_rows) * stride
                if is_last
                else stored + _bytes_before(block_columns, block_size, columns, stride)
            )
            block, row_stride = stored, stride
            if stride != width:  # float32 is read in place
                block, row_stride = unpacked, block_columns * ITEM_SIZE
                call_unpack(kernels.unpack, (stored, stride, block_rows, block_columns, unpacked))
            for row in range(0, rows, GROUP):
                group_rows = GROUP if row < whole else group
                read, group_sums = interleaved + row * width, sums + row * BLOCK_OUT_FEATURES * LANES * ITEM_SIZE
                read += column * group_rows * ITEM_SIZE
                written, from_row = (
                    (to + row * output_stride * ITEM_SIZE, output_stride) if row < whole else (rest_outputs, block_rows)
                )
                fetched = row // GROUP * (BLOCK_OUT_FEATURES // 4)  # matrix rows already prefetched by earlier groups
                far = next_block + fetched % BLOCK_OUT_FEATURES * stride + fetched // BLOCK_OUT_FEATURES * block_columns
                near = read + group_rows * width
                part = Operands(block, block_rows, block_columns, read, group_rows, written, from_row)
                _multiply_group(part, row_stride, group_sums, column == 0, is_last, near, far, stride)
        for row in range(whole, rows):
            read = rest_outputs + (row - whole) * block_rows * ITEM_SIZE
            copy_floats(read, block_rows, to + row * output_stride * ITEM_SIZE)


@compiled
def _bytes_before(column: int, block_size: int, columns: int, stride: int) -> int:
    """Return the byte offset of a column in a matrix row."""
    return column // block_size * (stride // (columns // block_size))


@compiled
def _multiply_group(
    operands: Operands, stride: int, sums: int, is_first: bool, is_last: bool, near: int, far: int, far_stride: int
) -> None:
    """Multiply rows of a float32 matrix by a group of interleaved input rows, over a range of columns.

    ``is_first`` and ``is_last`` tell whether it is the first or last range; ``sums`` carries the sums in between. Each
    tile prefetches one byte per column at ``near``, the next group of input rows, and at ``far``, later matrix rows.
    Two tiles share a prefetched matrix row, which spreads memory traffic over more groups.
    """
    matrix, out_features, columns, inputs, group, outputs, output_stride = operands
    features = 4 if group == SMALL_GROUP else 2
    for number in range(out_features // features):
        far_row = far + number // 2 * far_stride
        if is_last:
            _complete(matrix, stride, columns, inputs, sums, is_first, outputs, output_stride, near, far_row, group)
        else:
            _add(matrix, stride, columns, inputs, sums, is_first, outputs, output_stride, near, far_row, group)
        matrix += features * stride
        sums += features * group * LANES * ITEM_SIZE
        outputs += features * ITEM_SIZE
        near += columns
