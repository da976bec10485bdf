"""Calls of compiled functions by their addresses, so that a table can hold functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic


@cache
def _function(function: Callable[..., Any], signature: Any) -> Any:
    """A C function, compiled once and kept on the disk."""
    return cfunc(signature, cache=True)(function)


def address_of(function: Callable[..., Any], signature: Any) -> int:
    """The address of a function, compiled with a signature of numba."""
    return int(_function(function, signature).address)


def caller_of(signature: Any) -> Any:
    """An intrinsic that calls a function with this signature by its address, with a tuple of arguments."""
    returned = signature.return_type

    def call(context: Any, address: Any, arguments: Any) -> Any:
        def lower(target: Any, builder: Any, _: Any, values: Any) -> Any:
            given = cgutils.unpack_tuple(builder, values[1])  # type: ignore[no-untyped-call]
            kind = ir.VoidType() if returned == types.void else target.get_value_type(returned)
            pointer = ir.FunctionType(kind, [value.type for value in given]).as_pointer()
            result = builder.call(builder.inttoptr(values[0], pointer), given)
            return target.get_dummy_value() if returned == types.void else result

        return returned(address, arguments), lower

    return intrinsic(call)
