"""Generates the code of a product's tiles: some rows of a matrix by some input rows.

The matrix holds numbers of 32 or 16 bits, or the blocks of a GGUF file. They become float32 in registers, so the
results have the bits of the product with the expanded matrix. Each sum is added in one order whatever the number of
rows, so a row has the same bits alone and beside others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from hdtool.runtime.kernels.compiled import generated
from hdtool.runtime.kernels.memory.raw_memory import BYTES
from hdtool.runtime.kernels.packed.formats import OF_TYPE
from hdtool.runtime.kernels.packed.registers import Blocks
from hdtool.runtime.kernels.tile_choice import Tile
from hdtool.runtime.kernels.vector_code import CACHE_LINE, FLOAT, HALF, INDEX, LANES, SHORT, VectorCode

ITEM_SIZE = 4
FLOAT32, BFLOAT16, FLOAT16 = np.float32(0), np.int16(0), np.uint16(0)
"""Arguments whose type states the format of a matrix. Compiled code has no type for 16-bit floats: integers of 16 bits
stand for them."""
NUMBERS = {types.float32: (FLOAT, 4), types.int16: (SHORT, 2), types.uint16: (HALF, 2)}
SUMS = 16 if LANES == 16 else 8
"""Sums of a tile, which must fit into the registers with what is multiplied: AVX has 16 registers, ARM needs four for
what AVX-512 has in one."""
MOST_OUTS, MOST_ROWS = 8, 8
"""Matrix rows and input rows of a tile, at most. One input row has eight sums, so that additions do not wait for each
other."""
FEW_ROWS = 4
"""Input rows of a tile up to which they are read where they are; more of them are interleaved, vector by vector."""


class _Numbers:
    """Generates the code that reads the rows of a matrix of numbers, in steps of one vector."""

    def __init__(self, code: VectorCode, kind: Any) -> None:
        self.code = code
        self.number, self.size = NUMBERS[kind]
        self.step, self.vectors = LANES, 1

    def stride(self, columns: Any) -> Any:
        """The bytes of a matrix row."""
        return self.code.builder.mul(columns, INDEX(self.size))

    def offset(self, column: Any) -> Any:
        """The bytes of a matrix row before a column."""
        return self.stride(column)

    def expander(self, address: Any) -> Any:
        return lambda place: self._expanded(address)

    def _expanded(self, address: Any) -> Any:
        builder, code = self.code.builder, self.code
        found = code.load(address, ir.VectorType(self.number, LANES), self.size)
        if self.number is FLOAT:
            return found
        if self.number is HALF:
            return builder.fpext(found, code.vector)
        # The bits of a bfloat16 are the upper half of those of a float32.
        return builder.bitcast(builder.shl(builder.zext(found, code.words), code.every(16)), code.vector)


class _Packed:
    """The same for a matrix of blocks, in steps of one block."""

    def __init__(self, code: VectorCode, kind: Any) -> None:
        self.code = code
        self.format = OF_TYPE[kind]
        self.blocks = Blocks(code, self.format)
        self.step, self.vectors = self.format.numbers, self.blocks.vectors
        self.expander = self.blocks.expander

    def stride(self, columns: Any) -> Any:
        return self.offset(columns)

    def offset(self, column: Any) -> Any:
        block = self.code.builder.udiv(column, INDEX(self.format.numbers))
        return self.code.builder.mul(block, INDEX(self.format.bytes))


def _read(code: VectorCode, kind: Any) -> Any:
    return (_Numbers if kind in NUMBERS else _Packed)(code, kind)


def outs_beside(rows: int) -> int:
    """The matrix rows of a tile with this number of input rows; a divisor of ``MOST_OUTS``.

    Eight fit beside one row only, and not on ARM: for each, a block's scales and bytes are in registers too.
    """
    if rows == 1:
        return MOST_OUTS if LANES > 4 else MOST_OUTS // 2
    return max(outs for outs in (1, 2, 4) if outs * rows <= SUMS or outs == 1)


def tile(outs: int, rows: int) -> Tile:
    """The multiplication of ``outs`` rows of a matrix by ``rows`` input rows."""

    def generate(builder: Any, kind: Any, matrix: Any, columns: Any, inputs: Any, outputs: Any, apart: Any) -> None:
        code = VectorCode(builder)
        read = _read(code, kind)
        first, stride = builder.inttoptr(matrix, BYTES), read.stride(columns)
        places = [code.after(first, builder.mul(stride, INDEX(out))) for out in range(outs + 1)]
        numbers = builder.inttoptr(inputs, FLOAT.as_pointer())
        ahead = places.pop()

        def multiply(column: Any, sums: list[Any]) -> list[Any]:
            offset = read.offset(column)
            _prefetch(code, code.after(ahead, builder.mul(offset, INDEX(outs))), read, outs)
            expanders = [read.expander(code.after(out, offset)) for out in places]
            for place in range(read.vectors):
                at = builder.add(column, INDEX(place * LANES))
                factors = _factors(code, numbers, at, columns, rows)
                for out, expand in enumerate(expanders):
                    weights = expand(place)
                    for row, factor in enumerate(factors):
                        sum_ = out * rows + row
                        sums[sum_] = code.multiply_add(weights, factor, sums[sum_])
            return sums

        zero = ir.Constant(code.vector, [0.0] * LANES)
        sums = code.loop(columns, [zero] * (outs * rows), multiply, read.step)
        written = builder.inttoptr(outputs, FLOAT.as_pointer())
        for out in range(outs):
            for row in range(rows):
                where = builder.add(builder.mul(apart, INDEX(row)), INDEX(out))
                builder.store(code.total(sums[out * rows + row]), code.after(written, where))

    return generate


def _factors(code: VectorCode, inputs: Any, at: Any, columns: Any, rows: int) -> list[Any]:
    """The numbers of each input row at a column."""
    builder = code.builder
    if rows > FEW_ROWS:
        first = code.after(inputs, builder.mul(at, INDEX(rows)))
        places = [code.after(first, row * LANES) for row in range(rows)]
    else:
        places = [code.after(inputs, builder.add(builder.mul(columns, INDEX(row)), at)) for row in range(rows)]
    return [code.load(place, code.vector, ITEM_SIZE) for place in places]


def _prefetch(code: VectorCode, ahead: Any, read: Any, outs: int) -> None:
    """Prefetch as much of the next tile as is read of this one, in the order of memory."""
    size = read.format.bytes if isinstance(read, _Packed) else read.size * read.step
    for byte in range(0, max(outs * size, CACHE_LINE), CACHE_LINE):
        code.prefetch(code.after(ahead, byte))


@generated(types.int64, None, types.int64, types.int64)
def unpack_row(builder: Any, matrix: Any, kind: Any, columns: Any, written: Any) -> None:
    """Write a matrix row as float32 numbers."""
    code = VectorCode(builder)
    read = _read(code, kind)
    first, numbers = builder.inttoptr(matrix, BYTES), builder.inttoptr(written, FLOAT.as_pointer())

    def write(column: Any, _: list[Any]) -> list[Any]:
        expand = read.expander(code.after(first, read.offset(column)))
        for place in range(read.vectors):
            at = code.after(numbers, builder.add(column, INDEX(place * LANES)))
            builder.store(expand(place), builder.bitcast(at, code.vector.as_pointer())).align = ITEM_SIZE
        return []

    code.loop(columns, [], write, read.step)


@generated(None, returns=types.int64)
def block_numbers(builder: Any, kind: Any) -> Any:
    """The numbers of a block; 1 for a matrix without blocks."""
    return INDEX(OF_TYPE[kind].numbers if kind in OF_TYPE else 1)
