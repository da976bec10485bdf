"""The decorator of what numba compiles on first use and keeps on the disk.

When compiled code calls a function, numba compiles that function once more for each constant that is passed to it and
for each width of integers, and with it all that it calls. One version for all takes half the time to compile, and is as
fast: LLVM inlines small functions, constants included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numba
from numba import types

Function = TypeVar("Function", bound=Callable[..., Any])

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


def _general(kind: Any) -> Any:
    number: Any = types.unliteral(kind)  # type: ignore[no-untyped-call]
    return types.int64 if number in types.signed_domain else number
