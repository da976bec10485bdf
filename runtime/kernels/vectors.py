"""Generates LLVM code over vectors of float32: loops, sums and the exponential.

The order of all operations is written here and not left to a compiler that vectorizes loops, so a number has the same
bits wherever it stands.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

from hdtool.runtime.kernels.memory.raw_memory import WORD
from hdtool.runtime.kernels.vector_code import FLOAT, INDEX, ITEM_SIZE, LANES, VectorCode

VECTOR = ir.VectorType(FLOAT, LANES)
WORDS = ir.VectorType(WORD, LANES)
LOG2_E = 1.44269504088896341
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
"""Their sum is the logarithm of 2; a product of the first with a small integer is exact."""
POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
"""Of the Cephes library: exp(r) is 1 + r + r**2 times this polynomial, for r up to half the logarithm of 2."""
ROUNDING = 12582912.0
"""1.5 * 2**23: a small number added to it is rounded to an integer, which is in the lowest bits of the sum."""
SMALLEST, LARGEST = -87.0, 88.0
"""The exponential is 0 below the first, and that of the second above it."""
ONE_BITS = 127 << 23
"""The bits of 1.0 in float32."""


class FloatCode(VectorCode):
    """Adds instructions on float32 numbers, given by integer addresses, to a function that is being generated."""

    def number(self, value: float) -> Any:
        """A constant in all lanes."""
        return ir.Constant(VECTOR, [value] * LANES)

    def at(self, address: Any, index: Any) -> Any:
        """The address of a float32 by its index."""
        return self.builder.add(address, self.builder.mul(index, INDEX(ITEM_SIZE)))

    def read(self, address: Any, kind: Any = VECTOR) -> Any:
        found = self.builder.load(self.builder.inttoptr(address, kind.as_pointer()))
        found.align = ITEM_SIZE
        return found

    def store(self, value: Any, address: Any) -> None:
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer())).align = ITEM_SIZE

    def exp(self, x: Any) -> Any:
        """The exponential; that of NaN is NaN."""
        builder = self.builder
        vanishes = builder.fcmp_ordered("<", x, self.number(SMALLEST))
        x = builder.select(builder.fcmp_ordered(">", x, self.number(LARGEST)), self.number(LARGEST), x)
        rounded = self.multiply_add(x, self.number(LOG2_E), self.number(ROUNDING))
        power = builder.fsub(rounded, self.number(ROUNDING))
        rest = self.multiply_add(power, self.number(-LN2_HIGH), x)
        rest = self.multiply_add(power, self.number(-LN2_LOW), rest)
        found = self.number(POLYNOMIAL[0])
        for coefficient in POLYNOMIAL[1:]:
            found = self.multiply_add(found, rest, self.number(coefficient))
        found = self.multiply_add(found, builder.fmul(rest, rest), rest)
        found = builder.fadd(found, self.number(1.0))
        shifted = builder.shl(builder.bitcast(rounded, WORDS), ir.Constant(WORDS, [23] * LANES))
        scale = builder.add(shifted, ir.Constant(WORDS, [ONE_BITS] * LANES))
        found = builder.fmul(found, builder.bitcast(scale, VECTOR))
        return builder.select(vanishes, self.number(0.0), found)

    def tanh(self, x: Any) -> Any:
        """The hyperbolic tangent, with the absolute error of the exponential."""
        doubled = self.exp(self.builder.fmul(x, self.number(2.0)))
        part = self.builder.fdiv(self.number(2.0), self.builder.fadd(doubled, self.number(1.0)))
        return self.builder.fsub(self.number(1.0), part)
