"""Matmuls of many input rows, as in prefill: each lane of a vector belongs to a different output.

In ``gemm_tiles``, the lanes of a vector are partial sums of one output, each over every ``LANES``-th column, and are
added up at the end. Here, a panel of matrix rows is transposed, so that a vector holds the same partial sum of
``LANES`` outputs. With long rows and many inputs, this moves less data between cache and registers.
Partial sums are computed one after another and merged in the order in which ``VectorCode.total`` adds lanes, so an
output has the same bits as in ``gemm_tiles``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from hdtool.runtime.kernels.compiled import Record, compiled, copy_floats, generated
from hdtool.runtime.kernels.gemm_tiles import Operands, rows_per_chunk, stride_of
from hdtool.runtime.kernels.matrix_formats import cases
from hdtool.runtime.kernels.transposed_rows import (
    call_expand,
    call_transpose,
    row_addresses,
    transposed,
    transposed_size,
)
from hdtool.runtime.kernels.vector_code import CACHE_LINE, FLOAT, INDEX, ITEM_SIZE, LANES, FloatCode, line_after

VECTORS = 3
"""Maximum vectors of matrix rows in a panel; the last panel has no more than it needs."""
PANEL = VECTORS * LANES
"""Maximum matrix rows in a panel; a tile multiplies them by some input rows, for one lane and range of columns."""
GROUPS = (3, 6, 9) if LANES == 16 else (2, 4)
"""Possible numbers of input rows per tile, at most ``LANES``; the last rows use the smallest tile that fits.

With AVX-512, the largest tile takes 31 of 32 registers: 27 sums, three vectors of weights and one input.
"""
GROUP = GROUPS[-1]
MAX_RANGE = 2048
"""Maximum columns of a range, over which a tile adds up a lane's partial sums at once."""
MAX_ROWS = (256 + GROUP - 1) // GROUP * GROUP
"""Maximum number of input rows that share a transposed panel."""
MAX_LONG_ROWS = 135
"""Like ``MAX_ROWS``, for rows of more than ``MAX_LONG_COLUMNS``: two chunks of such rows are faster than one."""
MAX_LONG_COLUMNS = 4096
PADDING = LANES
"""Unused numbers after a lane's columns, which spread lanes over cache sets; ``_transpose`` may write there."""
LINE = CACHE_LINE // ITEM_SIZE
"""Float32 numbers per cache line."""
LEVELS = LANES.bit_length() - 1
"""Number of levels at which a sum waits for its partner."""
ORDER = tuple(int(f"{number:0{LEVELS}b}"[::-1], 2) for number in range(LANES))
"""Lanes in the order in which their partial sums are computed.

The sum at position ``n`` merges with the one waiting at level 0, the result with the one at level 1 and so on, once for
each trailing 1 bit of ``n``; the result then waits at the next level.
"""


