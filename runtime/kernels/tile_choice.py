"""The choice of a product's tile by the number of its input rows, in compiled code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from numba import types

from hdtool.runtime.kernels.compiled import generated
from hdtool.runtime.kernels.vector_code import INDEX

Case = TypeVar("Case")
Tile = Callable[..., None]
"""Generates the code of a tile, from a builder, the type of the matrix and the other arguments of ``by_rows``."""


def by_rows(tiles: Mapping[int, Tile]) -> Any:
    """An intrinsic that runs the tile of so many input rows; ``rows``, its last argument, must be a key of ``tiles``.

    All arrays are given by addresses; ``kind`` states the format of the matrix.
    """

    @generated(types.int64, None, *[types.int64] * 5)
    def run(
        builder: Any, matrix: Any, kind: Any, columns: Any, inputs: Any, outputs: Any, apart: Any, rows: Any
    ) -> None:
        for _, tile in cases(builder, rows, tiles):
            tile(builder, kind, matrix, columns, inputs, outputs, apart)

    return run


def cases(builder: Any, number: Any, by_number: Mapping[int, Case]) -> Iterator[tuple[int, Case]]:
    """Each case of a number with its key; code that is generated meanwhile runs in this case alone."""
    end = builder.append_basic_block("end")
    switch = builder.switch(number, end)
    for key, case in by_number.items():
        block = builder.append_basic_block(f"case_{key}")
        switch.add_case(INDEX(key), block)
        builder.position_at_end(block)
        yield key, case
        builder.branch(end)
    builder.position_at_end(end)
