"""Generates code for integer dot products with the processor's best instruction; defines the formats of weight panels.

A panel stores the weights of ``PANEL_ROWS`` rows in parts of 32 columns: first the lowest four bits of each level, with
four columns of a row per lane, then the remaining bits. The weights of a part are ``scale * (level - offset) +
minimum``, with the block's scale and minimum. Integer dot products are exact, so every instruction gives equal results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from platform import machine
from typing import Any

from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba.core.registry import cpu_target

from hdtool.runtime.kernels.compiled import WORD
from hdtool.runtime.kernels.matrix_formats import VALUE_TABLES, BlockFormat
from hdtool.runtime.kernels.vector_code import FLOAT, LOOK_UP_ARM, LOOK_UP_X86, OCTET, SHORT, VectorCode, has_feature

PANEL_ROWS = 16 if has_feature("avx512bw") else 8
"""Rows in a panel: the number of 32-bit lanes in the widest vector registers whose bytes can be multiplied.

Panels are never stored in files, so they may differ between processors.
"""
PART = 32
"""Number of columns in a part."""
QUAD = 4
"""Number of columns per lane, because dot-product instructions sum the products of four bytes."""
QUADS = PART // QUAD
PLANE = PANEL_ROWS * QUAD
"""Size in bytes of a vector with one quad for each row of a panel."""
LOW_BITS = 4
"""Number of low bits of a level, which are stored separately from its higher bits."""
EXPONENT_SIZE, HALF_SIZE, FLOAT_SIZE = 1, 2, 4


@dataclass(frozen=True)
class PanelFormat:
    """Memory layout of a panel."""

    high_bits: int
    """Number of bits in a level beyond the lowest four."""
    offset: int = 0
    """Subtracted from each stored level, which is unsigned, to get the weight's integer."""
    has_minima: bool = False
    parts: int = 1
    """Number of parts that share a header of scales."""
    scales: int = 1
    """Number of scales per row of a part: one for all columns, or one for each half."""
    has_factors: bool = False
    """True if each part has integers that multiply the scales and minima of its header."""
    scale_size: int = HALF_SIZE
    """Size in bytes of a scale in the header: an exponent, a float16 or a float32."""
    table: tuple[int, ...] = ()
    """Maps four-bit codes to levels; empty if the codes are the levels."""

    @property
    def level_bits(self) -> int:
        return max(self.table).bit_length() if self.table else LOW_BITS + self.high_bits

    @property
    def header(self) -> int:
        """Size in bytes of a header, which holds each row's scale, followed by each row's minimum, if any."""
        return self.scale_size * PANEL_ROWS * (1 + self.has_minima)

    @property
    def octets(self) -> int:
        """Size of a part's factors in bytes."""
        return PANEL_ROWS * (self.scales + self.has_minima) if self.has_factors else 0

    @property
    def part(self) -> int:
        """Size of a part in bytes."""
        return self.octets + PLANE * (QUADS // 2 + self.high_bits)

    @property
    def group(self) -> int:
        """Size of a header and its parts in bytes."""
        return self.header + self.parts * self.part

    def bytes(self, columns: int) -> int:
        """Return the size of a panel in bytes."""
        return columns // PART // self.parts * self.group


def _without_sign(name: str, offset: int) -> tuple[int, ...]:
    return tuple(number + offset for number in VALUE_TABLES[name])


PANEL_FORMATS = {
    "Q4_0": PanelFormat(0, offset=8),
    "Q4_1": PanelFormat(0, has_minima=True),
    "Q5_0": PanelFormat(1, offset=16),
    "Q5_1": PanelFormat(1, has_minima=True),
    "Q8_0": PanelFormat(4, offset=128),
    "Q4_K": PanelFormat(0, has_minima=True, parts=8, has_factors=True),
    "Q5_K": PanelFormat(1, has_minima=True, parts=8, has_factors=True),
    "Q6_K": PanelFormat(2, offset=32, parts=8, scales=2, has_factors=True),
    "IQ4_NL": PanelFormat(0, offset=128, table=_without_sign("IQ4_NL", 128)),
    "MXFP4": PanelFormat(0, offset=12, scale_size=EXPONENT_SIZE, table=_without_sign("MXFP4", 12)),
    "int4": PanelFormat(0, offset=8, has_minima=True, parts=2, scale_size=FLOAT_SIZE),
    "int8": PanelFormat(4, offset=128, parts=2, scale_size=FLOAT_SIZE),
}


def panel_format(format: BlockFormat) -> PanelFormat:
    return PANEL_FORMATS[format.name]


SUM_OF_PRODUCTS = """
define i32 @sum_of_products(ptr %first, ptr %second) {
  %a = load <16 x i8>, ptr %first
  %b = load <16 x i8>, ptr %second
  %c = sext <16 x i8> %a to <16 x i32>
  %d = sext <16 x i8> %b to <16 x i32>
  %products = mul <16 x i32> %c, %d
  %sum = call i32 @llvm.vector.reduce.add.v16i32(<16 x i32> %products)
  ret i32 %sum
}
declare i32 @llvm.vector.reduce.add.v16i32(<16 x i32>)
"""


def has_dot_of_octets(triple: str, cpu: str, features: str) -> bool:
    """Return True if LLVM selects ``sdot`` for a processor.

    LLVM's list of host features doesn't name the instruction, and using ``sdot`` where LLVM doesn't support it aborts
    the process. Therefore this function compiles a sum for which LLVM selects ``sdot`` wherever possible.
    """
    target_machine = binding.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features, opt=2)
    return "sdot" in target_machine.emit_assembly(binding.parse_assembly(SUM_OF_PRODUCTS))