@compiled
def multiply_many(kernels: Record, operands: Operands) -> None:
    """Compute the matmul for many input rows; ``kernels`` is a record of ``matmul.KERNELS``.

    ``columns`` must be a multiple of ``4 * LANES`` and of the size of a block.
    """
    matrix, out_features, columns, inputs, rows, outputs, output_stride = operands
    max_rows, stride = MAX_ROWS if columns <= MAX_LONG_COLUMNS else MAX_LONG_ROWS, stride_of(kernels, columns)
    chunk = rows_per_chunk(rows, max_rows, GROUP)
    panel = np.empty(VECTORS * transposed_size(columns) + LINE, np.float32)
    weights = np.empty(MAX_RANGE // LANES * PANEL + LINE, np.float32)
    transposed_inputs = np.empty(LANES * _lane_size(columns, chunk) + LINE, np.float32)
    sums = np.empty(chunk * PANEL * (LEVELS + 1) + LINE, np.float32)
    for first in range(0, rows, chunk):
        # Read in each iteration, so that the arrays stay alive.
        panel_at, weights_at = line_after(panel.ctypes.data), line_after(weights.ctypes.data)
        inputs_at, sums_at = line_after(transposed_inputs.ctypes.data), line_after(sums.ctypes.data)
        count, to = min(chunk, rows - first), outputs + first * output_stride * ITEM_SIZE
        _transpose_inputs(inputs + first * columns * ITEM_SIZE, count, columns, inputs_at)
        for out in range(0, out_features, PANEL):
            panel_rows, written = min(PANEL, out_features - out), to + out * ITEM_SIZE
            _transpose_panel(kernels.unpack, matrix + out * stride, stride, panel_rows, columns, panel_at)
            part = Operands(panel_at, panel_rows, columns, inputs_at, count, written, output_stride)
            _multiply_panel(kernels.expand, part, weights_at, sums_at)


@compiled
def _multiply_panel(expand: int, operands: Operands, weights: int, sums: int) -> None:
    """Multiply a transposed panel, the matrix, by transposed input rows, lane by lane.

    ``weights`` is scratch memory for one lane of a range of columns. ``sums`` has a place for the sums that wait at
    each level, then one for the final sums. Between ranges, a lane's sums are kept in the place that they will get.
    """
    panel, out_features, columns, inputs, rows, outputs, output_stride = operands
    padded_rows, width = _padded(rows), _panel_width(out_features)
    for number in range(LANES):
        lane, merges = ORDER[number], 0
        while number >> merges & 1:
            merges += 1
        read = inputs + lane * _lane_size(columns, padded_rows) * ITEM_SIZE
        for column in range(0, columns, MAX_RANGE):
            range_columns = min(MAX_RANGE, columns - column)
            for vector in range(width // LANES):
                rows_at = panel + vector * transposed_size(columns) * ITEM_SIZE
                to = weights + vector * LANES * ITEM_SIZE
                call_expand(expand, (rows_at, columns, lane, column, range_columns, to, width))
            steps, is_first, is_last = range_columns // LANES, column == 0, column + MAX_RANGE >= columns
            part = Operands(weights, out_features, steps, read, rows, outputs, output_stride)
            _multiply_range(part, sums, merges, is_first, is_last)
            read += padded_rows * steps * ITEM_SIZE


@compiled
def _multiply_range(operands: Operands, sums: int, merges: int, is_first: bool, is_last: bool) -> None:
    """Multiply one lane of a range of columns; its sums are merged ``merges`` times after the last range."""
    weights, out_features, steps, inputs, rows, outputs, output_stride = operands
    padded_rows, width = _padded(rows), _panel_width(out_features)
    size = padded_rows * width * ITEM_SIZE
    is_final = is_last and merges == LEVELS
    for row in range(0, rows, GROUP):
        group = min(GROUP, padded_rows - row)
        waiting, to = sums + row * width * ITEM_SIZE, outputs + row * output_stride * ITEM_SIZE
        carried = waiting + merges * size
        is_whole = is_final and group <= rows - row and out_features == width
        written, stride = (to, output_stride * ITEM_SIZE) if is_whole else (carried, width * ITEM_SIZE)
        shape, tile_merges = group * PANEL + width, merges if is_last else 0
        _tile(weights, inputs, steps, is_first, carried, tile_merges, waiting, size, written, stride, shape)
        if is_final and not is_whole:
            for place in range(min(group, rows - row)):
                at = place * ITEM_SIZE
                copy_floats(written + at * width, out_features, to + at * output_stride)
        inputs += group * steps * ITEM_SIZE


@compiled
def _transpose_inputs(inputs: int, rows: int, columns: int, written: int) -> None:
    """Transpose groups of input rows, ordered by lane, then range of columns, group and column."""
    size, stride = _lane_size(columns, _padded(rows)) * ITEM_SIZE, columns * ITEM_SIZE
    for column in range(0, columns, MAX_RANGE):
        width = min(MAX_RANGE, columns - column)
        for row in range(0, rows, GROUP):
            read = inputs + row * stride + column * ITEM_SIZE
            group = min(GROUP, _padded(rows) - row)
            _transpose(read, stride, rows - row, width, written, size, group)
            written += group * (width // LANES) * ITEM_SIZE


@compiled
def _transpose_panel(transpose: int, matrix: int, stride: int, rows: int, columns: int, written: int) -> None:
    """Transpose a panel of a matrix, repeating its last row to fill whole vectors."""
    for row in range(0, rows, LANES):
        call_transpose(transpose, (matrix + row * stride, stride, rows - row, columns, written))
        written += transposed_size(columns) * ITEM_SIZE


@compiled
def _lane_size(columns: int, rows: int) -> int:
    """Return how many numbers a lane's columns take in ``rows`` transposed rows, with padding."""
    return columns // LANES * rows + PADDING


@compiled
def _padded(rows: int) -> int:
    """Round a number of input rows up to whole tiles."""
    return (rows + GROUPS[0] - 1) // GROUPS[0] * GROUPS[0]


@compiled
def _panel_width(rows: int) -> int:
    """Round a panel's number of matrix rows up to whole vectors."""
    return (rows + LANES - 1) // LANES * LANES


@generated(*[types.int64] * 3, types.boolean, *[types.int64] * 7)
def _tile(
    builder: Any,
    weights: Any,
    inputs: Any,
    steps: Any,
    is_first: Any,
    sums: Any,
    merges: Any,
    waiting: Any,
    level_size: Any,
    written: Any,
    stride: Any,
    shape: Any,
) -> None:
    """Compute a tile's partial sums in one lane: products of a panel and a group of input rows, added to ``sums``.

    If ``is_first``, they are added to 0 instead. Then add the sums that wait at the first ``merges`` levels, each of
    ``level_size`` bytes, and write the results; ``stride`` is that of the output rows in bytes. ``shape`` is the number
    of input rows times ``PANEL``, plus the number of matrix rows.
    """
    code = FloatCode(builder)

    def generate(rows: int, vectors: int) -> None:
        between = INDEX(vectors * LANES * ITEM_SIZE)

        def addresses(first: Any, distance: Any) -> list[Any]:
            rows_at = [builder.add(first, builder.mul(distance, INDEX(row))) for row in range(rows)]
            return [code.at(at, INDEX(vector * LANES)) for at in rows_at for vector in range(vectors)]

        def multiply(step: Any, totals: list[Any]) -> list[Any]:
            at = code.at(weights, builder.mul(step, INDEX(vectors * LANES)))
            factors = [code.read(code.at(at, INDEX(vector * LANES))) for vector in range(vectors)]
            numbers = code.at(inputs, builder.mul(step, INDEX(rows)))
            for row in range(rows):
                number = code.splat(code.read(code.at(numbers, INDEX(row)), FLOAT))
                for place, factor in enumerate(factors, row * vectors):
                    totals[place] = code.multiply_add(factor, number, totals[place])
            return totals

        def merge(level: Any, totals: list[Any]) -> list[Any]:
            others = addresses(builder.add(waiting, builder.mul(level, level_size)), between)
            return [builder.fadd(code.read(other), total) for other, total in zip(others, totals, strict=True)]

        before = [builder.select(is_first, code.number(0.0), code.read(at)) for at in addresses(sums, between)]
        totals = code.loop(merges, code.loop(steps, before, multiply, 1), merge, 1)
        for at, total in zip(addresses(written, stride), totals, strict=True):
            code.store(total, at)

    shapes = {rows * PANEL + vectors * LANES: (rows, vectors) for rows in GROUPS for vectors in range(1, VECTORS + 1)}
    for _, (rows, vectors) in cases(builder, shape, shapes):
        generate(rows, vectors)


@generated(*[types.int64] * 7)
def _transpose(
    builder: Any, read: Any, stride: Any, rows: Any, columns: Any, written: Any, lane_size: Any, step: Any
) -> None:
    """Transpose the first ``LANES`` of ``rows`` rows; if there are fewer, the last is repeated.

    The columns of a lane are written one after another, with a stride of ``step`` numbers, and those of the next lane
    ``lane_size`` bytes later. If ``step`` is less than ``LANES``, each column overwrites the end of the previous one.
    """
    code = FloatCode(builder)
    rows_at = row_addresses(builder, read, stride, rows)

    def body(column: Any, _: list[Any]) -> list[Any]:
        vectors = transposed(code, [code.read(code.at(at, column)) for at in rows_at])
        at = code.at(written, builder.mul(builder.udiv(column, INDEX(LANES)), step))
        for lane, vector in enumerate(vectors):
            code.store(vector, builder.add(at, builder.mul(lane_size, INDEX(lane))))
        return []

    code.loop(columns, [], body)
