"""The small operators of a decoder layer: RMSNorm, gated units, residuals, rotary positions and bounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from hdtool.runtime.kernels.compiled import compiled, generated
from hdtool.runtime.kernels.memory.raw_memory import array_at
from hdtool.runtime.kernels.vector_code import FLOAT, INDEX, ITEM_SIZE, LANES
from hdtool.runtime.kernels.vectors import FloatCode


@generated(types.int64, types.int64, types.float32, types.int64, types.float32, types.int64)
def norm_row(builder: Any, read: Any, weight: Any, offset: Any, width: Any, epsilon: Any, written: Any) -> None:
    """RMSNorm of one row, times ``weight + offset``."""
    code = FloatCode(builder)

    def square(index: Any, sums: list[Any]) -> list[Any]:
        numbers = code.read(code.at(read, index))
        return [code.multiply_add(numbers, numbers, sums[0])]

    (squares,) = code.loop(width, [code.number(0.0)], square)
    mean = builder.fdiv(code.total(squares), builder.sitofp(width, FLOAT))
    root = code.call("llvm.sqrt.f32", FLOAT, builder.fadd(mean, epsilon))
    scale, added = code.splat(builder.fdiv(FLOAT(1.0), root)), code.splat(offset)

    def apply(index: Any, _: list[Any]) -> list[Any]:
        numbers = builder.fmul(code.read(code.at(read, index)), scale)
        factor = builder.fadd(code.read(code.at(weight, index)), added)
        code.store(builder.fmul(numbers, factor), code.at(written, index))
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


def _gated(sigmoid_of: Callable[[FloatCode, Any], Any]) -> Any:
    """An intrinsic for a unit whose activation is its input times the sigmoid of a function of it."""

    @generated(*[types.int64] * 3)
    def gate_in_place(builder: Any, gate: Any, up: Any, size: Any) -> None:
        code = FloatCode(builder)

        def apply(index: Any, _: list[Any]) -> list[Any]:
            numbers = code.read(code.at(gate, index))
            divisor = builder.fadd(code.exp(builder.fneg(sigmoid_of(code, numbers))), code.number(1.0))
            found = builder.fmul(builder.fdiv(numbers, divisor), code.read(code.at(up, index)))
            code.store(found, code.at(gate, index))
            return []

        code.loop(size, [], apply)

    return gate_in_place


def _twice_inside_tanh(code: FloatCode, numbers: Any) -> Any:
    """``2 * sqrt(2 / pi) * (x + 0.044715 * x**3)``: half of one more than a tanh is the sigmoid of twice its input."""
    factor = 2 * math.sqrt(2 / math.pi)
    cubed = code.builder.fmul(code.builder.fmul(numbers, numbers), numbers)
    inside = code.multiply_add(cubed, code.number(0.044715), numbers)
    return code.builder.fmul(inside, code.number(factor))


silu_in_place = _gated(lambda code, numbers: numbers)
"""``gate = silu(gate) * up``"""
gelu_in_place = _gated(_twice_inside_tanh)
"""``gate = gelu(gate) * up``, the GELU by tanh."""


@generated(*[types.int64] * 2, *[types.float32] * 2, types.int64)
def gate_pairs(builder: Any, pairs: Any, size: Any, alpha: Any, limit: Any, written: Any) -> None:
    """``written = (up + 1) * gate * sigmoid(alpha * gate)`` of bounded pairs ``[gate, up]``; in place, or elsewhere."""
    code = FloatCode(builder)
    factor, most = code.splat(alpha), code.splat(limit)
    least, one = builder.fneg(most), code.number(1.0)
    halves = [code.integers([2 * lane + half for lane in range(LANES)]) for half in range(2)]

    def apply(index: Any, _: list[Any]) -> list[Any]:
        first = builder.mul(index, INDEX(2))
        both = [code.read(code.at(pairs, builder.add(first, INDEX(half * LANES)))) for half in range(2)]
        gate, up = (builder.shuffle_vector(*both, half) for half in halves)
        gate = builder.select(builder.fcmp_ordered(">", gate, most), most, gate)
        up = builder.select(builder.fcmp_ordered(">", up, most), most, up)
        up = builder.select(builder.fcmp_ordered("<", up, least), least, up)
        divisor = builder.fadd(code.exp(builder.fneg(builder.fmul(gate, factor))), one)
        found = builder.fmul(builder.fadd(up, one), builder.fdiv(gate, divisor))
        code.store(found, code.at(written, index))
        return []

    code.loop(size, [], apply)


@generated(*[types.int64] * 3, types.float32)
def add_in_place(builder: Any, sums: Any, numbers: Any, size: Any, factor: Any) -> None:
    """``sums += numbers * factor``"""
    code = FloatCode(builder)
    by = code.splat(factor)

    def apply(index: Any, _: list[Any]) -> list[Any]:
        place = code.at(sums, index)
        added = builder.fmul(code.read(code.at(numbers, index)), by)
        code.store(builder.fadd(code.read(place), added), place)
        return []

    code.loop(size, [], apply)


def _changed(change: Callable[[FloatCode, Any, Any], Any]) -> Any:
    """An intrinsic that changes numbers in place, each by itself and a factor that all have in common."""

    @generated(*[types.int64] * 2, types.float32)
    def change_in_place(builder: Any, numbers: Any, size: Any, factor: Any) -> None:
        code = FloatCode(builder)
        by = code.splat(factor)

        def apply(index: Any, _: list[Any]) -> list[Any]:
            place = code.at(numbers, index)
            code.store(change(code, code.read(place), by), place)
            return []

        code.loop(size, [], apply)

    return change_in_place


def _bounded(code: FloatCode, number: Any, cap: Any) -> Any:
    return code.builder.fmul(code.tanh(code.builder.fdiv(number, cap)), cap)


scale_in_place = _changed(lambda code, number, factor: code.builder.fmul(number, factor))
"""``numbers *= factor``"""
_divide = _changed(lambda code, number, divisor: code.builder.fdiv(number, divisor))
_bound = _changed(_bounded)


@compiled
def bound_in_place(numbers: int, size: int, divisor: Any, cap: Any) -> None:
    """``numbers /= divisor``, and where there is a ``cap``, ``numbers = tanh(numbers / cap) * cap``."""
    whole = size // LANES * LANES
    _divide(numbers, whole, divisor)
    if cap:
        _bound(numbers, whole, cap)
    rest = array_at(numbers + whole * ITEM_SIZE, (size - whole,), types.float32)
    for index in range(len(rest)):
        rest[index] /= divisor
        if cap:
            rest[index] = np.tanh(rest[index] / cap) * cap


@generated(*[types.int64] * 5)
def rotate_head(builder: Any, read: Any, cos: Any, sin: Any, width: Any, written: Any) -> None:
    """The rotary position of one head: ``read * cos + (second half, first half) * sin``"""
    code = FloatCode(builder)
    half = builder.lshr(width, ir.Constant(width.type, 1))
    pair = ir.VectorType(FLOAT, ROTATED)

    def apply(index: Any, _: list[Any]) -> list[Any]:
        other = builder.add(index, half)
        first, second = (code.read(code.at(read, place), pair) for place in (index, other))
        for place, own, turned in ((index, first, second), (other, second, first)):
            product = builder.fmul(own, code.read(code.at(cos, place), pair))
            sum_ = builder.fadd(product, builder.fmul(turned, code.read(code.at(sin, place), pair)))
            code.store(sum_, code.at(written, place))
        return []

    code.loop(half, [], apply, ROTATED)


@generated(*[types.int64] * 5)
def rotate_pairs(builder: Any, read: Any, cos: Any, sin: Any, width: Any, written: Any) -> None:
    """That of a head whose pairs are numbers side by side."""
    code = FloatCode(builder)
    swapped = code.integers([lane ^ 1 for lane in range(LANES)])

    def apply(index: Any, _: list[Any]) -> list[Any]:
        own = code.read(code.at(read, index))
        turned = builder.shuffle_vector(own, ir.Constant(own.type, ir.Undefined), swapped)
        product = builder.fmul(own, code.read(code.at(cos, index)))
        sum_ = builder.fadd(product, builder.fmul(turned, code.read(code.at(sin, index))))
        code.store(sum_, code.at(written, index))
        return []

    code.loop(width, [], apply)


ROTATED = LANES // 2
"""Numbers that are rotated at once: the width of a head is a multiple of the lanes of a vector, half of it of this."""


@compiled
def norm_rows(read: int, rows: int, width: int, weight: int, offset: Any, epsilon: Any, written: int) -> None:
    """RMSNorm of each row of ``width`` numbers; addresses of float32, rows one after another."""
    for row in range(rows):
        at = row * width * ITEM_SIZE
        norm_row(read + at, weight, offset, width, epsilon, written + at)
