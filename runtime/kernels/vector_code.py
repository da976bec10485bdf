"""What generated vector code needs: the registers of this processor, and a builder of LLVM instructions for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from platform import machine
from typing import Any

from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba.core import cgutils

from hdtool.runtime.kernels.memory.raw_memory import BYTES, WORD

FLOAT = ir.FloatType()
HALF = ir.HalfType()
SHORT = ir.IntType(16)
OCTET = ir.IntType(8)
INDEX = ir.IntType(64)
ITEM_SIZE = 4
"""Bytes of a float32."""
CACHE_LINE = 64
"""Bytes."""


def has_feature(feature: str) -> bool:
    """Whether this processor has an extension, by the name that LLVM has for it."""
    try:
        return bool(binding.get_host_cpu_features().get(feature))
    except RuntimeError:  # unsupported on some processors
        return False


def _name_of_cpu() -> str:
    try:
        return str(binding.get_host_cpu_name())
    except RuntimeError:
        return ""


CPU = _name_of_cpu()
"""The name that LLVM has for this kind of processor."""
EXPANDS_FLOAT16 = has_feature("f16c") or has_feature("avx512f") or machine().lower() in ("aarch64", "arm64")
"""Whether the processor converts float16; elsewhere the compiler calls a function of a library that may be missing."""
PAUSE = "llvm.x86.sse2.pause" if has_feature("sse2") else None
"""The instruction that a thread executes while it waits."""
LANES = 16 if has_feature("avx512f") else 8 if has_feature("avx") else 4
"""Numbers in a vector register."""


TABLE_SIZE = 16
LOOK_UP_ARM = "llvm.aarch64.neon.tbl1.v16i8"
LOOK_UP_X86 = {16: "llvm.x86.ssse3.pshuf.b.128", 32: "llvm.x86.avx2.pshuf.b", 64: "llvm.x86.avx512.pshuf.b.512"}
"""By the bytes of its registers."""
LOOK_UP = LOOK_UP_ARM if machine().lower() in ("aarch64", "arm64") else LOOK_UP_X86[16] if has_feature("avx") else None
"""The instruction that takes 16 octets from a table of 16; None where there is none that is known."""


class VectorCode:
    """Adds instructions on vectors of ``LANES`` numbers to a function that numba compiles."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        self.vector = ir.VectorType(FLOAT, LANES)
        self.words = ir.VectorType(WORD, LANES)

    def call(self, name: str, result: Any, *arguments: Any) -> Any:
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)  # type: ignore[no-untyped-call]
        return self.builder.call(function, arguments)

    def load(self, address: Any, kind: Any, align: int = 1) -> Any:
        found = self.builder.load(self.builder.bitcast(address, kind.as_pointer()))
        found.align = align
        return found

    def after(self, address: Any, count: int | Any) -> Any:
        """The address ``count`` items later."""
        return self.builder.gep(address, [INDEX(count) if isinstance(count, int) else count])

    def splat(self, number: Any, lanes: int = LANES) -> Any:
        """A number in all lanes."""
        undefined = ir.Constant(ir.VectorType(number.type, lanes), ir.Undefined)
        first = self.builder.insert_element(undefined, number, WORD(0))
        return self.lane(first, 0, lanes)

    def lane(self, vector: Any, place: int, lanes: int = LANES) -> Any:
        """One number of a vector in all lanes."""
        undefined = ir.Constant(vector.type, ir.Undefined)
        return self.builder.shuffle_vector(vector, undefined, self.integers([place] * lanes))

    def part(self, vector: Any, first: int, lanes: int) -> Any:
        """Some lanes of a vector."""
        undefined = ir.Constant(vector.type, ir.Undefined)
        return self.builder.shuffle_vector(vector, undefined, self.integers(list(range(first, first + lanes))))

    def looked_up(
        self, table: Sequence[int], indices: Any, instruction: str | None = LOOK_UP, size: int = TABLE_SIZE
    ) -> Any:
        """Octets of a table of 16, at indices of four bits; ``size`` is that of the instruction's registers."""
        if instruction is None:
            return self._selected(table, indices)
        octets = self.integers([number % 256 for number in table] * (size // TABLE_SIZE), OCTET)
        found = [
            self.call(instruction, octets.type, octets, self.part(indices, first, size))
            for first in range(0, indices.type.count, size)
        ]
        while len(found) > 1:
            found = [self.joined(*pair) for pair in zip(found[::2], found[1::2], strict=True)]
        return found[0]

    def _selected(self, table: Sequence[int], indices: Any) -> Any:
        """The same without an instruction for it: each bit of an index halves what is left of the table."""
        lanes = indices.type.count
        left = [self.integers([number % 256] * lanes, OCTET) for number in table]
        for bit in range(len(table).bit_length() - 1):
            one = self.builder.and_(indices, self.integers([1 << bit] * lanes, OCTET))
            is_set = self.builder.icmp_unsigned("!=", one, self.integers([0] * lanes, OCTET))
            left = [self.builder.select(is_set, *pair) for pair in zip(left[1::2], left[::2], strict=True)]
        return left[0]

    def joined(self, first: Any, second: Any) -> Any:
        """The lanes of two vectors, one vector's after the other's."""
        return self.builder.shuffle_vector(first, second, self.integers(list(range(2 * first.type.count))))

    def integers(self, numbers: list[int], kind: Any = WORD) -> Any:
        return ir.Constant(ir.VectorType(kind, len(numbers)), numbers)

    def every(self, number: int) -> Any:
        """A constant integer in all lanes."""
        return self.integers([number] * LANES)

    def multiply_add(self, weights: Any, factor: Any, added: Any) -> Any:
        return self.call(f"llvm.fmuladd.v{LANES}f32", self.vector, weights, factor, added)

    def total(self, vector: Any) -> Any:
        """The sum of all lanes, always in the same order."""
        return self.folded(vector, self.builder.fadd)

    def sums_of(self, vectors: Sequence[Any]) -> Any:
        """The sums of as many vectors as there are lanes, one in each lane, added as ``total`` adds them."""
        vectors, count = list(vectors), LANES
        while count > 1:
            count //= 2
            first, second = [], []
            for lane in range(LANES):
                # The lower half of a group of lanes is of the first vector, the upper half of the second one.
                group, place = lane // (2 * count), lane % (2 * count)
                base = 2 * count * group + place % count + (LANES if place >= count else 0)
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

    def folded(self, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """One number of a vector: its halves are combined until one is left."""
        lanes = vector.type.count
        while lanes > 1:
            lanes //= 2
            vector = combine(self.part(vector, 0, lanes), self.part(vector, lanes, lanes))
        return self.builder.extract_element(vector, WORD(0))

    def prefetch(self, address: Any, *, nearest: bool = False) -> None:
        """Fetch a cache line to read, into L2, or into L1 where it has room for it."""
        level = WORD(3 if nearest else 2)
        self.call("llvm.prefetch.p0", ir.VoidType(), self.builder.bitcast(address, BYTES), WORD(0), level, WORD(1))

    def loop(
        self, count: Any, carried: Sequence[Any], body: Callable[[Any, list[Any]], Sequence[Any]], step: int = LANES
    ) -> list[Any]:
        """A loop over indices below ``count`` in steps; ``body`` makes the next values from an index and the last."""
        builder = self.builder
        before = builder.block
        inside, after = builder.append_basic_block("inside"), builder.append_basic_block("after")
        builder.cbranch(builder.icmp_signed("<", INDEX(0), count), inside, after)
        builder.position_at_end(inside)
        index = builder.phi(INDEX)
        values = [builder.phi(value.type) for value in carried]
        made = list(body(index, list(values)))
        last = builder.block
        following = builder.add(index, INDEX(step))
        for phi, first, value in zip([index, *values], [INDEX(0), *carried], [following, *made], strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(value, last)
        builder.cbranch(builder.icmp_signed("<", following, count), inside, after)
        builder.position_at_end(after)
        ends = [builder.phi(value.type) for value in carried]
        for phi, first, value in zip(ends, carried, made, strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(value, last)
        return ends
