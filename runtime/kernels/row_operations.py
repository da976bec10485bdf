"""Vectorized operations on rows of float32 numbers: norms, gates, activations and rotations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from hdtool.runtime.kernels.compiled import array_at, compiled, generated
from hdtool.runtime.kernels.matrix_formats import cases
from hdtool.runtime.kernels.vector_code import FLOAT, INDEX, ITEM_SIZE, LANES, FloatCode


def elementwise(compute: Callable[..., Any], inputs: int = 1, factors: int = 0, *, in_place: bool = True) -> Any:
    """Return an intrinsic that writes ``compute(code, *numbers, *factors)`` for the numbers at each index of inputs.

    The intrinsic's arguments are the addresses of the inputs, the number of items in each, which must be a multiple of
    ``LANES``, the factors and the address to write to. With ``in_place``, there is no such address, and the first input
    is overwritten.
    """
    written = () if in_place else (types.int64,)

    @generated(*[types.int64] * (inputs + 1), *[types.float32] * factors, *written)
    def run(builder: Any, *arguments: Any) -> None:
        code = FloatCode(builder)
        read, size = arguments[:inputs], arguments[inputs]
        shared = [code.splat(factor) for factor in arguments[inputs + 1 : inputs + 1 + factors]]
        target = read[0] if in_place else arguments[-1]

        def apply(index: Any, _: list[Any]) -> list[Any]:
            numbers = [code.read(code.at(address, index)) for address in read]
            code.store(compute(code, *numbers, *shared), code.at(target, index))
            return []

        code.loop(size, [], apply)

    return run


def _sum_of_squares(code: FloatCode, read: Any, width: Any) -> Any:
    def square(index: Any, sums: list[Any]) -> list[Any]:
        numbers = code.read(code.at(read, index))
        return [code.multiply_add(numbers, numbers, sums[0])]

    (squares,) = code.loop(width, [code.number(0.0)], square)
    return code.total(squares)


@generated(types.int64, types.int64, types.float32, types.int64, types.float32, types.int64)
def norm_row(builder: Any, read: Any, weight: Any, offset: Any, width: Any, epsilon: Any, written: Any) -> None:
    """Write the RMSNorm of a row, multiplied by ``weight + offset``."""
    code = FloatCode(builder)
    mean = builder.fdiv(_sum_of_squares(code, read, width), builder.sitofp(width, FLOAT))
    root = code.call("llvm.sqrt.f32", FLOAT, builder.fadd(mean, epsilon))
    scale, added = code.splat(builder.fdiv(FLOAT(1.0), root)), code.splat(offset)

    def apply(index: Any, _: list[Any]) -> list[Any]:
        numbers = builder.fmul(code.read(code.at(read, index)), scale)
        factor = builder.fadd(code.read(code.at(weight, index)), added)
        code.store(builder.fmul(numbers, factor), code.at(written, index))
        return []

    code.loop(width, [], apply)


@generated(types.int64, types.int64, types.float32, types.float32, types.int64)
def unit_row(builder: Any, read: Any, width: Any, epsilon: Any, factor: Any, written: Any) -> None:
    """Write ``factor * read / sqrt(sum(read**2) + epsilon)``, which scales a row to the length ``factor``."""
    code = FloatCode(builder)
    root = code.call("llvm.sqrt.f32", FLOAT, builder.fadd(_sum_of_squares(code, read, width), epsilon))
    scale = code.splat(builder.fdiv(factor, root))

    def apply(index: Any, _: list[Any]) -> list[Any]:
        code.store(builder.fmul(code.read(code.at(read, index)), scale), code.at(written, index))
        return []

    code.loop(width, [], apply)


exponentiate = elementwise(lambda code, score, largest: code.exp(code.builder.fsub(score, largest)), factors=1)
"""Computes ``scores = exp(scores - largest)``."""


def _tanh_gelu(code: FloatCode, numbers: Any) -> Any:
    """Return ``x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 * x**3))``, which is tanh GELU.

    This holds because ``(1 + tanh(x)) / 2 == sigmoid(2 * x)``.
    """
    factor = 2 * math.sqrt(2 / math.pi)
    cubed = code.builder.fmul(code.builder.fmul(numbers, numbers), numbers)
    inside = code.multiply_add(cubed, code.number(0.044715), numbers)
    return _times_sigmoid(code, numbers, code.builder.fmul(inside, code.number(factor)))


def _times_sigmoid(code: FloatCode, numbers: Any, exponents: Any) -> Any:
    divisor = code.builder.fadd(code.exp(code.builder.fneg(exponents)), code.number(1.0))
    return code.builder.fdiv(numbers, divisor)


def _silu(code: FloatCode, number: Any) -> Any:
    return _times_sigmoid(code, number, number)


def _exact_gelu(code: FloatCode, number: Any) -> Any:
    """Return the GELU ``x * (1 + erf(x / sqrt(2))) / 2``.

    Numerical Recipes' approximation of ``erfc`` (third edition, section 6.2.2) has a relative error of 1.2e-7.
    """
    builder, one = code.builder, code.number(1.0)
    is_negative = builder.fcmp_ordered("<", number, code.number(0.0))
    size = builder.fmul(builder.select(is_negative, builder.fneg(number), number), code.number(math.sqrt(0.5)))
    fraction = builder.fdiv(one, code.multiply_add(size, code.number(0.5), one))
    exponent = code.number(ERFC[0])
    for coefficient in ERFC[1:]:
        exponent = code.multiply_add(exponent, fraction, code.number(coefficient))
    exponent = builder.fsub(exponent, builder.fmul(size, size))
    tail = builder.fmul(builder.fmul(fraction, code.number(0.5)), code.exp(exponent))
    return builder.fmul(number, builder.select(is_negative, tail, builder.fsub(one, tail)))


ERFC = (
    0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807, -0.18628806, 0.09678418, 0.37409196, 1.00002368,
    -1.26551223,
)  # fmt: skip
"""Coefficients of a polynomial of ``t = 1 / (1 + x / 2)``: ``erfc(x) = t * exp(polynomial(t) - x**2)``."""
silu_of = elementwise(_silu)
"""Computes ``numbers = silu(numbers)``."""
silu_in_place = elementwise(lambda code, gate, up: code.builder.fmul(_silu(code, gate), up), 2)
"""Computes ``gate = silu(gate) * up``."""
multiply_by_sigmoid = elementwise(_times_sigmoid, 2)
"""Computes ``numbers *= sigmoid(gates)``."""


def _clamped_gate(code: FloatCode, gate: Any, up: Any, alpha: Any, limit: Any) -> Any:
    """Return ``(up + 1) * gate * sigmoid(alpha * gate)``, with ``gate <= limit`` and ``up`` clamped to ``±limit``."""
    builder, upper_limit = code.builder, code.splat(limit)
    lower_limit, one = builder.fneg(upper_limit), code.number(1.0)
    gate = builder.select(builder.fcmp_ordered(">", gate, upper_limit), upper_limit, gate)
    up = builder.select(builder.fcmp_ordered(">", up, upper_limit), upper_limit, up)
    up = builder.select(builder.fcmp_ordered("<", up, lower_limit), lower_limit, up)
    divisor = builder.fadd(code.exp(builder.fneg(builder.fmul(gate, code.splat(alpha)))), one)
    return builder.fmul(builder.fadd(up, one), builder.fdiv(gate, divisor))


def _read_pairs(code: FloatCode, pairs: Any, index: Any) -> tuple[Any, Any]:
    """Return two vectors: the first and the second numbers of ``LANES`` pairs, starting with the pair at ``index``."""
    builder, pair = code.builder, code.builder.mul(index, INDEX(2))
    both = [code.read(code.at(pairs, builder.add(pair, INDEX(half * LANES)))) for half in range(2)]
    first, second = (code.integers([2 * lane + half for lane in range(LANES)]) for half in range(2))
    return builder.shuffle_vector(*both, first), builder.shuffle_vector(*both, second)


@generated(*[types.int64] * 2, *[types.float32] * 2, types.int64)
def gate_pairs(builder: Any, pairs: Any, size: Any, alpha: Any, limit: Any, written: Any) -> None:
    """Write ``(up + 1) * gate * sigmoid(alpha * gate)`` for pairs ``[gate, up]`` clamped as in ``_clamped_gate``.

    ``written`` may equal ``pairs``. ``size`` is the number of pairs.
    """
    code = FloatCode(builder)

    def apply(index: Any, _: list[Any]) -> list[Any]:
        code.store(_clamped_gate(code, *_read_pairs(code, pairs, index), alpha, limit), code.at(written, index))
        return []

    code.loop(size, [], apply)


@generated(*[types.int64] * 4, *[types.float32] * 2)
def gate_halves(builder: Any, gate: Any, up: Any, biases: Any, size: Any, alpha: Any, limit: Any) -> None:
    """Add biases to ``gate`` and ``up``, and overwrite ``gate`` with the clamped activation of ``gate_pairs``.

    ``gate`` and ``up`` are separate arrays of ``size`` numbers; ``biases`` holds pairs ``[gate, up]``.
    """
    code = FloatCode(builder)

    def apply(index: Any, _: list[Any]) -> list[Any]:
        gate_bias, up_bias = _read_pairs(code, biases, index)
        gates = builder.fadd(code.read(code.at(gate, index)), gate_bias)
        ups = builder.fadd(code.read(code.at(up, index)), up_bias)
        code.store(_clamped_gate(code, gates, ups, alpha, limit), code.at(gate, index))
        return []

    code.loop(size, [], apply)


add_in_place = elementwise(
    lambda code, sum_, number, factor: code.builder.fadd(sum_, code.builder.fmul(number, factor)), 2, 1
)
"""Computes ``sums += numbers * factor``."""


def _bounded(code: FloatCode, number: Any, cap: Any) -> Any:
    return code.builder.fmul(code.tanh(code.builder.fdiv(number, cap)), cap)


scale_in_place = elementwise(lambda code, number, factor: code.builder.fmul(number, factor), factors=1)
"""Computes ``numbers *= factor``."""
_divide = elementwise(lambda code, number, divisor: code.builder.fdiv(number, divisor), factors=1)
_bound = elementwise(_bounded, factors=1)


SILU, TANH_GELU, EXACT_GELU, SQUARED_RELU = range(4)
ACTIVATIONS = {
    "silu": SILU,
    "gelu_tanh": TANH_GELU,
    "gelu_new": TANH_GELU,
    "gelu": EXACT_GELU,
    "relu2": SQUARED_RELU,
}
"""Numbers that select activations in compiled code, by the activation's name."""


