"""What compiled code needs: the options of numba, function pointers, a clock, and raw memory.

When compiled code calls a function, numba compiles that function once more for each constant that is passed to it and
for each width of integers, and with it all that it calls. One version for all takes half the time to compile, and is as
fast: LLVM inlines small functions, constants included.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from pathlib import Path
from typing import Any, NoReturn, SupportsIndex, TypeVar

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic


def processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        found = dict(line.replace("\t", "").split(": ", 1) for line in lines if ": " in line)
        return f"{found['model name'].strip()} (family {found['cpu family']}, model {found['model']})"
    except (OSError, KeyError):
        return platform.processor() or platform.machine()


Function = TypeVar("Function", bound=Callable[..., Any])
Array = npt.NDArray[Any]
"""An array for compiled code, which finds the type of its numbers by itself."""
Ints = Array
"""The same, where they are integers of any width."""

# Only function pointers need a wrapper for C. numba's types lack this option.
_njit: Any = numba.njit(cache=True, nogil=True, no_cfunc_wrapper=True)  # type: ignore[call-overload]


def compiled(function: Function) -> Function:
    """Compile a function once for integers of any width and for constants; unsigned numbers keep their type."""
    made = _njit(function)
    template_for = made.get_call_template

    def general_template(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return template_for(tuple(map(_general, args)), {name: _general(kind) for name, kind in kwargs.items()})

    made.get_call_template = general_template
    return made  # type: ignore[no-any-return]


def generated(*kinds: Any, returns: Any = types.void) -> Callable[[Callable[..., Any]], Any]:
    """Make an intrinsic of a function that adds its instructions to those of the caller.

    The function gets a builder of LLVM instructions and an argument for each of ``kinds``. Where this is None, it takes
    arguments of all types, and gets the type and not the value.
    """

    def made(generate: Callable[..., Any]) -> Any:
        @wraps(generate)
        def typed(context: Any, *given: Any) -> Any:
            def lower(target: Any, builder: Any, signature: Any, values: Any) -> Any:
                known = zip(kinds, given, values, strict=True)
                found = generate(builder, *(own if kind is None else value for kind, own, value in known))
                return target.get_dummy_value() if found is None else found

            return returns(*(own if kind is None else kind for kind, own in zip(kinds, given, strict=True))), lower

        return intrinsic(typed)

    return made


def _general(kind: Any) -> Any:
    number: Any = types.unliteral(kind)  # type: ignore[no-untyped-call]
    return types.int64 if number in types.signed_domain else number


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


def _has_clock() -> bool:
    try:
        return hasattr(time, "CLOCK_MONOTONIC") and hasattr(ctypes.CDLL(None), "clock_gettime")
    except (OSError, TypeError):  # Windows has no library without a name
        return False


HAS_CLOCK = _has_clock()
MONOTONIC = getattr(time, "CLOCK_MONOTONIC", 0)

if HAS_CLOCK:
    _read: Any = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))
else:

    @compiled
    def _read(clock: int, address: int) -> int:
        return 0


@compiled
def lap(work: Any, source: int) -> None:
    """Add the time since the last lap to a source, if this draft is timed."""
    if work.timed:
        _read(MONOTONIC, work.instant_at)
        now = work.instant[0] * 1_000_000_000 + work.instant[1]
        work.laps[source] += now - work.since
        work.since = now


@compiled
def start_clock(work: Any) -> None:
    """Start the first lap."""
    lap(work, 0)
    work.laps[:] = 0


class SharedTime:
    """Time that is measured as a whole, and shared out by the laps of a part of it."""

    def __init__(self, parts: int) -> None:
        self._laps, self._shared_out = np.zeros((2, parts))
        self._spent = 0.0

    def spend(self, seconds: float) -> None:
        self._spent += seconds

    def clock(self, laps: Array) -> None:
        self._laps += laps

    def read(self) -> list[float]:
        """The time of each part. What was read before keeps its shares, so that no part's time goes down."""
        if whole := self._laps.sum():
            self._shared_out += self._spent * self._laps / whole
            self._spent = 0.0
        return self._shared_out.tolist()  # type: ignore[no-any-return]


class Pinned:
    """Raises on copy and pickle: compiled code would use addresses of the original, or of freed memory."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled, as it holds addresses of its memory: make a new one"
        )


def return_free_memory() -> None:
    """Return what was freed, where the system's allocator would keep it for later."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


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
