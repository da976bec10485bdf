"""Numba helpers: compile options, LLVM intrinsics, function pointers, a clock, raw memory and the processor's name.

Numba specializes a function and its callees for every constant argument and integer width. ``compiled`` forces a single
specialization, which halves compile time. The code runs as fast, since LLVM still inlines small functions with their
constants.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import time
from collections.abc import Callable
from functools import cache, wraps
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, NoReturn, SupportsIndex, TypeAlias, TypeVar

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array

from hdtool.runtime.kernels.code_folder import keeping_code
from hdtool.runtime.kernels.inner_functions import InnerFunction


def processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        fields = dict(line.replace("\t", "").split(": ", 1) for line in lines if ": " in line)
        return f"{fields['model name'].strip()} (family {fields['cpu family']}, model {fields['model']})"
    except (OSError, KeyError):
        return platform.processor() or platform.machine()


Function = TypeVar("Function", bound=Callable[..., Any])
Array = npt.NDArray[Any]
"""An array passed to compiled code, which infers the dtype."""
Ints = Array
"""An array of integers of any width."""
Record: TypeAlias = Any
"""A record, whose fields are attributes in Python and in compiled code; or an array of records."""

# Only function pointers need a C wrapper. Numba's type stubs lack this option.
_njit: Any = numba.njit(cache=True, nogil=True, no_cfunc_wrapper=True)  # type: ignore[call-overload]


def compiled(function: Function) -> Function:
    """Compile a function; compiled callers pass signed integers as int64, and unsigned ones in their own type."""
    with keeping_code():
        dispatcher = _njit(function)
    InnerFunction(dispatcher, _general)
    return dispatcher  # type: ignore[no-any-return]


def generated(*kinds: Any, returns: Any = types.void) -> Callable[[Callable[..., Any]], Any]:
    """Turn a function that emits LLVM instructions into a numba intrinsic, inlined into its caller.

    The function receives an IR builder and one value for each type in ``kinds``. Where the type is None, the argument
    must be a constant, and the function receives its Python value.
    """

    def decorate(generate: Callable[..., Any]) -> Any:
        @wraps(generate)
        def typed(context: Any, *argument_types: Any) -> Any:
            def lower(target: Any, builder: Any, signature: Any, values: Any) -> Any:
                operands = zip(kinds, argument_types, values, strict=True)
                result = generate(
                    builder,
                    *(kind.literal_value if fixed is None else value for fixed, kind, value in operands),
                )
                return target.get_dummy_value() if result is None else result

            operand_types = [fixed or kind for fixed, kind in zip(kinds, argument_types, strict=True)]
            return returns(*operand_types), lower

        # For numba, the intrinsic's arguments must not be variable, as those of ``generate`` may be.
        places = [Parameter(f"argument_{place}", Parameter.POSITIONAL_ONLY) for place in range(len(kinds) + 1)]
        typed.__signature__ = Signature(places)  # type: ignore[attr-defined]
        return intrinsic(prefer_literal=True)(typed)

    return decorate


def _general(kind: Any) -> Any:
    number: Any = types.unliteral(kind)  # type: ignore[no-untyped-call]
    return types.int64 if number in types.signed_domain else number


@cache
def _function(function: Callable[..., Any], signature: Any) -> Any:
    """Compile a function as a C function; the result is cached in memory and on disk."""
    with keeping_code():
        return cfunc(signature, cache=True)(function)


def address_of(function: Callable[..., Any], signature: Any) -> int:
    """Compile a function with a numba signature and return its address."""
    return int(_function(function, signature).address)


def c_function(signature: Any) -> Callable[[Callable[..., Callable[..., Any]]], Callable[..., Any]]:
    """Compile the function that the decorated one returns into a C function, which compiled code calls by address.

    A C function isn't compiled into each caller. The decorated function may take the matrix format to compile for.
    Results are cached by argument, so that the code stays in memory at the address that callers hold.
    """

    def decorate(make: Callable[..., Callable[..., Any]]) -> Callable[..., Any]:
        return wraps(make)(cache(lambda *kinds: _function(make(*kinds), signature)))

    return decorate


def caller_of(signature: Any) -> Any:
    """Return an intrinsic that takes an address and a tuple of arguments and calls the function at the address.

    ``signature`` is the numba signature of that function.
    """
    returned = signature.return_type

    def call(context: Any, address: Any, arguments: Any) -> Any:
        def lower(target: Any, builder: Any, _: Any, values: Any) -> Any:
            given = cgutils.unpack_tuple(builder, values[1])  # type: ignore[no-untyped-call]
            arguments_ = [
                target.cast(builder, value, kind, wanted)
                for value, kind, wanted in zip(given, arguments.types, signature.args, strict=True)
            ]
            llvm_type = ir.VoidType() if returned == types.void else target.get_value_type(returned)
            pointer = ir.FunctionType(llvm_type, [value.type for value in arguments_]).as_pointer()
            result = builder.call(builder.inttoptr(values[0], pointer), arguments_)
            return target.get_dummy_value() if returned == types.void else result

        return returned(address, arguments), lower

    return intrinsic(call)


def _has_clock() -> bool:
    try:
        return hasattr(time, "CLOCK_MONOTONIC") and hasattr(ctypes.CDLL(None), "clock_gettime")
    except (OSError, TypeError):  # Windows cannot load a library without a name
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
    """Add the nanoseconds since the previous lap to the total of ``source``; do nothing unless ``work.timed``."""
    if work.timed:
        _read(MONOTONIC, work.instant_at)
        now = work.instant[0] * 1_000_000_000 + work.instant[1]
        work.laps[source] += now - work.since
        work.since = now


@compiled
def start_clock(work: Any) -> None:
    """Set all lap totals to 0 and, if ``work.timed``, start the first lap."""
    lap(work, 0)
    work.laps[:] = 0


class SharedTime:
    """Splits a total time among parts in proportion to the laps measured for each."""

    def __init__(self, parts: int) -> None:
        self._laps, self._seconds = np.zeros((2, parts))
        self._spent = 0.0

    def spend(self, seconds: float) -> None:
        self._spent += seconds

    def add_laps(self, laps: Array) -> None:
        self._laps += laps

    def seconds(self) -> list[float]:
        """Return the seconds attributed to each part; later calls never return less for a part."""
        if total := self._laps.sum():
            self._seconds += self._spent * self._laps / total
            self._spent = 0.0
        return self._seconds.tolist()  # type: ignore[no-any-return]


class Uncopyable:
    """Base class of objects that can't be copied or pickled, because compiled code holds addresses of their memory."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled, as it holds addresses of its memory: make a new one"
        )


