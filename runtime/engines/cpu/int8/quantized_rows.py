"""Input rows in 8 bits: each part of 32 columns has a scale, by which its largest number becomes 127."""

from __future__ import annotations

from functools import reduce
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from hdtool.runtime.engines.cpu.int8.integer_code import ANY_PROCESSOR, FLOATS, WORDS, IntegerCode
from hdtool.runtime.engines.cpu.int8.panel_format import PANEL_ROWS, PART, panel_format
from hdtool.runtime.kernels.compiled import generated
from hdtool.runtime.kernels.memory.raw_memory import BYTES, WORD
from hdtool.runtime.kernels.packed.formats import OF_TYPE
from hdtool.runtime.kernels.vector_code import FLOAT, INDEX, OCTET

VECTORS = PART // PANEL_ROWS
SCALE, SCALED_SUM, CORRECTIONS = PART, PART + 4, PART + 8
"""Where a part has, after its octets: its scale, the sum of its numbers, and what the offset of the levels adds to the
integer sum of each half, or to the one of all columns."""
RECORD = PART + 16
"""Bytes of a part."""
LARGEST = 127.0
SMALLEST = 1e-30
"""Parts without a larger number are zero; the inverse of a smaller one could be infinite."""
ROUNDING, ROUNDING_BITS = 12582912.0, 0x4B400000
"""1.5 * 2**23: a small number added to it is rounded to an integer, which is in the lowest bits of the sum."""


@generated(types.int64, None, types.int64, types.int64)
def quantize_row(builder: Any, read: Any, kind: Any, columns: Any, written: Any) -> None:
    """Write the records of a row."""
    code = IntegerCode(builder, ANY_PROCESSOR)
    form = panel_format(OF_TYPE[kind])
    numbers, records = builder.inttoptr(read, FLOAT.as_pointer()), builder.inttoptr(written, BYTES)

    def write(part: Any, _: list[Any]) -> list[Any]:
        first = code.after(numbers, builder.mul(part, INDEX(PART)))
        record = code.after(records, builder.mul(part, INDEX(RECORD)))
        vectors = [code.load(code.after(first, place * PANEL_ROWS), FLOATS, 4) for place in range(VECTORS)]
        largest = _largest(code, vectors)
        scale = builder.fadd(builder.fdiv(largest, FLOAT(LARGEST)), _zero_or_nan(code, vectors))
        inverse = builder.fdiv(FLOAT(LARGEST), largest)
        inverse = builder.select(builder.fcmp_ordered(">", largest, FLOAT(SMALLEST)), inverse, FLOAT(0.0))
        levels = [_rounded(code, vector, code.splat(inverse, PANEL_ROWS)) for vector in vectors]
        for place, level in enumerate(levels):
            octets = builder.trunc(level, ir.VectorType(OCTET, PANEL_ROWS))
            _store(builder, octets, code.after(record, place * PANEL_ROWS))
        halves = [_sum(code, levels[: VECTORS // 2]), _sum(code, levels[VECTORS // 2 :])]
        whole = builder.add(*halves)
        _store(builder, scale, code.after(record, SCALE))
        _store(builder, builder.fmul(scale, builder.sitofp(whole, FLOAT)), code.after(record, SCALED_SUM))
        for place, total in enumerate(halves if form.scales == 2 else [whole]):
            correction = builder.mul(total, WORD(-form.offset))
            _store(builder, correction, code.after(record, CORRECTIONS + 4 * place))
        return []

    code.loop(builder.udiv(columns, INDEX(PART)), [], write, 1)


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.bitcast(address, value.type.as_pointer())).align = 1


def _largest(code: IntegerCode, vectors: list[Any]) -> Any:
    """The largest absolute number."""

    def larger(first: Any, second: Any) -> Any:
        return code.builder.select(code.builder.fcmp_ordered(">", first, second), first, second)

    found = reduce(larger, [code.call(f"llvm.fabs.v{PANEL_ROWS}f32", FLOATS, vector) for vector in vectors])
    return code.folded(found, larger)


def _zero_or_nan(code: IntegerCode, vectors: list[Any]) -> Any:
    """NaN if a number is infinite or NaN, so that the outputs become NaN."""
    zero = ir.Constant(FLOATS, [0.0] * PANEL_ROWS)
    found = zero
    for vector in vectors:
        found = code.scaled(vector, zero, found)
    return code.folded(found, code.builder.fadd)


def _rounded(code: IntegerCode, vector: Any, inverse: Any) -> Any:
    shifted = code.scaled(vector, inverse, ir.Constant(FLOATS, [ROUNDING] * PANEL_ROWS))
    return code.builder.sub(code.builder.bitcast(shifted, WORDS), code.everywhere(ROUNDING_BITS, WORD, PANEL_ROWS))


def _sum(code: IntegerCode, vectors: list[Any]) -> Any:
    return code.folded(reduce(code.builder.add, vectors), code.builder.add)
