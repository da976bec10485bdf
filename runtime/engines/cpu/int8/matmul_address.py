"""The matmul with inputs in 8 bits for one format of panels, as a C function that is called by its address."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any, cast

from numba import cfunc, types

from hdtool.runtime.engines.cpu.int8.matmul import multiply_int8
from hdtool.runtime.engines.cpu.int8.panel_format import PANEL_ROWS
from hdtool.runtime.engines.cpu.int8.panel_tiles import panel_bytes
from hdtool.runtime.kernels.matmul_address import ARGUMENTS, add_bias
from hdtool.runtime.kernels.vector_code import ITEM_SIZE


def int8_matmul_of(kind: Any) -> Any:
    """The matmul for a format; it must be kept as long as its address is used."""
    return _made(cast(Hashable, type(kind)))  # formats differ by the type of ``kind``: they are equal as numbers


@cache
def _made(kind_type: Hashable) -> Any:
    kind: Any = cast(Any, kind_type)(0)

    @cfunc(types.void(*[types.int64] * ARGUMENTS), cache=True)
    def matmul(
        matrix: int, outs: int, columns: int, inputs: int, rows: int, outputs: int, bias: int, first: int, end: int
    ) -> None:
        part = matrix + first // PANEL_ROWS * panel_bytes(kind, columns)
        multiply_int8(part, kind, end - first, columns, inputs, rows, outputs + first * ITEM_SIZE, outs)
        add_bias(bias, outs, rows, outputs, first, end)

    return matmul
