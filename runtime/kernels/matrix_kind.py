"""Matrix formats as zero-size arguments of compiled code: numba compiles one version per type."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from numba import types
from numba.core.imputils import lower_constant
from numba.core.typing.typeof import typeof_impl
from numba.extending import NativeValue, models, register_model, unbox

from hdtool.runtime.kernels.compiled import generated
from hdtool.runtime.kernels.vector_code import INDEX


@dataclass(frozen=True)
class MatrixKind:
    name: str


class MatrixKindType(types.Type):
    """Numba type of one matrix kind."""

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


Case = TypeVar("Case")
Tile = Callable[..., None]
"""Generates a tile's code from a builder, the matrix type and the other arguments of ``by_rows``."""


def by_rows(tiles: Mapping[int, Tile]) -> Any:
    """An intrinsic that runs the tile for ``rows``, its last argument and a key of ``tiles``.

    Arrays are given by address; ``kind`` is the matrix format.
    """

    @generated(types.int64, None, *[types.int64] * 5)
    def run(
        builder: Any, matrix: Any, kind: Any, columns: Any, inputs: Any, outputs: Any, output_stride: Any, rows: Any
    ) -> None:
        for _, tile in cases(builder, rows, tiles):
            tile(builder, kind, matrix, columns, inputs, outputs, output_stride)

    return run


def cases(builder: Any, number: Any, by_number: Mapping[int, Case]) -> Iterator[tuple[int, Case]]:
    """Open a switch case for each key; code generated in an iteration runs in that case only."""
    end = builder.append_basic_block("end")
    switch = builder.switch(number, end)
    for key, case in by_number.items():
        block = builder.append_basic_block(f"case_{key}")
        switch.add_case(INDEX(key), block)
        builder.position_at_end(block)
        yield key, case
        builder.branch(end)
    builder.position_at_end(end)
