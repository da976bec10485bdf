"""LayerNorms of float32 rows in compiled code."""

from __future__ import annotations

from typing import Any

from numba import types

from hdtool.runtime.kernels.compiled import compiled, generated
from hdtool.runtime.kernels.vector_code import FLOAT, ITEM_SIZE, FloatCode


@generated(*[types.int64] * 4, types.float32, types.int64)
def layer_norm_row(builder: Any, read: Any, weight: Any, bias: Any, width: Any, epsilon: Any, written: Any) -> None:
    """Write the LayerNorm of a row; all arrays are given by address."""
    code = FloatCode(builder)
    count = builder.sitofp(width, FLOAT)

    def add(index: Any, sums: list[Any]) -> list[Any]:
        return [builder.fadd(sums[0], code.read(code.at(read, index)))]

    (sums,) = code.loop(width, [code.number(0.0)], add)
    mean = code.splat(builder.fdiv(code.total(sums), count))

    def square(index: Any, sums: list[Any]) -> list[Any]:
        shifted = builder.fsub(code.read(code.at(read, index)), mean)
        return [code.multiply_add(shifted, shifted, sums[0])]

    (squares,) = code.loop(width, [code.number(0.0)], square)
    variance = builder.fdiv(code.total(squares), count)
    root = code.call("llvm.sqrt.f32", FLOAT, builder.fadd(variance, epsilon))
    scale = code.splat(builder.fdiv(FLOAT(1.0), root))

    def apply(index: Any, _: list[Any]) -> list[Any]:
        scaled = builder.fmul(builder.fsub(code.read(code.at(read, index)), mean), scale)
        normed = code.multiply_add(scaled, code.read(code.at(weight, index)), code.read(code.at(bias, index)))
        code.store(normed, code.at(written, index))
        return []

    code.loop(width, [], apply)


@compiled
def layer_norm_rows(
    read: int, rows: int, width: int, weight: int, stride: int, bias: int, epsilon: Any, written: int
) -> None:
    """Write the LayerNorms of ``rows`` contiguous rows of ``width`` numbers.

    ``stride`` is the number of float32 values between the weights of two rows, 0 if all rows have the same weight.
    """
    for row in range(rows):
        at = row * width * ITEM_SIZE
        layer_norm_row(read + at, weight + row * stride * ITEM_SIZE, bias, width, epsilon, written + at)
