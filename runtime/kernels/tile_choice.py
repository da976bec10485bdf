"""The choice of a product's tile by the number of its input rows, in compiled code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from numba import types

from hdtool.runtime.kernels.compiled import generated
from hdtool.runtime.kernels.vector_code import INDEX

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
        end = builder.append_basic_block("end")
        switch = builder.switch(rows, end)
        for number, tile in tiles.items():
            block = builder.append_basic_block(f"rows_{number}")
            switch.add_case(INDEX(number), block)
            builder.position_at_end(block)
            tile(builder, kind, matrix, columns, inputs, outputs, apart)
            builder.branch(end)
        builder.position_at_end(end)

    return run
