"""Computes the experts of decoder layers in compiled code.

``compute_layers`` calls this code by its address, so that it is compiled only for models with experts.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cfunc, types

from hdtool.runtime.engines.cpu.layer_record import (
    ACTIVE_EXPERTS,
    ADDED_MIXTURE,
    EPSILON,
    EXPERTS,
    FIELDS,
    HIDDEN,
    MATMUL_FIELDS,
    OFFSET,
    PASS_FIELDS,
    ROUTER,
    THREAD_POOL,
    THREADS,
    TO_DOWN,
    Record,
    multiply_by,
)
from hdtool.runtime.kernels.compiled import array_at, compiled, copy_floats, float_of
from hdtool.runtime.kernels.experts import (
    EXPERT_COUNT,
    EXPERT_FIELDS,
    ROUTE,
    ROUTER_FIELDS,
    SHARED_GATE,
    TOP_K,
    mix_experts,
    route,
)
from hdtool.runtime.kernels.gemm import MATMUL_ARGUMENTS
from hdtool.runtime.kernels.vector_code import ITEM_SIZE, add_in_place, norm_rows, scale_in_place

(
    MIXTURE_EXPERTS,
    MIXTURE_ROUTER,
    NORM_MLP_OUTPUT,
    NORM_EXPERTS_INPUT,
    NORM_EXPERTS_OUTPUT,
    NORM_ROUTER_INPUT,
    ROUTER_INPUT_FACTOR,
    EXPERT_SCALES,
) = range(8)
"""Record of a mixture of experts that is added to an MLP.

MIXTURE_EXPERTS, MIXTURE_ROUTER: addresses of the experts' and the router's records. NORM_MLP_OUTPUT to
NORM_ROUTER_INPUT: addresses of the norm weights for the MLP's output, the experts' input, the experts' output and the
router's input. ROUTER_INPUT_FACTOR: bits of the factor that scales the router's input. EXPERT_SCALES: address of the
factors that scale the experts' outputs.
"""
MIXTURE_FIELDS = EXPERT_SCALES + 1


@compiled
def _add_mixture(pass_record: Record, record_at: int, attended: int, rows: int, dense: int, scratch: int) -> None:
    """Normalize an MLP's output ``dense`` in place and add the experts' normalized output.

    ``record_at`` is the address of the mixture's record, and ``attended`` that of the hidden states after attention,
    which the router and the experts read.
    """
    record = array_at(record_at, (MIXTURE_FIELDS,), np.int64)
    experts = array_at(record[MIXTURE_EXPERTS], (EXPERT_FIELDS,), np.int64)
    router = array_at(record[MIXTURE_ROUTER], (ROUTER_FIELDS,), np.int64)
    expert_count, width, top_k = experts[EXPERT_COUNT], pass_record[HIDDEN], router[TOP_K]
    epsilon, offset = float_of(pass_record, EPSILON), float_of(pass_record, OFFSET)
    read = scratch + rows * expert_count * ITEM_SIZE
    mixed = read + rows * width * ITEM_SIZE
    norm_rows(dense, rows, width, record[NORM_MLP_OUTPUT], offset, epsilon, dense)
    norm_rows(attended, rows, width, record[NORM_ROUTER_INPUT], np.float32(0), epsilon, read)
    scale_in_place(read, rows * width, float_of(record, ROUTER_INPUT_FACTOR))
    multiply_by(pass_record, router, ROUTE, read, rows, scratch)
    chosen, routing_weights = np.empty((rows, top_k), np.int64), np.empty((rows, top_k), np.float32)
    route(router, array_at(scratch, (rows, expert_count), np.float32), chosen, routing_weights)
    factors = array_at(record[EXPERT_SCALES], (expert_count,), np.float32)
    for row in range(rows):
        for rank in range(top_k):
            routing_weights[row, rank] *= factors[chosen[row, rank]]
    norm_rows(attended, rows, width, record[NORM_EXPERTS_INPUT], offset, epsilon, read)
    rest = mixed + rows * width * ITEM_SIZE
    pass_record[ACTIVE_EXPERTS] += mix_experts(
        pass_record[THREAD_POOL], pass_record[THREADS], experts, chosen, routing_weights, read, mixed, rest
    )
    norm_rows(mixed, rows, width, record[NORM_EXPERTS_OUTPUT], offset, epsilon, mixed)
    add_in_place(dense, mixed, rows * width, np.float32(1))


@compiled
def _mix(pass_record: Record, layer: Record, inputs: int, rows: int, scratch: int) -> None:
    """Write each row's weighted sum of expert outputs to ``scratch``, and after the sums the shared gate's scores."""
    experts = array_at(layer[EXPERTS], (EXPERT_FIELDS,), types.int64)
    router = array_at(layer[ROUTER], (ROUTER_FIELDS,), types.int64)
    shared_scores = scratch + rows * pass_record[HIDDEN] * ITEM_SIZE
    scores_at = shared_scores + rows * ITEM_SIZE
    scores = array_at(scores_at, (rows, experts[EXPERT_COUNT]), types.float32)
    chosen, routing_weights = np.empty((rows, router[TOP_K]), np.int64), np.empty((rows, router[TOP_K]), np.float32)
    multiply_by(pass_record, router, ROUTE, inputs, rows, scores_at)
    route(router, scores, chosen, routing_weights)
    if router[SHARED_GATE]:
        multiply_by(pass_record, router, SHARED_GATE, inputs, rows, shared_scores)
    rest = scores_at + rows * experts[EXPERT_COUNT] * ITEM_SIZE
    pass_record[ACTIVE_EXPERTS] += mix_experts(
        pass_record[THREAD_POOL], pass_record[THREADS], experts, chosen, routing_weights, inputs, scratch, rest
    )


@compiled
def _add_shared(pass_record: Record, layer: Record, rows: int, mixed: int, outputs: int) -> None:
    """Add the gated output of the shared expert, if any, to ``_mix``'s output ``mixed``; copy the sum to ``outputs``.

    ``outputs`` initially holds the shared expert's output.
    """
    size = rows * pass_record[HIDDEN]
    if layer[TO_DOWN * MATMUL_FIELDS]:
        router = array_at(layer[ROUTER], (ROUTER_FIELDS,), types.int64)
        scores = array_at(mixed + size * ITEM_SIZE, (rows,), types.float32)
        for row in range(rows):
            gate, at = np.float32(1), row * pass_record[HIDDEN] * ITEM_SIZE
            if router[SHARED_GATE]:
                gate /= np.float32(1) + np.exp(-scores[row])
            add_in_place(mixed + at, outputs + at, pass_record[HIDDEN], gate)
    copy_floats(mixed, size, outputs)


MIX, ADD_SHARED, ADD_MIXTURE = range(3)
"""Steps of a layer's experts, for ``expert_function``."""


@cache
def expert_function() -> Any:
    """Return the C function that computes any step of a layer's experts for some rows."""

    @cfunc(types.void(*[types.int64] * MATMUL_ARGUMENTS), cache=True)
    def compute_experts(
        pass_at: int, layer_at: int, step: int, read: int, rows: int, scratch: int, outputs: int, _: int, __: int
    ) -> None:
        pass_record, layer = array_at(pass_at, (PASS_FIELDS,), types.int64), array_at(layer_at, (FIELDS,), types.int64)
        if step == MIX:
            _mix(pass_record, layer, read, rows, scratch)
        elif step == ADD_SHARED:
            _add_shared(pass_record, layer, rows, scratch, outputs)
        else:
            _add_mixture(pass_record, layer[ADDED_MIXTURE], read, rows, outputs, scratch)

    return compute_experts