def return_free_memory() -> None:
    """Return freed heap memory to the operating system, which glibc doesn't do by itself; do nothing without glibc."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


BYTES = ir.IntType(8).as_pointer()
WORD = ir.IntType(32)
WORD_SIZE = 8
"""Size of an int64 in bytes."""


@generated(types.int64, returns=types.voidptr)
def pointer(builder: Any, address: Any) -> Any:
    """Convert an integer address to a pointer."""
    return builder.inttoptr(address, BYTES)


def _prefetch(context: Any, array: Any, index: Any) -> Any:
    """Prefetch an array item into the cache."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        view = target.make_array(signature.args[0])(target, builder, arguments[0])
        function_type = ir.FunctionType(ir.VoidType(), [BYTES, WORD, WORD, WORD])
        function = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
            builder.module, function_type, "llvm.prefetch.p0"
        )
        address = builder.bitcast(builder.gep(view.data, [arguments[1]]), BYTES)
        builder.call(function, [address, WORD(0), WORD(3), WORD(1)])  # read, high locality, data cache
        return target.get_dummy_value()

    return types.void(array, index), generate


# Typed as Any because numba supplies the context argument.
prefetch: Any = intrinsic(_prefetch)


def _array_at(context: Any, address: Any, shape: Any, kind: Any) -> Any:
    """Return an array view of the memory at an address; ``shape`` is a number or a tuple."""
    is_tuple = isinstance(shape, types.BaseTuple)
    kinds: Any = shape if is_tuple else [shape]
    array: Any = types.Array(kind.dtype, len(kinds), "C")

    def lower(target: Any, builder: Any, signature: Any, values: Any) -> Any:
        at = target.cast(builder, values[0], address, types.intp)
        lengths: Any = cgutils.unpack_tuple(builder, values[1]) if is_tuple else [values[1]]  # type: ignore[no-untyped-call]
        sizes = [
            target.cast(builder, length, length_kind, types.intp)
            for length, length_kind in zip(lengths, kinds, strict=True)
        ]
        item = target.get_constant(types.intp, target.get_abi_sizeof(target.get_data_type(array.dtype)))
        strides = [item]
        for size in reversed(sizes[1:]):
            strides.insert(0, builder.mul(strides[0], size))
        view: Any = make_array(array)(target, builder)  # type: ignore[no-untyped-call]
        data = builder.inttoptr(at, view.data.type)
        populate_array(view, data, sizes, strides, item, None)  # type: ignore[no-untyped-call]
        return view._getvalue()

    return array(address, shape, kind), lower


# numba supplies the context.
array_at: Callable[[Any, Any, Any], npt.NDArray[Any]] = intrinsic(_array_at)  # type: ignore[assignment]


def _struct_at(context: Any, address: Any, kind: Any) -> Any:
    """Return the record at an address; ``kind`` is its dtype."""

    def lower(target: Any, builder: Any, signature: Any, values: Any) -> Any:
        at = target.cast(builder, values[0], address, types.intp)
        return builder.inttoptr(at, target.get_value_type(signature.return_type))

    return kind.dtype(address, kind), lower


def _struct_address(context: Any, record: Any) -> Any:
    """Return a record's address."""

    def lower(target: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.ptrtoint(values[0], target.get_value_type(types.int64))

    return types.int64(record), lower


struct_at: Callable[[Any, Any], Record] = intrinsic(_struct_at)  # type: ignore[assignment]
struct_address: Callable[[Record], int] = intrinsic(_struct_address)  # type: ignore[assignment]


def zeroed_records(kind: np.dtype[Any], count: int = 1) -> Record:
    """Return an array of records whose fields are zeros and are read and set as attributes, as in compiled code."""
    return np.zeros(count, kind).view(np.recarray)


@compiled
def copy_floats(source_at: int, count: int, target_at: int) -> None:
    """Copy ``count`` float32 numbers from one address to another."""
    source, target = array_at(source_at, (count,), types.float32), array_at(target_at, (count,), types.float32)
    for index in range(count):  # slice assignment takes four seconds longer to compile
        target[index] = source[index]


@compiled
def clear_floats(address: int, count: int) -> None:
    """Set ``count`` float32 numbers at an address to 0."""
    target = array_at(address, (count,), types.float32)
    for index in range(count):
        target[index] = 0.0
