"""Matrix product of small batches on a CPU, at the bandwidth of memory.

BLAS libraries are optimized for many rows. For one row, or the few rows of a tree, they read the matrix below memory
bandwidth. This kernel reads it once, in the order of memory, and prefetches one tile ahead.

The matrix may be kept in 16 bits. Its numbers are expanded to float32 in registers, which is exact, and multiplied and
added in the same order, so the results have the bits of the product with the expanded matrix.
"""

from __future__ import annotations

from platform import machine
from typing import Any

import numpy as np
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from hdtool.runtime.kernels.raw_memory import BYTES, WORD, array_at

FLOAT = ir.FloatType()
HALF = ir.HalfType()
SHORT = ir.IntType(16)
INDEX = ir.IntType(64)
ITEM_SIZE = 4
CACHE_LINE = 64
"""Bytes."""
FLOAT32, BFLOAT16, FLOAT16 = np.float32(0), np.int16(0), np.uint16(0)
"""Arguments whose type states the format of a matrix. Compiled code has no type for 16-bit floats: integers of 16 bits
stand for them."""


def _has(feature: str) -> bool:
    try:
        return bool(binding.get_host_cpu_features().get(feature))
    except RuntimeError:  # unsupported on some processors
        return False


EXPANDS_FLOAT16 = _has("f16c") or _has("avx512f") or machine().lower() in ("aarch64", "arm64")
"""Whether the processor converts float16; elsewhere the compiler calls a function of a library that may be missing."""
LANES = 16 if _has("avx512f") else 8 if _has("avx") else 4
"""Numbers in a vector register."""
OUTS = 2 if LANES == 8 else 4
"""Matrix rows in a tile: its sums with four input rows must fit into the registers, of which AVX has 16."""
UNROLLED = 4
COLUMN_MULTIPLE = 64
"""The number of columns must be a multiple of this."""
LONG_ROW = 1024
"""From so many columns on, one input row is multiplied by whole tiles, else by one matrix row after another. The sums
are the same: each matrix row has its own."""


