"""The decorators of what numba compiles on first use and keeps on the disk, and of intrinsics of such code.

When compiled code calls a function, numba compiles that function once more for each constant that is passed to it and
for each width of integers, and with it all that it calls. One version for all takes half the time to compile, and is as
fast: LLVM inlines small functions, constants included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar

import numba
import numpy.typing as npt
from numba import types
from numba.extending import intrinsic

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
