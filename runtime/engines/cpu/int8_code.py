"""Integer dot products with the processor's best instruction, and the panel formats they read.

A panel has the weights of its rows in parts of 32 columns: first the lowest four bits of each weight, with four columns
of a row per lane, then the remaining bits. A part's numbers are ``scale * (level - offset) + minimum``, with the
block's scale and minimum. Results are integers, so they don't depend on the instruction.
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
from hdtool.runtime.kernels.vector_code import (
    FLOAT,
    LOOK_UP_ARM,
    LOOK_UP_X86,
    OCTET,
    SHORT,
    VectorCode,
    has_feature,
)

PANEL_ROWS = 16 if has_feature("avx512bw") else 8
"""As many as a vector register has 32-bit numbers, where the processor multiplies octets in it. Panels exist only in
memory, so they may differ between processors."""
PART = 32
"""Columns of a part."""
QUAD = 4
"""Columns of a lane: dot-product instructions add four octets each."""
QUADS = PART // QUAD
PLANE = PANEL_ROWS * QUAD
"""Bytes of a vector of octets."""
LOW_BITS = 4
"""Bits of a level that are stored apart from the others."""
EXPONENT_SIZE, HALF_SIZE, FLOAT_SIZE = 1, 2, 4


@dataclass(frozen=True)
class PanelFormat:
    """Memory layout of a panel."""

    high_bits: int
    """Bits of a level beyond four."""
    offset: int = 0
    """Subtracted from a level: GGUF files have signed ones."""
    has_minima: bool = False
    parts: int = 1
    """Parts that share a header of scales."""
    scales: int = 1
    """Scales of a part: one, or one for each half."""
    has_factors: bool = False
    """A part has integers that multiply its header's scales and minima."""
    scale_size: int = HALF_SIZE
    """Bytes of a scale in the header: an exponent, a float16 or a float32."""
    table: tuple[int, ...] = ()
    """Values of the four-bit codes; empty if a code is the level itself."""

    @property
    def level_bits(self) -> int:
        return max(self.table).bit_length() if self.table else LOW_BITS + self.high_bits

    @property
    def header(self) -> int:
        """Bytes of a header: a scale for each row, then a minimum."""
        return self.scale_size * PANEL_ROWS * (1 + self.has_minima)

    @property
    def octets(self) -> int:
        """Bytes of a part's factors."""
        return PANEL_ROWS * (self.scales + self.has_minima) if self.has_factors else 0

    @property
    def part(self) -> int:
        """Bytes of a part."""
        return self.octets + PLANE * (QUADS // 2 + self.high_bits)

    @property
    def group(self) -> int:
        """Bytes of a header and its parts."""
        return self.header + self.parts * self.part

    def bytes(self, columns: int) -> int:
        """Bytes of a panel."""
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
    """True if LLVM selects ``sdot`` for this processor.

    LLVM's host feature list doesn't name the instruction, and using it where LLVM doesn't expect it ends the process.
    So LLVM compiles a sum for which it chooses ``sdot`` wherever it can.
    """
    target_machine = binding.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features, opt=2)
    return "sdot" in target_machine.emit_assembly(binding.parse_assembly(SUM_OF_PRODUCTS))


