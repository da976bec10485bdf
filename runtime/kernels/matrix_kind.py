"""What the numbers of a matrix are, as an argument of compiled code: it has a type and no value.

numba compiles a function once for each type of its arguments, so there is a version for each kind of matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numba import types
from numba.core.imputils import lower_constant
from numba.core.typing.typeof import typeof_impl
from numba.extending import NativeValue, models, register_model, unbox


@dataclass(frozen=True)
class MatrixKind:
    name: str


class MatrixKindType(types.Type):
    """The type of one kind in compiled code."""

    def __init__(self, kind_name: str) -> None:
        super().__init__(f"MatrixKind({kind_name})")


register_model(MatrixKindType)(models.OpaqueModel)


def type_of(kind: MatrixKind) -> MatrixKindType:
    return MatrixKindType(kind.name)


@typeof_impl.register(MatrixKind)
def _typeof(kind: MatrixKind, _: object) -> MatrixKindType:
    return type_of(kind)


@unbox(MatrixKindType)  # type: ignore[no-untyped-call]
def _unboxed(_: object, __: object, compiled: Any) -> Any:
    return NativeValue(compiled.context.get_dummy_value())  # type: ignore[no-untyped-call]


@lower_constant(MatrixKindType)  # type: ignore[no-untyped-call]
def _constant(target: Any, _: object, __: object, ___: object) -> Any:
    return target.get_dummy_value()
