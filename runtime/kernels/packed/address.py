"""The product of a format as an address: compiled code that knows the format only when it runs calls it there.

A call by the type of the format would compile the products of all formats, of which a model has one or two.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

from llvmlite import ir  # type: ignore[import-untyped]
from numba import cfunc, types
from numba.extending import intrinsic

from hdtool.runtime.kernels.packed.formats import BlockFormat
from hdtool.runtime.kernels.small_batch_gemm import multiply
from hdtool.runtime.kernels.vector_code import INDEX

ARGUMENTS = 7
"""Matrix, outs, columns, inputs, rows, outputs and bias, as of ``multiply``."""


@cache
def product_address(format: BlockFormat) -> int:
    """The address of ``multiply`` for one format, compiled when it is asked for."""
    kind, size = format.kind, format.bytes

    def product(matrix: int, outs: int, columns: int, inputs: int, rows: int, outputs: int, bias: int) -> None:
        multiply(matrix, kind, size, outs, columns, inputs, rows, outputs, bias)

    compiled = cfunc(types.void(*[types.int64] * ARGUMENTS), cache=True)(product)
    _kept.append(compiled)
    return cast(int, compiled.address)


_kept: list[Any] = []
"""Compiled functions, which must not be freed while their addresses are used."""


def _call_product(
    context: Any,
    address: Any,
    matrix: Any,
    outs: Any,
    columns: Any,
    inputs: Any,
    rows: Any,
    outputs: Any,
    bias: Any,
) -> Any:
    """Call the product at an address."""

    def generate(target: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [INDEX] * ARGUMENTS)
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return target.get_dummy_value()

    return types.void(*[types.int64] * (ARGUMENTS + 1)), generate


call_product: Any = intrinsic(_call_product)