def _squared_relu(code: FloatCode, number: Any) -> Any:
    zero = code.number(0.0)
    positive = code.builder.select(code.builder.fcmp_ordered("<", number, zero), zero, number)
    return code.builder.fmul(positive, positive)


ACTIVATED = {SILU: _silu, TANH_GELU: _tanh_gelu, EXACT_GELU: _exact_gelu, SQUARED_RELU: _squared_relu}


@generated(*[types.int64] * 4)
def _activate(builder: Any, activation: Any, gate: Any, up: Any, size: Any) -> None:
    code = FloatCode(builder)
    has_up = builder.zext(builder.icmp_signed("!=", up, INDEX(0)), up.type)
    kinds = {2 * number + gated: (compute, gated) for number, compute in ACTIVATED.items() for gated in range(2)}
    for _, (compute, is_gated) in cases(builder, builder.add(builder.mul(activation, INDEX(2)), has_up), kinds):

        def apply(index: Any, _: list[Any], compute: Any = compute, is_gated: int = is_gated) -> list[Any]:
            address = code.at(gate, index)
            number = compute(code, code.read(address))
            code.store(builder.fmul(number, code.read(code.at(up, index))) if is_gated else number, address)
            return []

        code.loop(size, [], apply)


@compiled
def activate(activation: int, gate: int, up: int, size: int) -> None:
    """Activate gates in place, and multiply them by the numbers at ``up`` unless ``up`` is 0."""
    _activate(activation, gate, up, size)


