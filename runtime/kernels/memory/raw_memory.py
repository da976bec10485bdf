"""Memory operations for compiled code that numba lacks: arrays by their address, floats by their bits, prefetch."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from hdtool.runtime.kernels.compiled import compiled, generated

BYTES = ir.IntType(8).as_pointer()
WORD = ir.IntType(32)
WORD_SIZE = 8
"""Bytes of a field of a record."""


@generated(types.int64, returns=types.voidptr)
def pointer(builder: Any, address: Any) -> Any:
    """Convert an integer to a pointer."""
    return builder.inttoptr(address, BYTES)


def _prefetch(context: Any, array: Any, index: Any) -> Any:
    """Prefetch an item of an array."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        view = target.make_array(signature.args[0])(target, builder, arguments[0])
        kind = ir.FunctionType(ir.VoidType(), [BYTES, WORD, WORD, WORD])
        function = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
            builder.module, kind, "llvm.prefetch.p0"
        )
        address = builder.bitcast(builder.gep(view.data, [arguments[1]]), BYTES)
        builder.call(function, [address, WORD(0), WORD(3), WORD(1)])  # to read, to keep, as data
        return target.get_dummy_value()

    return types.void(array, index), generate


# Typed as Any, because numba passes the context argument itself.
prefetch: Any = intrinsic(_prefetch)
carray: Any = numba.carray  # type: ignore[attr-defined]


@compiled
def array_at(address: Any, shape: Any, kind: Any) -> npt.NDArray[Any]:
    """The array at an address."""
    return carray(pointer(address), shape, kind)  # type: ignore[no-any-return]


def bits(number: float) -> int:
    """The bits of a number in float32, as an integer."""
    return int(np.float32(number).view(np.int32))


@compiled
def float_of(record: npt.NDArray[Any], field: int) -> Any:
    """The float32 whose bits an array of integers of 64 bits has in a field."""
    return array_at(record.ctypes.data + field * WORD_SIZE, (1,), types.float32)[0]


@compiled
def copy_numbers(read: int, count: int, written: int) -> None:
    """Copy float32 numbers."""
    source, target = array_at(read, (count,), types.float32), array_at(written, (count,), types.float32)
    for place in range(count):  # an assignment of slices takes four seconds longer to compile
        target[place] = source[place]


@compiled
def clear_numbers(written: int, count: int) -> None:
    """Set float32 numbers to 0."""
    target = array_at(written, (count,), types.float32)
    for place in range(count):
        target[place] = 0.0
