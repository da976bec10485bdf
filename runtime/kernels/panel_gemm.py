"""Matmuls of many input rows, as in prefill: each lane of a vector belongs to a different output.

In ``gemm_tiles``, the lanes of a vector are partial sums of one output, each over every ``LANES``-th column, and are
added up at the end. Here, a panel of matrix rows is expanded to float32 and transposed, so that a vector holds the
same partial sum of ``LANES`` outputs. With long rows and many inputs, this moves less data between cache and registers.
Partial sums are computed one after another and merged in the order in which ``VectorCode.total`` adds lanes, so an
output has the same bits as in ``gemm_tiles``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from hdtool.runtime.kernels.compiled import compiled, copy_floats, generated
from hdtool.runtime.kernels.gemm_tiles import bytes_before, call_unpack
from hdtool.runtime.kernels.matrix_formats import cases
from hdtool.runtime.kernels.vector_code import CACHE_LINE, FLOAT, INDEX, ITEM_SIZE, LANES, FloatCode, line_after

VECTORS = 3
"""Maximum vectors of matrix rows in a panel; the last panel has no more than it needs."""
PANEL = VECTORS * LANES
"""Maximum matrix rows in a panel. A tile multiplies them by some input rows, for one lane and range of columns."""
GROUPS = (3, 6, 9) if LANES == 16 else (2, 4)
"""Possible numbers of input rows per tile, at most ``LANES``; the last rows use the smallest tile that fits. With
AVX-512, the largest tile takes 31 of 32 registers: 27 sums, three vectors of weights and one input. On an Intel Xeon,
252 rows by an 8,192 x 2,048 matrix in Q4_0 took 1.06 times as long in tiles of two vectors by 14 rows."""
GROUP = GROUPS[-1]
MAX_RANGE = 2048
"""Maximum columns of a range, for which a panel is transposed at once; a multiple of ``UNPACKED_COLUMNS``."""
UNPACKED_COLUMNS = 256
"""Columns unpacked before they are transposed, a multiple of every format's block size; ``LANES`` rows of them fit in
L1."""
MAX_ROWS = (256 + GROUP - 1) // GROUP * GROUP
"""Maximum number of input rows that share an unpacked panel."""
PADDING = LANES
"""Unused numbers after each lane's columns, without which the same columns of all lanes may fall into one cache set.
Transposing a group of fewer than ``LANES`` rows also writes there."""
LINE = CACHE_LINE // ITEM_SIZE
"""Float32 numbers per cache line."""
LEVELS = LANES.bit_length() - 1
"""Number of levels at which a sum waits for its partner."""
ORDER = tuple(int(f"{number:0{LEVELS}b}"[::-1], 2) for number in range(LANES))
"""Lanes in the order in which their partial sums are computed. The sum at position ``n`` merges with the one waiting at
level 0, the result with the one at level 1 and so on, once for each trailing 1 bit of ``n``; the result then waits at
the next level."""


@compiled
def multiply_many(
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
    """Compute the matmul for many input rows; ``stride`` is the size of a matrix row in bytes.

    ``output_stride`` is the distance between output rows in numbers.
    """
    chunks = (rows + MAX_ROWS - 1) // MAX_ROWS
    chunk = (rows + chunks * GROUP - 1) // (chunks * GROUP) * GROUP
    ranges, width = (columns + MAX_RANGE - 1) // MAX_RANGE, min(columns, MAX_RANGE)
    unpacked = np.empty(LANES * UNPACKED_COLUMNS + LINE, np.float32)
    panel = np.empty(LANES * _lane_size(width, PANEL) + LINE, np.float32)
    transposed = np.empty(ranges * LANES * _lane_size(width, chunk) + LINE, np.float32)
    sums = np.empty(chunk * PANEL * (LEVELS + (LANES if ranges > 1 else 1)) + LINE, np.float32)
    for first in range(0, rows, chunk):
        _multiply_chunk(
            unpack,
            block_size,
            matrix,
            stride,
            out_features,
            columns,
            inputs + first * columns * ITEM_SIZE,
            min(chunk, rows - first),
            outputs + first * output_stride * ITEM_SIZE,
            output_stride,
            (unpacked, panel, transposed, sums),
        )


@compiled
def _multiply_chunk(
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
    scratch: Any,
) -> None:
    """Multiply the matrix by up to ``MAX_ROWS`` input rows; ``scratch`` holds arrays that the caller keeps alive."""
    unpacked, panel = line_after(scratch[0].ctypes.data), line_after(scratch[1].ctypes.data)
    transposed, sums = line_after(scratch[2].ctypes.data), line_after(scratch[3].ctypes.data)
    _transpose_inputs(inputs, rows, columns, transposed)
    for out in range(0, out_features, PANEL):
        panel_rows = min(PANEL, out_features - out)
        read, range_size = transposed, LANES * _lane_size(MAX_RANGE, _padded(rows)) * ITEM_SIZE
        for column in range(0, columns, MAX_RANGE):
            width = min(MAX_RANGE, columns - column)
            part = matrix + out * stride + bytes_before(column, block_size, columns, stride)
            _transpose_panel(unpack, block_size, part, stride, panel_rows, width, columns, unpacked, panel)
            _multiply_panel(
                panel,
                panel_rows,
                width,
                read,
                rows,
                sums,
                column == 0,
                column + width == columns,
                outputs + out * ITEM_SIZE,
                output_stride,
            )
            read += range_size


@compiled
def _multiply_panel(
    panel: int,
    out_features: int,
    columns: int,
    inputs: int,
    rows: int,
    sums: int,
    is_first: bool,
    is_last: bool,
    outputs: int,
    output_stride: int,
) -> None:
    """Multiply a transposed panel by transposed input rows over a range of columns.

    ``sums`` holds the sums that wait at each level, then each lane's partial sums over earlier ranges. The final sums
    of incomplete tiles overwrite those of lane 0, which were read before. ``is_first`` and ``is_last`` tell whether
    this is the first or last range.
    """
    padded_rows, steps, width = _padded(rows), columns // LANES, _panel_width(out_features)
    size = padded_rows * width * ITEM_SIZE
    for number in range(LANES):
        lane, merges = ORDER[number], 0
        while is_last and number >> merges & 1:
            merges += 1
        weights = panel + lane * _lane_size(columns, width) * ITEM_SIZE
        read = inputs + lane * _lane_size(columns, padded_rows) * ITEM_SIZE
        for row in range(0, rows, GROUP):
            group = min(GROUP, padded_rows - row)
            waiting = sums + row * width * ITEM_SIZE
            before = waiting + (LEVELS + lane) * size
            written, stride = waiting + merges * size if is_last else before, width * ITEM_SIZE
            is_whole = group <= rows - row and out_features == width
            to = outputs + row * output_stride * ITEM_SIZE
            if merges == LEVELS and is_whole:
                written, stride = to, output_stride * ITEM_SIZE
            start = waiting if is_first else before
            _tile(weights, read, steps, is_first, start, merges, waiting, size, written, stride, group * PANEL + width)
            if merges == LEVELS and not is_whole:
                for place in range(min(group, rows - row)):
                    at = place * ITEM_SIZE
                    copy_floats(written + at * width, out_features, to + at * output_stride)
            read += group * steps * ITEM_SIZE


@compiled
def _transpose_inputs(inputs: int, rows: int, columns: int, written: int) -> None:
    """Transpose groups of input rows, ordered by range of columns, then lane, group and column."""
    for column in range(0, columns, MAX_RANGE):
        width = min(MAX_RANGE, columns - column)
        size = _lane_size(width, _padded(rows)) * ITEM_SIZE
        for row in range(0, rows, GROUP):
            read = inputs + (row * columns + column) * ITEM_SIZE
            group, to = min(GROUP, _padded(rows) - row), written + row * (width // LANES) * ITEM_SIZE
            _transpose(read, columns * ITEM_SIZE, rows - row, width, to, size, group)
        written += LANES * size


@compiled
def _transpose_panel(
    unpack: int,
    block_size: int,
    matrix: int,
    stride: int,
    rows: int,
    columns: int,
    row_columns: int,
    unpacked: int,
    written: int,
) -> None:
    """Expand a panel of a matrix to float32 and transpose it, repeating its last row to fill whole vectors.

    ``columns`` is the width of the range, and ``row_columns`` that of the whole row.
    """
    panel = _panel_width(rows)
    size = _lane_size(columns, panel) * ITEM_SIZE
    for row in range(0, panel, LANES):
        read, count = matrix + row * stride, min(LANES, rows - row)
        for column in range(0, columns, UNPACKED_COLUMNS):
            width = min(UNPACKED_COLUMNS, columns - column)
            part, between = read + bytes_before(column, block_size, row_columns, stride), stride
            if stride != row_columns * ITEM_SIZE:  # float32 is read in place
                call_unpack(unpack, (part, stride, count, width, unpacked))
                part, between = unpacked, width * ITEM_SIZE
            to = written + (column // LANES * panel + row) * ITEM_SIZE
            _transpose(part, between, count, width, to, size, panel)


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

    If ``is_first``, they are added to 0 instead. Then add the sums that wait at the first ``merges`` levels,
    ``level_size`` bytes apart, and write the results of each input row ``stride`` bytes after those of the previous
    one. ``shape`` is the number of input rows times ``PANEL``, plus the number of matrix rows.
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

    The numbers of a lane's columns are written one after another, ``step`` numbers apart, and those of the next lane
    ``lane_size`` bytes later. If ``step`` is less than ``LANES``, each column overwrites the end of the previous one.
    """
    code = FloatCode(builder)
    last = builder.sub(rows, INDEX(1))
    numbers = [builder.select(builder.icmp_signed("<", INDEX(row), last), INDEX(row), last) for row in range(LANES)]
    rows_at = [builder.add(read, builder.mul(number, stride)) for number in numbers]

    def body(column: Any, _: list[Any]) -> list[Any]:
        vectors = _transposed(code, [code.read(code.at(at, column)) for at in rows_at])
        at = code.at(written, builder.mul(builder.udiv(column, INDEX(LANES)), step))
        for lane, vector in enumerate(vectors):
            code.store(vector, builder.add(at, builder.mul(lane_size, INDEX(lane))))
        return []

    code.loop(columns, [], body)


def _transposed(code: FloatCode, vectors: list[Any]) -> list[Any]:
    """Transpose a square: exchange the upper right and lower left quarters, then those of each quarter, and so on."""
    half, lanes = LANES // 2, range(LANES)
    while half:
        left = code.integers([lane if not lane & half else lane - half + LANES for lane in lanes])
        right = code.integers([lane + half if not lane & half else lane + LANES for lane in lanes])
        for row in lanes:
            if not row & half:
                pair = vectors[row], vectors[row + half]
                vectors[row], vectors[row + half] = (code.builder.shuffle_vector(*pair, part) for part in (left, right))
        half //= 2
    return vectors
