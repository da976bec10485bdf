"""``outputs = inputs @ matrix.T`` with the panels of a packed matrix and input rows in 8 bits.

A row has the same bits alone and beside others, as each has its own scales and sums.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import cfunc, njit, types

from hdtool.runtime.engines.cpu.int8.panel_format import PANEL_ROWS, PART
from hdtool.runtime.engines.cpu.int8.panel_tiles import MOST_ROWS, panel_bytes, panel_tile
from hdtool.runtime.engines.cpu.int8.quantized_rows import RECORD, quantize_row
from hdtool.runtime.kernels.matmul_address import ARGUMENTS, add_bias
from hdtool.runtime.kernels.matrix_kind import MatrixKind
from hdtool.runtime.kernels.memory.raw_memory import array_at
from hdtool.runtime.kernels.tile_choice import by_rows
from hdtool.runtime.kernels.vector_code import ITEM_SIZE

_tile = by_rows({rows: panel_tile(rows) for rows in range(1, MOST_ROWS + 1)})


@cache
def int8_matmul_of(kind: MatrixKind) -> Any:
    """The matmul for the panels of a format as a C function; it must be kept as long as its address is used."""

    @cfunc(types.void(*[types.int64] * ARGUMENTS), cache=True)
    def matmul(
        matrix: int, outs: int, columns: int, inputs: int, rows: int, outputs: int, bias: int, first: int, end: int
    ) -> None:
        part = matrix + first // PANEL_ROWS * panel_bytes(kind, columns)
        multiply_int8(part, kind, end - first, columns, inputs, rows, outputs + first * ITEM_SIZE, outs)
        add_bias(bias, outs, rows, outputs, first, end)

    return matmul


@njit(cache=True, nogil=True)
def multiply_int8(
    panels: int,
    kind: Any,
    outs: int,
    columns: int,
    inputs: int,
    rows: int,
    outputs: int,
    apart: int,
) -> None:
    """All arrays are given by addresses; ``kind`` is the format that the panels were made from.

    The outputs of input rows are ``apart`` numbers from each other.
    """
    # An argument of the function that uses its address: numba frees an array after the last line that names it.
    records = np.empty(rows * (columns // PART * RECORD), np.uint8)
    _multiply_records(panels, kind, outs, columns, inputs, rows, outputs, apart, records)


@njit(cache=True, nogil=True)
def _multiply_records(
    panels: int,
    kind: Any,
    outs: int,
    columns: int,
    inputs: int,
    rows: int,
    outputs: int,
    apart: int,
    records: npt.NDArray[np.uint8],
) -> None:
    """The same with memory for the rows in 8 bits."""
    width, size = columns // PART * RECORD, panel_bytes(kind, columns)
    quantized = records.ctypes.data
    for row in range(rows):
        quantize_row(inputs + row * columns * ITEM_SIZE, kind, columns, quantized + row * width)
    whole = outs // PANEL_ROWS * PANEL_ROWS
    for out in range(0, whole, PANEL_ROWS):
        panel = panels + out // PANEL_ROWS * size
        _multiply_panel(panel, kind, columns, quantized, width, rows, outputs + out * ITEM_SIZE, apart)
    if whole < outs:
        last = np.empty((rows, PANEL_ROWS), np.float32)
        panel = panels + whole // PANEL_ROWS * size
        _multiply_panel(panel, kind, columns, quantized, width, rows, last.ctypes.data, last.shape[1])
        for row in range(rows):
            array_at(outputs + row * apart * ITEM_SIZE, (outs,), types.float32)[whole:] = last[row, : outs - whole]


@njit(cache=True, nogil=True)
def _multiply_panel(
    panel: int, kind: Any, columns: int, inputs: int, width: int, rows: int, outputs: int, apart: int
) -> None:
    """Multiply a panel by all rows; the outputs of rows are ``apart`` numbers from each other."""
    row = 0
    while row < rows:
        some = min(rows - row, MOST_ROWS)
        _tile(panel, kind, columns, inputs + row * width, outputs + row * apart * ITEM_SIZE, apart, some)
        row += some
