"""Compiles functions for compiled callers, without the machine code that only a call from Python needs.

For each function that a compiled one calls, numba also generates separate machine code, wraps this for calls from
Python and writes it to the cache, although the caller's code contains the function. Leaving this out shortens
compilation by a fifth. Callers link the same LLVM module, so their code is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from numba.core import compiler as numba_compiler, typing as numba_typing
from numba.core.codegen import JITCodeLibrary

Types = tuple[Any, ...]
# Without annotations in numba.
compiler: Any = numba_compiler
typing: Any = numba_typing


class _LinkedLibrary(JITCodeLibrary):
    """A library of LLVM code that is linked into others and never run by itself."""

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()  # type: ignore[no-untyped-call]
        self._finalized = True


class _Specialization(NamedTuple):
    compiled: Any
    key: object
    """Object under which numba's target context finds the code."""


class InnerFunction:
    """Compiles specializations of a dispatcher's function for compiled callers."""

    def __init__(self, dispatcher: Any, general: Callable[[Any], Any]) -> None:
        """``general`` maps the type of an argument to the type to compile for."""
        self._dispatcher, self._general = dispatcher, general
        self._found, self._found_overload = dispatcher.get_call_template, dispatcher.get_overload
        self._specializations: dict[Types, _Specialization] = {}
        dispatcher.get_call_template, dispatcher.get_overload = self._template, self._key

    def _template(self, args: Sequence[Any], kws: Mapping[str, Any]) -> Any:
        """Return what numba's ``get_call_template`` returns; compile the specialization if it is new."""
        general, dispatcher = self._general, self._dispatcher
        args, kws = tuple(map(general, args)), {name: general(kind) for name, kind in kws.items()}
        signature, folded = dispatcher.fold_argument_types(args, kws)
        kinds = tuple(folded)
        if kinds in dispatcher.overloads:  # compiled for a call from Python
            return self._found(args, kws)
        if kinds not in self._specializations:
            self._specializations[kinds] = self._compile(kinds)
        signatures = [each.compiled.signature for each in self._specializations.values()]
        name = dispatcher.py_func.__name__
        return typing.make_concrete_template(name, key=name, signatures=signatures), signature, kinds, {}

    def _key(self, kinds: Sequence[Any]) -> Any:
        specialization = self._specializations.get(tuple(kinds))
        return specialization.key if specialization else self._found_overload(kinds)

    def _compile(self, kinds: Types) -> _Specialization:
        dispatcher = self._dispatcher
        flags = compiler.Flags()
        dispatcher.targetdescr.options.parse_as_flags(flags, dispatcher.targetoptions)
        flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
        codegen, name = dispatcher.targetctx.codegen(), dispatcher.py_func.__qualname__
        library = _LinkedLibrary(codegen, name)  # type: ignore[no-untyped-call]
        found = compiler.compile_extra(
            dispatcher.typingctx,
            dispatcher.targetctx,
            dispatcher.py_func,
            args=kinds,
            return_type=None,
            flags=flags,
            locals={},
            library=library,
        )
        key = object()
        dispatcher.targetctx.insert_user_function(key, found.fndesc, [found.library])
        return _Specialization(found, key)
