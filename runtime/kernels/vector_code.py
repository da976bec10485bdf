"""LLVM code generation for vectors of this processor's register size.

The order of operations is explicit, not left to a vectorizing compiler, so a result is bitwise independent of its
position in a row.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from platform import machine
from typing import Any

from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba.core import cgutils

from hdtool.runtime.kernels.compiled import BYTES, WORD, compiled

FLOAT = ir.FloatType()
HALF = ir.HalfType()
SHORT = ir.IntType(16)
OCTET = ir.IntType(8)
INDEX = ir.IntType(64)
ITEM_SIZE = 4
"""Size of a float32 in bytes."""
CACHE_LINE = 64
"""Size of a cache line in bytes."""


@compiled
def line_after(address: int) -> int:
    """Round an address up to the start of a cache line; a vector that crosses a line takes two loads."""
    return (address + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE


def has_feature(feature: str) -> bool:
    """Return True if the processor has the feature with this LLVM name."""
    try:
        return bool(binding.get_host_cpu_features().get(feature))
    except RuntimeError:  # LLVM cannot detect features on some processors
        return False


def l1_bytes() -> int:
    """Return the size of a core's L1 data cache as the system reports it, or else 48 KiB."""
    try:
        size = os.sysconf("SC_LEVEL1_DCACHE_SIZE")
    except (AttributeError, OSError, ValueError):  # only Linux with glibc reports it
        size = 0
    return size if size > 0 else 48 * 1024


def _name_of_cpu() -> str:
    try:
        return str(binding.get_host_cpu_name())
    except RuntimeError:
        return ""


CPU = _name_of_cpu()
"""LLVM's name for this processor."""
EXPANDS_FLOAT16 = has_feature("f16c") or has_feature("avx512f") or machine().lower() in ("aarch64", "arm64")
"""True if the processor converts float16; on others LLVM calls a library function that may be missing."""
PAUSE = "llvm.x86.sse2.pause" if has_feature("sse2") else None
"""Intrinsic for a spin-wait hint; None if there is none."""
LANES = 16 if has_feature("avx512f") else 8 if has_feature("avx") else 4
"""Number of float32 lanes of a vector register."""


TABLE_SIZE = 16
LOOK_UP_ARM = "llvm.aarch64.neon.tbl1.v16i8"
LOOK_UP_X86 = {16: "llvm.x86.ssse3.pshuf.b.128", 32: "llvm.x86.avx2.pshuf.b", 64: "llvm.x86.avx512.pshuf.b.512"}
"""Byte-shuffle intrinsics by register size in bytes."""
LOOK_UP = LOOK_UP_ARM if machine().lower() in ("aarch64", "arm64") else LOOK_UP_X86[16] if has_feature("avx") else None
"""Intrinsic that looks up 16 bytes in a table of 16; None if the processor has none."""