class _Loop:
    """Generates the LLVM code of the loop over the columns of a tile."""

    def __init__(self, builder: Any, columns: Any, kind: Any, outs: int, unrolled: int = 1) -> None:
        self.builder = builder
        self.columns = columns
        self.number, self.size = {types.float32: (FLOAT, 4), types.int16: (SHORT, 2), types.uint16: (HALF, 2)}[kind]
        self.outs, self.unrolled = outs, unrolled
        self.vector = ir.VectorType(FLOAT, LANES)
        self.step = LANES * unrolled

    def call(self, name: str, result: Any, *arguments: Any, **flags: Any) -> Any:
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)  # type: ignore[no-untyped-call]
        return self.builder.call(function, arguments, **flags)

    def rows_from(self, address: Any, count: int, number: Any = FLOAT) -> list[Any]:
        first = self.builder.inttoptr(address, number.as_pointer())
        return [self.builder.gep(first, [self.builder.mul(self.columns, INDEX(row))]) for row in range(count)]

    def sums(self, matrix: Any, inputs: Any, count: int) -> list[Any]:
        """The products of each tile row with each input row, as vectors; their lanes are still to be summed."""
        builder = self.builder
        matrix, rows = self.rows_from(matrix, self.outs + 1, self.number), self.rows_from(inputs, count)
        before, body = builder.block, builder.append_basic_block("columns")
        builder.branch(body)
        builder.position_at_end(body)
        column = builder.phi(INDEX)
        sums = [builder.phi(self.vector) for _ in range(self.unrolled * self.outs * count)]
        self._fetch(builder.gep(matrix.pop(), [builder.mul(column, INDEX(self.outs))]))
        added = self._added(column, matrix, rows, sums)
        following = builder.add(column, INDEX(self.step))
        zero = ir.Constant(self.vector, [0.0] * LANES)
        firsts = [INDEX(0), *[zero] * len(sums)]
        for phi, first, value in zip([column, *sums], firsts, [following, *added], strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(value, body)
        after = builder.append_basic_block("after")
        builder.cbranch(builder.icmp_signed("<", following, self.columns), body, after)
        builder.position_at_end(after)
        apart = self.outs * count
        for place in range(apart, len(added)):
            added[place % apart] = builder.fadd(added[place % apart], added[place])
        return added[:apart]

    def _added(self, column: Any, matrix: list[Any], rows: list[Any], sums: list[Any]) -> list[Any]:
        left, added = iter(sums), []
        for unrolled in range(self.unrolled):
            at = self.builder.add(column, INDEX(unrolled * LANES))
            factors = [self._load(row, at, self.vector, ITEM_SIZE) for row in rows]
            for out in matrix:
                weights = self._weights(out, at)
                for factor in factors:
                    name = f"llvm.fmuladd.v{LANES}f32"
                    added.append(self.call(name, self.vector, weights, factor, next(left)))
        return added

    def _weights(self, row: Any, at: Any) -> Any:
        """Numbers of the matrix, in float32."""
        found = self._load(row, at, ir.VectorType(self.number, LANES), self.size)
        if self.number is FLOAT:
            return found
        if self.number is HALF:
            return self.builder.fpext(found, self.vector)
        # The bits of a bfloat16 are the upper half of those of a float32.
        words = ir.VectorType(WORD, LANES)
        upper = self.builder.shl(self.builder.zext(found, words), ir.Constant(words, [16] * LANES))
        return self.builder.bitcast(upper, self.vector)

    def _load(self, row: Any, at: Any, vector: Any, align: int) -> Any:
        found = self.builder.load(self.builder.bitcast(self.builder.gep(row, [at]), vector.as_pointer()))
        found.align = align
        return found

    def _fetch(self, ahead: Any) -> None:
        """Prefetch as much of the next tile as is read of this one, in the order of memory."""
        line = CACHE_LINE // self.size
        for number in range(0, max(self.outs * self.step, line), line):
            address = self.builder.bitcast(self.builder.gep(ahead, [INDEX(number)]), BYTES)
            # To read, into L2: L1 has no room for two tiles and the input rows.
            self.call("llvm.prefetch.p0", ir.VoidType(), address, WORD(0), WORD(2), WORD(1))


def _tile(outs: int, rows: int, unrolled: int = 1) -> Any:
    """An intrinsic that multiplies ``outs`` rows of a matrix by ``rows`` input rows."""

    def typed(context: Any, matrix: Any, kind: Any, columns: Any, inputs: Any, outputs: Any, apart: Any) -> Any:
        def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            matrix, _, columns, inputs, outputs, apart = arguments
            loop = _Loop(builder, columns, kind, outs, unrolled)
            found = iter(loop.sums(matrix, inputs, rows))
            first = builder.inttoptr(outputs, FLOAT.as_pointer())
            for out in range(outs):
                for row in range(rows):
                    total = loop.call(
                        f"llvm.vector.reduce.fadd.v{LANES}f32", FLOAT, FLOAT(0.0), next(found), fastmath=("reassoc",)
                    )
                    builder.store(total, builder.gep(first, [builder.add(builder.mul(apart, INDEX(row)), INDEX(out))]))
            return target.get_dummy_value()

        return types.void(types.int64, kind, *[types.int64] * 4), generate

    return intrinsic(typed)


_single, _alone = _tile(1, 1, UNROLLED), _tile(OUTS, 1, UNROLLED)
_one, _two, _four = (_tile(OUTS, rows) for rows in (1, 2, 4))


@njit(cache=True, nogil=True)
def multiply(
    matrix: int, kind: Any, size: int, outs: int, columns: int, inputs: int, rows: int, outputs: int, bias: int
) -> None:
    """``outputs = inputs @ matrix.T + bias``, given by addresses of contiguous arrays, float32 but for the matrix.

    ``kind`` and ``size`` are the format of the matrix and the bytes of its numbers. ``columns`` must be a multiple of
    ``COLUMN_MULTIPLE``; address 0 means no bias.
    """
    whole = 0 if rows == 1 and columns < LONG_ROW else outs - outs % OUTS
    for out in range(0, whole, OUTS):
        tile, row = matrix + out * columns * size, 0
        while row < rows:
            read = inputs + row * columns * ITEM_SIZE
            written = outputs + (row * outs + out) * ITEM_SIZE
            if rows == 1:
                _alone(tile, kind, columns, read, written, outs)
                row += 1
            elif rows - row >= 4:
                _four(tile, kind, columns, read, written, outs)
                row += 4
            elif rows - row >= 2:
                _two(tile, kind, columns, read, written, outs)
                row += 2
            else:
                _one(tile, kind, columns, read, written, outs)
                row += 1
    for out in range(whole, outs):
        tile = matrix + out * columns * size
        for row in range(rows):
            read = inputs + row * columns * ITEM_SIZE
            _single(tile, kind, columns, read, outputs + (row * outs + out) * ITEM_SIZE, outs)
    if bias:
        added = array_at(bias, (outs,), types.float32)
        written_rows = array_at(outputs, (rows, outs), types.float32)
        for row in range(rows):
            for out in range(outs):
                written_rows[row, out] += added[out]
