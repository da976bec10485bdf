"""Calls from the code of a layer: a matmul of its record, and a part between matmuls, shared by threads."""

from __future__ import annotations

from hdtool.runtime.engines.cpu.layer_record import MATMUL_FIELDS, TEAM, THREADS, Numbers
from hdtool.runtime.kernels.compiled import compiled
from hdtool.runtime.kernels.team import LEAST_NUMBERS, compute_together, multiply_together


@compiled
def multiply(shape: Numbers, layer: Numbers, which: int, inputs: int, rows: int, outputs: int) -> None:
    multiply_by(shape, layer, which * MATMUL_FIELDS, inputs, rows, outputs)


@compiled
def multiply_by(shape: Numbers, layer: Numbers, field: int, inputs: int, rows: int, outputs: int) -> None:
    """Multiply by the matrix whose fields begin there."""
    matmul, matrix, out_features, columns, bias = layer[field : field + MATMUL_FIELDS]
    multiply_together(shape[TEAM], shape[THREADS], matmul, matrix, out_features, columns, inputs, rows, outputs, bias)


@compiled
def compute_part(
    shape: Numbers,
    function: int,
    layer: Numbers,
    starts: Numbers,
    part: int,
    one: int,
    two: int,
    three: int,
    units: int,
    work: int,
) -> None:
    """Compute a part between matmuls, with the other threads if there is enough work."""
    team = shape[TEAM] if work >= LEAST_NUMBERS else 0
    of_layer = shape.ctypes.data, layer.ctypes.data, starts.ctypes.data
    compute_together(team, shape[THREADS], function, *of_layer, part, one, two, three, units, 1)