FLOATS = ir.VectorType(FLOAT, PANEL_ROWS)
WORDS = ir.VectorType(WORD, PANEL_ROWS)
OCTETS = ir.VectorType(OCTET, PLANE)
SHORTS = ir.VectorType(SHORT, PLANE // 2)
ARM_REGISTER, WORDS_OF_REGISTER = 16, 4
"""Bytes and 32-bit words of a NEON register."""
LARGEST_SHORT = (1 << 15) - 1
LARGEST_INPUT = 1 << 7

DOT_OF_OCTETS = "vnni"
"""AVX-VNNI or AVX-512 VNNI: adds four products in 32 bits."""
DOT_OF_PAIRS = "avx2"
"""AVX2: adds two products in saturating 16 bits."""
DOT_OF_SIGNED = "sdot"
"""ARM: adds four products of signed octets in 32 bits."""
ANY_PROCESSOR = "any"
ADDED_IN_PAIRS, WIDENED_PAIRS = (
    ("llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd")
    if PANEL_ROWS == 8
    else ("llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512")
)


@cache
def best_dot() -> str:
    """The instructions that this processor has."""
    if machine().lower() in ("aarch64", "arm64"):
        # What numba compiles for; its settings can change that.
        compiled_for = cpu_target.target_context.codegen().magic_tuple()
        return DOT_OF_SIGNED if has_dot_of_octets(*compiled_for) else ANY_PROCESSOR
    if has_feature("avxvnni") or (has_feature("avx512vnni") and has_feature("avx512vl")):
        return DOT_OF_OCTETS
    return DOT_OF_PAIRS if has_feature("avx2") else ANY_PROCESSOR


class IntegerCode(VectorCode):
    """Adds instructions on vectors with a lane for each row of a panel."""

    def __init__(self, builder: Any, dot: str) -> None:
        super().__init__(builder)
        self.dot = dot

    def everywhere(self, number: int, kind: Any = OCTET, lanes: int = PLANE) -> Any:
        """A constant in all lanes."""
        return self.integers([number] * lanes, kind)

    def broadcast(self, address: Any, kind: Any) -> Any:
        """A 32-bit number in all lanes."""
        return self.splat(self.load(address, kind), PANEL_ROWS)

    def quad(self, record: Any, quad: int) -> Any:
        """Four octets of an input row, in each lane."""
        if self.dot != DOT_OF_SIGNED:
            return self.builder.bitcast(self.broadcast(self.after(record, quad * QUAD), WORD), OCTETS)
        # ``sdot`` reads them from a register's lane, so one load serves a whole register.
        register, lane = divmod(quad, WORDS_OF_REGISTER)
        words = self.load(self.after(record, register * ARM_REGISTER), ir.VectorType(WORD, WORDS_OF_REGISTER))
        return self.builder.bitcast(self.lane(words, lane, PANEL_ROWS), OCTETS)

    def added_products(self, levels: Any, inputs: Any, added: Any) -> Any:
        """Add four products per lane with ``sdot``, one NEON register at a time."""
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
            registers = [self.joined(*pair) for pair in zip(registers[::2], registers[1::2], strict=True)]
        return registers[0]

    def of_table(self, table: Sequence[int], indices: Any) -> Any:
        """Look up octets in a table of 16 by 4-bit indices."""
        if self.dot == ANY_PROCESSOR:
            return self.looked_up(table, indices, None)
        if self.dot == DOT_OF_SIGNED:
            return self.looked_up(table, indices, LOOK_UP_ARM)
        return self.looked_up(table, indices, LOOK_UP_X86[PLANE], PLANE)

    def in_order(self, vector: Any) -> Any:
        """A vector that is computed before the next one in order: LLVM moves no empty assembler code with side effects.

        Left alone, it multiplies input row by input row, with all levels of a part in registers, of which AVX2 has too
        few: a part of four rows in Q8_0 took 23 cycles a row on Zen 4 without AVX-512, and 19 in order.
        """
        kind = ir.FunctionType(vector.type, [vector.type])
        return self.builder.asm(kind, "", "=v,0", [vector], side_effect=True)

    def scaled(self, weights: Any, factor: Any, added: Any) -> Any:
        return self.call(f"llvm.fmuladd.v{PANEL_ROWS}f32", FLOATS, weights, factor, added)


class DotProduct:
    """Sums, one per lane, of products of unsigned levels with signed inputs."""

    def __init__(self, code: IntegerCode, largest: int) -> None:
        """``largest`` is the largest level."""
        self._code, self._builder = code, code.builder
        self._in_16_bits = LARGEST_SHORT // (2 * largest * LARGEST_INPUT)
        """Pairwise sums that fit into 16 bits."""
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
        """Sum so far, which the next products are added to."""
        return self._code.everywhere(0, WORD, PANEL_ROWS) if self._total is None else self._total

    def _widen(self) -> None:
        ones = self._code.everywhere(1, SHORT, PLANE // 2)
        self._add_words(self._code.call(WIDENED_PAIRS, WORDS, self._pairs, ones))
        self._pairs, self._added = None, 0

    def _add_words(self, words: Any) -> None:
        self._total = words if self._total is None else self._builder.add(self._total, words)

    def _products(self, levels: Any, inputs: Any) -> Any:
        """Products of octets without a dot-product instruction; each has 16 bits."""
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
