"""Which matmul serves a shape, our own or torch's: a rule, so that a machine computes the same bits in each process."""

from __future__ import annotations

from hdtool.runtime.kernels.vector_code import CPU

SLOW_IN_TORCH = CPU.startswith("znver")
"""On Zen, torch's float32 matmul uses half of the vector width: our own is faster for any number of rows."""
FEW_ROWS, SHORT_ROWS = (16, 32), (8192, 2048)
"""Rows up to which our own matmul serves any number of columns, and columns up to which it serves more rows."""


def uses_own_matmul(rows: int, columns: int) -> bool:
    """Whether our own matmul multiplies so many input rows by a matrix with so many columns.

    It does so unless torch's is clearly faster, since each row has the same bits alone and beside others. Input rows
    and a matrix row that do not fit into L2 together are what makes it slower. The rule is the same for weights in
    float32, in 16 bits and in blocks, so that an answer does not depend on how they are kept.
    `python -m tests.benchmarks.matmul_rule` compares it with the faster one of each shape.
    """
    if SLOW_IN_TORCH or rows <= FEW_ROWS[0]:
        return True
    return columns <= (SHORT_ROWS[0] if rows <= FEW_ROWS[1] else SHORT_ROWS[1])