@compiled
def scale_columns(numbers_at: int, factors_at: int, columns: int, rows: int) -> None:
    """Multiply each column by its factor, in place."""
    factors = array_at(factors_at, (columns,), types.float32)
    for row in range(rows):
        numbers = array_at(numbers_at + row * columns * ITEM_SIZE, (columns,), types.float32)
        for column in range(columns):
            numbers[column] *= factors[column]


@compiled
def bound_in_place(numbers: int, size: int, divisor: Any, cap: Any) -> None:
    """Divide numbers in place by ``divisor``; if ``cap`` isn't 0, soft-cap them as ``tanh(numbers / cap) * cap``."""
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
    """Apply rotary embedding to a head: write ``read * cos + swapped * sin``.

    ``swapped`` is ``read`` with its halves exchanged; the first half of ``sin`` must be negated.
    """
    code = FloatCode(builder)
    half = builder.lshr(width, ir.Constant(width.type, 1))
    pair = ir.VectorType(FLOAT, ROTARY_LANES)

    def apply(index: Any, _: list[Any]) -> list[Any]:
        partner = builder.add(index, half)
        first, second = (code.read(code.at(read, offset), pair) for offset in (index, partner))
        for offset, number, rotated in ((index, first, second), (partner, second, first)):
            cos_part = builder.fmul(number, code.read(code.at(cos, offset), pair))
            sum_ = builder.fadd(cos_part, builder.fmul(rotated, code.read(code.at(sin, offset), pair)))
            code.store(sum_, code.at(written, offset))
        return []

    code.loop(half, [], apply, ROTARY_LANES)


@generated(*[types.int64] * 5)
def rotate_pairs(builder: Any, read: Any, cos: Any, sin: Any, width: Any, written: Any) -> None:
    """Apply rotary embedding to a head of adjacent pairs; ``sin`` must be negated for the first number of each pair."""
    code = FloatCode(builder)
    swapped = code.integers([lane ^ 1 for lane in range(LANES)])

    def apply(index: Any, _: list[Any]) -> list[Any]:
        numbers = code.read(code.at(read, index))
        rotated = builder.shuffle_vector(numbers, ir.Constant(numbers.type, ir.Undefined), swapped)
        cos_part = builder.fmul(numbers, code.read(code.at(cos, index)))
        sum_ = builder.fadd(cos_part, builder.fmul(rotated, code.read(code.at(sin, index))))
        code.store(sum_, code.at(written, index))
        return []

    code.loop(width, [], apply)


ROTARY_LANES = LANES // 2
"""Number of values rotated at once; it divides half a head's width, as the width is a multiple of ``LANES``."""


@compiled
def norm_rows(read: int, rows: int, width: int, weight: int, offset: Any, epsilon: Any, written: int) -> None:
    """Write the RMSNorm of ``rows`` contiguous float32 rows of ``width`` numbers; see ``norm_row``."""
    for row in range(rows):
        at = row * width * ITEM_SIZE
        norm_row(read + at, weight, offset, width, epsilon, written + at)