FLOATS = ir.VectorType(FLOAT, PANEL_ROWS)
WORDS = ir.VectorType(WORD, PANEL_ROWS)
OCTETS = ir.VectorType(OCTET, PLANE)
SHORTS = ir.VectorType(SHORT, PLANE // 2)
ARM_REGISTER, WORDS_OF_REGISTER = 16, 4
"""Bytes and 32-bit words of a NEON register."""
MAX_SHORT = (1 << 15) - 1
MAX_INPUT = 1 << 7

DOT_OF_OCTETS = "vnni"
"""AVX-VNNI or AVX-512 VNNI: sums four products of unsigned and signed bytes in 32 bits."""
DOT_OF_PAIRS = "avx2"
"""AVX2: sums two products of unsigned and signed bytes in 16 bits, saturating."""
DOT_OF_SIGNED = "sdot"
"""ARM: sums four products of signed bytes in 32 bits."""
ANY_PROCESSOR = "any"
ADDED_IN_PAIRS, WIDENED_PAIRS = (
    ("llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd")
    if PANEL_ROWS == 8
    else ("llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512")
)


@cache
def best_dot() -> str:
    """Return the best dot-product instruction of this processor."""
    if machine().lower() in ("aarch64", "arm64"):
        # The target that numba compiles for, which numba's settings can change.
        compiled_for = cpu_target.target_context.codegen().magic_tuple()
        return DOT_OF_SIGNED if has_dot_of_octets(*compiled_for) else ANY_PROCESSOR
    if has_feature("avxvnni") or (has_feature("avx512vnni") and has_feature("avx512vl")):
        return DOT_OF_OCTETS
    return DOT_OF_PAIRS if has_feature("avx2") else ANY_PROCESSOR


class IntegerCode(VectorCode):
    """Generates instructions on vectors with one lane for each row of a panel."""

    def __init__(self, builder: Any, dot: str) -> None:
        super().__init__(builder)
        self.dot = dot

    def constant(self, number: int, kind: Any = OCTET, lanes: int = PLANE) -> Any:
        """Return a vector with the same constant in all lanes."""
        return self.integers([number] * lanes, kind)

    def broadcast(self, address: Any, kind: Any) -> Any:
        """Load a 32-bit value into all lanes."""
        return self.splat(self.load(address, kind), PANEL_ROWS)

    def quad(self, record: Any, quad: int) -> Any:
        """Load the four bytes of an input row's quad into every lane."""
        if self.dot != DOT_OF_SIGNED:
            return self.builder.bitcast(self.broadcast(self.gep(record, quad * QUAD), WORD), OCTETS)
        # ``sdot`` can read one lane of a register, so a single load serves four quads.
        register, lane = divmod(quad, WORDS_OF_REGISTER)
        words = self.load(self.gep(record, register * ARM_REGISTER), ir.VectorType(WORD, WORDS_OF_REGISTER))
        return self.builder.bitcast(self.lane(words, lane, PANEL_ROWS), OCTETS)

    def added_products(self, levels: Any, inputs: Any, added: Any) -> Any:
        """Add the sum of four products per lane to ``added`` with ``sdot``, one NEON register at a time."""
        octets, words = ir.VectorType(OCTET, ARM_REGISTER), ir.VectorType(WORD, WORDS_OF_REGISTER)
        registers = [
            self.call(
                "llvm.aarch64.neon.sdot.v4i32.v16i8",
                words,
                self.part(added, first // QUAD, words.count),
                self.part(levels, first, octets.count),
                self.part(inputs, first, octets.count),
            )
            for first in range(0, PLANE, ARM_REGISTER)
        ]
        while len(registers) > 1:
            registers = [self.concatenate(*pair) for pair in zip(registers[::2], registers[1::2], strict=True)]
        return registers[0]

    def table_lookup(self, table: Sequence[int], indices: Any) -> Any:
        """Look up bytes in a 16-entry table with 4-bit indices."""
        if self.dot == ANY_PROCESSOR:
            return self.lookup(table, indices, None)
        if self.dot == DOT_OF_SIGNED:
            return self.lookup(table, indices, LOOK_UP_ARM)
        return self.lookup(table, indices, LOOK_UP_X86[PLANE], PLANE)

    def in_order(self, vector: Any) -> Any:
        """Pass ``vector`` through empty assembly marked as having side effects, so that LLVM keeps program order.

        Otherwise LLVM computes one input row after another, which keeps all levels of a part in registers. AVX2 has too
        few for that: a part of four rows in Q8_0 took 23 cycles per row on Zen 4 without AVX-512, and 19 in order.
        """
        kind = ir.FunctionType(vector.type, [vector.type])
        return self.builder.asm(kind, "", "=v,0", [vector], side_effect=True)

    def scaled(self, weights: Any, factor: Any, added: Any) -> Any:
        return self.call(f"llvm.fmuladd.v{PANEL_ROWS}f32", FLOATS, weights, factor, added)


class DotProduct:
    """Generates code that computes, in each lane, a dot product of weight levels and signed inputs.

    Levels are signed only with ``sdot``.
    """

    def __init__(self, code: IntegerCode, largest: int) -> None:
        """``largest`` is the largest level that may be passed to ``add``."""
        self._code, self._builder = code, code.builder
        self._in_16_bits = MAX_SHORT // (2 * largest * MAX_INPUT)
        """Number of pairwise sums whose total fits into 16 bits."""
        self._pairs: Any = None
        self._added = 0
        self._total: Any = None

    def add(self, levels: Any, inputs: Any) -> None:
        if self._code.dot == DOT_OF_OCTETS:
            words = [self._builder.bitcast(octets, WORDS) for octets in (levels, inputs)]
            self._total = self._code.call(f"llvm.x86.avx512.vpdpbusd.{8 * PLANE}", WORDS, self._before(), *words)
        elif self._code.dot == DOT_OF_SIGNED:
            self._total = self._code.added_products(levels, inputs, self._before())
        elif self._code.dot == DOT_OF_PAIRS:
            pairs = self._code.call(ADDED_IN_PAIRS, SHORTS, levels, inputs)
            added = pairs if self._pairs is None else self._builder.add(self._pairs, pairs)
            self._pairs = self._code.in_order(added)
            self._added += 1
            if self._added == self._in_16_bits:
                self._widen()
        else:
            self._add_words(self._products(levels, inputs))

    def total(self) -> Any:
        if self._added:
            self._widen()
        return self._total

    def _before(self) -> Any:
        """Return the sum to which the next products are added."""
        return self._code.constant(0, WORD, PANEL_ROWS) if self._total is None else self._total

    def _widen(self) -> None:
        ones = self._code.constant(1, SHORT, PLANE // 2)
        self._add_words(self._code.call(WIDENED_PAIRS, WORDS, self._pairs, ones))
        self._pairs, self._added = None, 0

    def _add_words(self, words: Any) -> None:
        self._total = words if self._total is None else self._builder.add(self._total, words)

    def _products(self, levels: Any, inputs: Any) -> Any:
        """Return the sums of four products per lane, computed without a dot-product instruction."""
        wide = ir.VectorType(SHORT, PLANE)
        products = self._builder.mul(self._builder.zext(levels, wide), self._builder.sext(inputs, wide))
        products = self._builder.sext(products, ir.VectorType(WORD, PLANE))
        undefined = ir.Constant(products.type, ir.Undefined)
        sums = None
        for column in range(QUAD):
            lanes = self._code.integers(list(range(column, PLANE, QUAD)))
            part = self._builder.shuffle_vector(products, undefined, lanes)
            sums = part if sums is None else self._builder.add(sums, part)
        return sums
