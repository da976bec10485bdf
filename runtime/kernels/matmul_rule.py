"""Which matmul serves a shape, our own or torch's: a rule, so that a machine computes the same bits in each process."""

from __future__ import annotations

from hdtool.runtime.kernels.vector_code import CPU

SLOW_IN_TORCH = CPU.startswith("znver")
"""On Zen, torch's float32 matmul uses half of the vector width: our own is faster for any number of rows."""
MOST_ROWS = 65
"""Input rows up to which our own matmul serves any matrix: those of the largest draft tree."""
MOST_COLUMNS = 2048
"""Columns of a matrix up to which it serves any number of rows; more rows of more columns do not stay in L2."""


def uses_own_matmul(rows: int, columns: int) -> bool:
    """Whether our own matmul multiplies so many input rows by a matrix with so many columns.

    Each row of it has the same bits alone and beside others. The rule is the same for weights in float32, in 16 bits
    and in blocks, so that an answer does not depend on how they are kept.
    ``python -m tests.benchmarks.matmul_rule`` compares it with the faster one of each shape.
    """
    return SLOW_IN_TORCH or rows <= MOST_ROWS or columns <= MOST_COLUMNS
