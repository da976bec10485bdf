"""Matrix product of small batches on a CPU, at the bandwidth of memory.

BLAS libraries are optimized for many rows. For one row, or the few rows of a tree, they read the matrix below memory
bandwidth. This kernel reads it once, in the order of memory, and prefetches one tile ahead.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from hdtool.runtime.kernels.raw_memory import BYTES, WORD, array_at

FLOAT = ir.FloatType()
INDEX = ir.IntType(64)
ITEM_SIZE = 4
CACHE_LINE = 16
"""Numbers in a cache line."""


def _has(feature: str) -> bool:
    try:
        return bool(binding.get_host_cpu_features().get(feature))
    except RuntimeError:  # unsupported on some processors
        return False


LANES = 16 if _has("avx512f") else 8 if _has("avx") else 4
"""Numbers in a vector register."""
OUTS = 2 if LANES == 8 else 4
"""Matrix rows in a tile: its sums with four input rows must fit into the registers, of which AVX has 16."""
UNROLLED = 4
COLUMN_MULTIPLE = 64
"""The number of columns must be a multiple of this."""


class _Loop:
    """Generates the LLVM code of the loop over the columns of a tile."""

    def __init__(self, builder: Any, columns: Any, tile: tuple[int, int, int]) -> None:
        self.builder = builder
        self.columns = columns
        self.outs, self.rows, self.unrolled = tile
        self.vector = ir.VectorType(FLOAT, LANES)
        self.step = LANES * self.unrolled

    def call(self, name: str, result: Any, *arguments: Any, **flags: Any) -> Any:
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)  # type: ignore[no-untyped-call]
        return self.builder.call(function, arguments, **flags)

    def rows_from(self, address: Any, count: int) -> list[Any]:
        first = self.builder.inttoptr(address, FLOAT.as_pointer())
        return [self.builder.gep(first, [self.builder.mul(self.columns, INDEX(row))]) for row in range(count)]

    def sums(self, matrix: Any, rows: Any) -> list[Any]:
        """The products of each tile row with each of ``rows``, as vectors; their lanes are still to be summed."""
        builder = self.builder
        matrix, rows = self.rows_from(matrix, self.outs + 1), self.rows_from(rows, self.rows)
        before, body = builder.block, builder.append_basic_block("columns")
        builder.branch(body)
        builder.position_at_end(body)
        column = builder.phi(INDEX)
        sums = [builder.phi(self.vector) for _ in range(self.unrolled * self.outs * self.rows)]
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
        apart = self.outs * self.rows
        for place in range(apart, len(added)):
            added[place % apart] = builder.fadd(added[place % apart], added[place])
        return added[:apart]

    def _added(self, column: Any, matrix: list[Any], rows: list[Any], sums: list[Any]) -> list[Any]:
        left, added = iter(sums), []
        for unrolled in range(self.unrolled):
            at = self.builder.add(column, INDEX(unrolled * LANES))
            factors = [self._numbers(row, at) for row in rows]
            for out in matrix:
                weights = self._numbers(out, at)
                for factor in factors:
                    name = f"llvm.fmuladd.v{LANES}f32"
                    added.append(self.call(name, self.vector, weights, factor, next(left)))
        return added

    def _numbers(self, row: Any, at: Any) -> Any:
        address = self.builder.bitcast(self.builder.gep(row, [at]), self.vector.as_pointer())
        found = self.builder.load(address)
        found.align = ITEM_SIZE
        return found

    def _fetch(self, ahead: Any) -> None:
        """Prefetch as much of the next tile as is read of this one, in the order of memory."""
        for line in range(0, max(self.outs * self.step, CACHE_LINE), CACHE_LINE):
            address = self.builder.bitcast(self.builder.gep(ahead, [INDEX(line)]), BYTES)
            # To read, into L2: L1 has no room for two tiles and the input rows.
            self.call("llvm.prefetch.p0", ir.VoidType(), address, WORD(0), WORD(2), WORD(1))


def _tile(outs: int, rows: int, unrolled: int = 1) -> Any:
    """An intrinsic that multiplies ``outs`` rows of a matrix by ``rows`` input rows."""

    def typed(context: Any, matrix: Any, columns: Any, inputs: Any, outputs: Any, apart: Any) -> Any:
        def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            matrix, columns, inputs, outputs, apart = arguments
            loop = _Loop(builder, columns, (outs, rows, unrolled))
            found = iter(loop.sums(matrix, inputs))
            first = builder.inttoptr(outputs, FLOAT.as_pointer())
            for out in range(outs):
                for row in range(rows):
                    total = loop.call(
                        f"llvm.vector.reduce.fadd.v{LANES}f32", FLOAT, FLOAT(0.0), next(found), fastmath=("reassoc",)
                    )
                    builder.store(total, builder.gep(first, [builder.add(builder.mul(apart, INDEX(row)), INDEX(out))]))
            return target.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return intrinsic(typed)


_single = _tile(1, 1, UNROLLED)
_one, _two, _four = (_tile(OUTS, rows) for rows in (1, 2, 4))


@njit(cache=True, nogil=True)
def multiply(matrix: int, outs: int, columns: int, inputs: int, rows: int, outputs: int, bias: int) -> None:
    """``outputs = inputs @ matrix.T + bias``, given by addresses of contiguous float32 arrays.

    ``columns`` must be a multiple of ``COLUMN_MULTIPLE``; address 0 means no bias.
    """
    whole = 0 if rows == 1 else outs - outs % OUTS
    for out in range(0, whole, OUTS):
        tile, row = matrix + out * columns * ITEM_SIZE, 0
        while row < rows:
            read = inputs + row * columns * ITEM_SIZE
            written = outputs + (row * outs + out) * ITEM_SIZE
            if rows - row >= 4:
                _four(tile, columns, read, written, outs)
                row += 4
            elif rows - row >= 2:
                _two(tile, columns, read, written, outs)
                row += 2
            else:
                _one(tile, columns, read, written, outs)
                row += 1
    for out in range(whole, outs):
        tile = matrix + out * columns * ITEM_SIZE
        for row in range(rows):
            read = inputs + row * columns * ITEM_SIZE
            _single(tile, columns, read, outputs + (row * outs + out) * ITEM_SIZE, outs)
    if bias:
        added = array_at(bias, (outs,), types.float32)
        written_rows = array_at(outputs, (rows, outs), types.float32)
        for row in range(rows):
            for out in range(outs):
                written_rows[row, out] += added[out]
