"""Generates instructions on vectors of octets: sums of products with the best instruction of the processor.

The results are integers, so they are the same with any of them.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

from hdtool.runtime.kernels.int8.panel_format import PANEL_ROWS, PLANE, QUAD
from hdtool.runtime.kernels.memory.raw_memory import WORD
from hdtool.runtime.kernels.vector_code import FLOAT, OCTET, SHORT, VectorCode, has_feature

FLOATS = ir.VectorType(FLOAT, PANEL_ROWS)
WORDS = ir.VectorType(WORD, PANEL_ROWS)
OCTETS = ir.VectorType(OCTET, PLANE)
SHORTS = ir.VectorType(SHORT, PLANE // 2)
LARGEST_SHORT = (1 << 15) - 1
LARGEST_INPUT = 1 << 7

DOT_OF_OCTETS = "vnni"
"""AVX-VNNI or AVX-512 VNNI: four products are added in 32 bits."""
DOT_OF_PAIRS = "avx2"
"""AVX2: two products are added in 16 bits, which saturate."""
ANY_PROCESSOR = "any"
ADDED_IN_PAIRS, WIDENED_PAIRS = (
    ("llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd")
    if PANEL_ROWS == 8
    else ("llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512")
)


def best_dot() -> str:
    """The instructions that this processor has."""
    if has_feature("avxvnni") or (has_feature("avx512vnni") and has_feature("avx512vl")):
        return DOT_OF_OCTETS
    return DOT_OF_PAIRS if has_feature("avx2") else ANY_PROCESSOR


class IntegerCode(VectorCode):
    """Adds instructions on vectors of a lane for each row of a panel to a function that numba compiles."""

    def __init__(self, builder: Any, dot: str) -> None:
        super().__init__(builder)
        self.dot = dot

    def everywhere(self, number: int, kind: Any = OCTET, lanes: int = PLANE) -> Any:
        """A constant in all lanes."""
        return self.integers([number] * lanes, kind)

    def broadcast(self, address: Any, kind: Any) -> Any:
        """A number of 32 bits in all lanes."""
        return self.splat(self.load(address, kind), PANEL_ROWS)

    def four_octets(self, address: Any) -> Any:
        """Four octets in each lane."""
        return self.builder.bitcast(self.broadcast(address, WORD), OCTETS)

    def scaled(self, weights: Any, factor: Any, added: Any) -> Any:
        return self.call(f"llvm.fmuladd.v{PANEL_ROWS}f32", FLOATS, weights, factor, added)


class DotProduct:
    """The sums, one in each lane, of products of unsigned levels with signed inputs."""

    def __init__(self, code: IntegerCode, largest: int) -> None:
        """``largest`` is that of the levels."""
        self._code, self._builder = code, code.builder
        self._in_16_bits = LARGEST_SHORT // (2 * largest * LARGEST_INPUT)
        """Sums of pairs that can be added in 16 bits."""
        self._pairs: Any = None
        self._added = 0
        self._total: Any = None

    def add(self, levels: Any, inputs: Any) -> None:
        if self._code.dot == DOT_OF_OCTETS:
            before = self._code.everywhere(0, WORD, PANEL_ROWS) if self._total is None else self._total
            words = [self._builder.bitcast(one, WORDS) for one in (levels, inputs)]
            self._total = self._code.call(f"llvm.x86.avx512.vpdpbusd.{8 * PLANE}", WORDS, before, *words)
        elif self._code.dot == DOT_OF_PAIRS:
            pairs = self._code.call(ADDED_IN_PAIRS, SHORTS, levels, inputs)
            self._pairs = pairs if self._pairs is None else self._builder.add(self._pairs, pairs)
            self._added += 1
            if self._added == self._in_16_bits:
                self._widen()
        else:
            self._add_words(self._products(levels, inputs))

    def total(self) -> Any:
        if self._added:
            self._widen()
        return self._total

    def _widen(self) -> None:
        ones = self._code.everywhere(1, SHORT, PLANE // 2)
        self._add_words(self._code.call(WIDENED_PAIRS, WORDS, self._pairs, ones))
        self._pairs, self._added = None, 0

    def _add_words(self, words: Any) -> None:
        self._total = words if self._total is None else self._builder.add(self._total, words)

    def _products(self, levels: Any, inputs: Any) -> Any:
        """The same without an instruction for it; a product of two octets has 16 bits."""
        wide = ir.VectorType(SHORT, PLANE)
        products = self._builder.mul(self._builder.zext(levels, wide), self._builder.sext(inputs, wide))
        products = self._builder.sext(products, ir.VectorType(WORD, PLANE))
        undefined = ir.Constant(products.type, ir.Undefined)
        found = None
        for place in range(QUAD):
            lanes = self._code.integers(list(range(place, PLANE, QUAD)))
            part = self._builder.shuffle_vector(products, undefined, lanes)
            found = part if found is None else self._builder.add(found, part)
        return found
