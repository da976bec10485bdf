"""The small operators of a decoder layer: RMSNorm, the gated unit, residuals and rotary positions."""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from hdtool.runtime.kernels.compiled import compiled, generated
from hdtool.runtime.kernels.vector_code import FLOAT, ITEM_SIZE, LANES
from hdtool.runtime.kernels.vectors import FloatCode


@generated(types.int64, types.int64, types.int64, types.float32, types.int64)
def norm_row(builder: Any, read: Any, weight: Any, width: Any, epsilon: Any, written: Any) -> None:
    """RMSNorm of one row."""
    code = FloatCode(builder)

    def square(index: Any, sums: list[Any]) -> list[Any]:
        numbers = code.read(code.at(read, index))
        return [code.multiply_add(numbers, numbers, sums[0])]

    (squares,) = code.loop(width, [code.number(0.0)], square)
    mean = builder.fdiv(code.total(squares), builder.sitofp(width, FLOAT))
    root = code.call("llvm.sqrt.f32", FLOAT, builder.fadd(mean, epsilon))
    scale = code.splat(builder.fdiv(FLOAT(1.0), root))

    def apply(index: Any, _: list[Any]) -> list[Any]:
        numbers = builder.fmul(code.read(code.at(read, index)), scale)
        code.store(builder.fmul(numbers, code.read(code.at(weight, index))), code.at(written, index))
        return []

    code.loop(width, [], apply)


@generated(types.int64, types.int64, types.float32)
def exponentiate(builder: Any, scores: Any, count: Any, largest: Any) -> None:
    """``scores = exp(scores - largest)``; the count is a multiple of the lanes of a vector."""
    code = FloatCode(builder)
    top = code.splat(largest)

    def apply(index: Any, _: list[Any]) -> list[Any]:
        place = code.at(scores, index)
        code.store(code.exp(builder.fsub(code.read(place), top)), place)
        return []

    code.loop(count, [], apply)


@generated(*[types.int64] * 3)
def gate_in_place(builder: Any, gate: Any, up: Any, size: Any) -> None:
    """``gate = silu(gate) * up``"""
    code = FloatCode(builder)

    def apply(index: Any, _: list[Any]) -> list[Any]:
        numbers = code.read(code.at(gate, index))
        divisor = builder.fadd(code.exp(builder.fneg(numbers)), code.number(1.0))
        found = builder.fmul(builder.fdiv(numbers, divisor), code.read(code.at(up, index)))
        code.store(found, code.at(gate, index))
        return []

    code.loop(size, [], apply)


@generated(*[types.int64] * 3)
def add_in_place(builder: Any, sums: Any, numbers: Any, size: Any) -> None:
    """``sums += numbers``"""
    code = FloatCode(builder)

    def apply(index: Any, _: list[Any]) -> list[Any]:
        place = code.at(sums, index)
        code.store(builder.fadd(code.read(place), code.read(code.at(numbers, index))), place)
        return []

    code.loop(size, [], apply)


@generated(*[types.int64] * 5)
def rotate_head(builder: Any, read: Any, cos: Any, sin: Any, width: Any, written: Any) -> None:
    """The rotary position of one head: ``read * cos + (-second half, first half) * sin``"""
    code = FloatCode(builder)
    half = builder.lshr(width, ir.Constant(width.type, 1))
    pair = ir.VectorType(FLOAT, ROTATED)

    def apply(index: Any, _: list[Any]) -> list[Any]:
        other = builder.add(index, half)
        first, second = (code.read(code.at(read, place), pair) for place in (index, other))
        for place, own, turned in ((index, first, builder.fneg(second)), (other, second, first)):
            product = builder.fmul(own, code.read(code.at(cos, place), pair))
            sum_ = builder.fadd(product, builder.fmul(turned, code.read(code.at(sin, place), pair)))
            code.store(sum_, code.at(written, place))
        return []

    code.loop(half, [], apply, ROTATED)


ROTATED = LANES // 2
"""Numbers that are rotated at once: the width of a head is a multiple of the lanes of a vector, half of it of this."""


@compiled
def norm_rows(read: int, rows: int, width: int, weight: int, epsilon: Any, written: int) -> None:
    """RMSNorm of each row of ``width`` numbers; addresses of float32, rows one after another."""
    for row in range(rows):
        offset = row * width * ITEM_SIZE
        norm_row(read + offset, weight, width, epsilon, written + offset)