class VectorCode:
    """Emits instructions on vectors of ``LANES`` numbers into a function that numba compiles."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        self.vector = ir.VectorType(FLOAT, LANES)
        self.words = ir.VectorType(WORD, LANES)

    def call(self, name: str, result: Any, *arguments: Any) -> Any:
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)  # type: ignore[no-untyped-call]
        return self.builder.call(function, arguments)

    def load(self, address: Any, kind: Any, align: int = 1) -> Any:
        loaded = self.builder.load(self.builder.bitcast(address, kind.as_pointer()))
        loaded.align = align
        return loaded

    def gep(self, address: Any, count: int | Any) -> Any:
        """Return the address of the item ``count`` items after ``address``."""
        return self.builder.gep(address, [INDEX(count) if isinstance(count, int) else count])

    def splat(self, number: Any, lanes: int = LANES) -> Any:
        """Broadcast a number to all lanes."""
        undefined = ir.Constant(ir.VectorType(number.type, lanes), ir.Undefined)
        first = self.builder.insert_element(undefined, number, WORD(0))
        return self.lane(first, 0, lanes)

    def lane(self, vector: Any, index: int, lanes: int = LANES) -> Any:
        """Broadcast one lane of a vector to all lanes."""
        undefined = ir.Constant(vector.type, ir.Undefined)
        return self.builder.shuffle_vector(vector, undefined, self.integers([index] * lanes))

    def part(self, vector: Any, first: int, lanes: int) -> Any:
        """Return ``lanes`` lanes of a vector, starting at ``first``."""
        undefined = ir.Constant(vector.type, ir.Undefined)
        return self.builder.shuffle_vector(vector, undefined, self.integers(list(range(first, first + lanes))))

    def lookup(
        self, table: Sequence[int], indices: Any, instruction: str | None = LOOK_UP, size: int = TABLE_SIZE
    ) -> Any:
        """Look up 4-bit indices in a table of 16 bytes; ``size`` is the instruction's register size in bytes."""
        if instruction is None:
            return self._selected(table, indices)
        octets = self.integers([number % 256 for number in table] * (size // TABLE_SIZE), OCTET)
        vectors = [
            self.call(instruction, octets.type, octets, self.part(indices, first, size))
            for first in range(0, indices.type.count, size)
        ]
        while len(vectors) > 1:
            vectors = [self.concatenate(*pair) for pair in zip(vectors[::2], vectors[1::2], strict=True)]
        return vectors[0]

    def _selected(self, table: Sequence[int], indices: Any) -> Any:
        """Look up indices without a table instruction: each index bit halves the candidates."""
        lanes = indices.type.count
        candidates = [self.integers([number % 256] * lanes, OCTET) for number in table]
        for bit in range(len(table).bit_length() - 1):
            masked = self.builder.and_(indices, self.integers([1 << bit] * lanes, OCTET))
            is_set = self.builder.icmp_unsigned("!=", masked, self.integers([0] * lanes, OCTET))
            candidates = [
                self.builder.select(is_set, *pair) for pair in zip(candidates[1::2], candidates[::2], strict=True)
            ]
        return candidates[0]

    def concatenate(self, first: Any, second: Any) -> Any:
        """Concatenate two vectors."""
        return self.builder.shuffle_vector(first, second, self.integers(list(range(2 * first.type.count))))

    def integers(self, numbers: list[int], kind: Any = WORD) -> Any:
        return ir.Constant(ir.VectorType(kind, len(numbers)), numbers)

    def every(self, number: int) -> Any:
        """Return a vector with a constant integer in all lanes."""
        return self.integers([number] * LANES)

    def multiply_add(self, weights: Any, factor: Any, added: Any) -> Any:
        return self.call(f"llvm.fmuladd.v{LANES}f32", self.vector, weights, factor, added)

    def total(self, vector: Any) -> Any:
        """Sum all lanes in a fixed order."""
        return self.reduce(vector, self.builder.fadd)

    def sums_of(self, vectors: Sequence[Any]) -> Any:
        """Return a vector with the totals of ``LANES`` vectors, summed in the same order as in ``total``."""
        vectors, count = list(vectors), LANES
        while count > 1:
            count //= 2
            first, second = [], []
            for lane in range(LANES):
                # The lower half of a lane group comes from the first vector, the upper half from the second.
                group, position = lane // (2 * count), lane % (2 * count)
                base = 2 * count * group + position % count + (LANES if position >= count else 0)
                first.append(base)
                second.append(base + count)
            pairs = range(len(vectors) // 2)
            vectors = [
                self.builder.fadd(
                    *(
                        self.builder.shuffle_vector(vectors[pair], vectors[pair + len(pairs)], self.integers(lanes))
                        for lanes in (first, second)
                    )
                )
                for pair in pairs
            ]
        return vectors[0]

    def reduce(self, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """Reduce a vector to one number by repeatedly combining its halves."""
        lanes = vector.type.count
        while lanes > 1:
            lanes //= 2
            vector = combine(self.part(vector, 0, lanes), self.part(vector, lanes, lanes))
        return self.builder.extract_element(vector, WORD(0))

    def prefetch(self, address: Any, *, nearest: bool = False) -> None:
        """Prefetch a cache line for reading, into L1 if ``nearest`` is True and into L2 otherwise."""
        level = WORD(3 if nearest else 2)
        self.call("llvm.prefetch.p0", ir.VoidType(), self.builder.bitcast(address, BYTES), WORD(0), level, WORD(1))

    def loop(
        self, count: Any, carried: Sequence[Any], body: Callable[[Any, list[Any]], Sequence[Any]], step: int = LANES
    ) -> list[Any]:
        """Generate a loop over ``range(0, count, step)``; return the final values of ``carried``.

        ``body`` generates the next values from an index and the current values, which start as ``carried``.
        """
        builder = self.builder
        before = builder.block
        inside, after = builder.append_basic_block("inside"), builder.append_basic_block("after")
        builder.cbranch(builder.icmp_signed("<", INDEX(0), count), inside, after)
        builder.position_at_end(inside)
        index = builder.phi(INDEX)
        values = [builder.phi(value.type) for value in carried]
        next_values = list(body(index, list(values)))
        last = builder.block
        next_index = builder.add(index, INDEX(step))
        for phi, first, value in zip([index, *values], [INDEX(0), *carried], [next_index, *next_values], strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(value, last)
        builder.cbranch(builder.icmp_signed("<", next_index, count), inside, after)
        builder.position_at_end(after)
        ends = [builder.phi(value.type) for value in carried]
        for phi, first, value in zip(ends, carried, next_values, strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(value, last)
        return ends


VECTOR = ir.VectorType(FLOAT, LANES)
WORDS = ir.VectorType(WORD, LANES)
LOG2_E = 1.44269504088896341
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
"""Two parts that sum to log(2); multiplying LN2_HIGH by a small integer is exact."""
POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
"""Coefficients from the Cephes library: for ``abs(r) <= log(2) / 2``, ``exp(r) = 1 + r + r**2 * polynomial(r)``."""
ROUNDING = 12582912.0
"""1.5 * 2**23; adding it rounds a small number to an integer, which is then in the lowest bits of the sum."""
EXP_UNDERFLOW, EXP_OVERFLOW = -87.0, 88.0
"""Below EXP_UNDERFLOW, exp returns 0; inputs above EXP_OVERFLOW are clamped to it."""
ONE_BITS = 127 << 23
"""Bits of 1.0 in float32."""


class FloatCode(VectorCode):
    """Emits instructions on float32 numbers at integer memory addresses."""

    def number(self, value: float) -> Any:
        """Return a vector with a constant in all lanes."""
        return ir.Constant(VECTOR, [value] * LANES)

    def at(self, address: Any, index: Any) -> Any:
        """Return the address of the float32 ``index`` numbers after ``address``."""
        return self.builder.add(address, self.builder.mul(index, INDEX(ITEM_SIZE)))

    def read(self, address: Any, kind: Any = VECTOR) -> Any:
        loaded = self.builder.load(self.builder.inttoptr(address, kind.as_pointer()))
        loaded.align = ITEM_SIZE
        return loaded

    def store(self, value: Any, address: Any) -> None:
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer())).align = ITEM_SIZE

    def exp(self, x: Any) -> Any:
        """Return the exponential of each lane; NaN stays NaN."""
        builder = self.builder
        vanishes = builder.fcmp_ordered("<", x, self.number(EXP_UNDERFLOW))
        x = builder.select(builder.fcmp_ordered(">", x, self.number(EXP_OVERFLOW)), self.number(EXP_OVERFLOW), x)
        rounded = self.multiply_add(x, self.number(LOG2_E), self.number(ROUNDING))
        power = builder.fsub(rounded, self.number(ROUNDING))
        rest = self.multiply_add(power, self.number(-LN2_HIGH), x)
        rest = self.multiply_add(power, self.number(-LN2_LOW), rest)
        result = self.number(POLYNOMIAL[0])
        for coefficient in POLYNOMIAL[1:]:
            result = self.multiply_add(result, rest, self.number(coefficient))
        result = self.multiply_add(result, builder.fmul(rest, rest), rest)
        result = builder.fadd(result, self.number(1.0))
        shifted = builder.shl(builder.bitcast(rounded, WORDS), ir.Constant(WORDS, [23] * LANES))
        scale = builder.add(shifted, ir.Constant(WORDS, [ONE_BITS] * LANES))
        result = builder.fmul(result, builder.bitcast(scale, VECTOR))
        return builder.select(vanishes, self.number(0.0), result)

    def tanh(self, x: Any) -> Any:
        """Return the hyperbolic tangent of each lane; its absolute error is about the relative error of ``exp``."""
        doubled = self.exp(self.builder.fmul(x, self.number(2.0)))
        part = self.builder.fdiv(self.number(2.0), self.builder.fadd(doubled, self.number(1.0)))
        return self.builder.fsub(self.number(1.0), part)
