"""``outputs = inputs @ matrix.T + bias`` for one format of matrices as a C function, called by its address.

Compiled code that multiplies matrices of several formats, known only when it runs, needs no version for each of them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import cfunc, types

from hdtool.runtime.kernels.compiled import compiled, generated
from hdtool.runtime.kernels.gemm_tiles import block_numbers
from hdtool.runtime.kernels.matrix_kind import MatrixKind
from hdtool.runtime.kernels.memory.raw_memory import array_at
from hdtool.runtime.kernels.small_batch_gemm import multiply
from hdtool.runtime.kernels.vector_code import INDEX, ITEM_SIZE

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
