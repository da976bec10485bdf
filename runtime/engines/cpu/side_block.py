"""Computes what a block beside a mixer needs besides attention and MLP: joined rows, norms, and the mixer's input.

``compute_layers`` calls this code by its address, so that it is compiled only for models with such blocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hdtool.runtime.engines.cpu.layer_record import LAYER, PASS, apply_norm, multiply
from hdtool.runtime.kernels.compiled import Record, c_function, compiled, copy_floats, struct_at
from hdtool.runtime.kernels.matmul_choice import STEP
from hdtool.runtime.kernels.row_operations import add_in_place
from hdtool.runtime.kernels.vector_code import ITEM_SIZE

JOIN, NORM_ATTENDED, ADD_HIDDEN = range(3)
"""Steps of a side block between its matmuls, for ``side_function``."""


@compiled
def side_scratch_size(pass_record: Record, layer: Record) -> int:
    """Return how many float32 values of scratch memory a layer's side block needs per row."""
    adapted = 0
    for adapter in (layer.adapters.queries, layer.adapters.gate):
        adapted = max(adapted, adapter.first.out_features + adapter.second.out_features)
    return 2 * pass_record.hidden + adapted if layer.side_out.kernels else 0


@compiled
def multiply_adapted(
    pass_record: Record, matmul: Record, adapter: Record, read: int, rows: int, scratch: int, written: int
) -> None:
    """Call ``multiply`` and then add the output of the matmul's adapter, if it has one."""
    multiply(pass_record, matmul, read, rows, written)
    if adapter.first.kernels:
        added = scratch + rows * adapter.first.out_features * ITEM_SIZE
        multiply(pass_record, adapter.first, read, rows, scratch)
        multiply(pass_record, adapter.second, scratch, rows, added)
        add_in_place(written, added, rows * matmul.out_features, np.float32(1))


@c_function(STEP)
def side_function() -> Any:
    """Return the C function that computes any of a side block's steps for rows ``first`` to ``end - 1``."""

    def compute_step(
        pass_at: int,
        layer_at: int,
        step: int,
        one: int,
        two: int,
        three: int,
        _: int,
        __: int,
        first: int,
        end: int,
    ) -> None:
        pass_record, layer = struct_at(pass_at, PASS), struct_at(layer_at, LAYER)
        rows, width, epsilon = end - first, pass_record.hidden, pass_record.epsilon
        size = width * ITEM_SIZE
        at = first * size
        if step == JOIN:
            for row in range(first, end):
                copy_floats(one + row * size, width, two + 2 * row * size)
                copy_floats(pass_record.embedded + row * size, width, two + (2 * row + 1) * size)
            apply_norm(pass_record, layer.side_norm, epsilon, two + 2 * at, rows, 2 * width, two + 2 * at)
        elif step == NORM_ATTENDED:
            apply_norm(pass_record, layer.norm_before_mlp, epsilon, one + at, rows, width, one + at)
        else:
            add_in_place(one + at, two + at, rows * width, np.float32(1))
            apply_norm(pass_record, layer.norm_before_mixer, epsilon, one + at, rows, width, three + at)

    return compute_step
