"""Computes the experts of decoder layers in compiled code.

``compute_layers`` calls this code by its address, so that it is compiled only for models with experts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from hdtool.runtime.engines.cpu.layer_record import LAYER, PASS, multiply
from hdtool.runtime.kernels.compiled import Record, array_at, c_function, caller_of, compiled, copy_floats, struct_at
from hdtool.runtime.kernels.mixture_of_experts import mix_experts, route
from hdtool.runtime.kernels.row_operations import add_in_place, norm_rows, scale_in_place
from hdtool.runtime.kernels.vector_code import ITEM_SIZE


@compiled
def _add_mixture(pass_record: Record, layer: Record, attended: int, rows: int, dense: int, scratch: int) -> None:
    """Normalize an MLP's output ``dense`` in place and add the experts' normalized output.

    ``attended`` is the address of the hidden states after attention, which the router and the experts read.
    """
    mixture, experts, router = layer.added_mixture, layer.experts, layer.router
    expert_count, width, top_k = experts.count, pass_record.hidden, router.top_k
    epsilon, offset = pass_record.epsilon, pass_record.norm_offset
    read = scratch + rows * expert_count * ITEM_SIZE
    mixed = read + rows * width * ITEM_SIZE
    norm_rows(dense, rows, width, mixture.norm_mlp_output, offset, epsilon, dense)
    norm_rows(attended, rows, width, mixture.norm_router_input, np.float32(0), epsilon, read)
    scale_in_place(read, rows * width, mixture.router_input_factor)
    multiply(pass_record, router.scores, read, rows, scratch)
    chosen, routing_weights = np.empty((rows, top_k), np.int64), np.empty((rows, top_k), np.float32)
    route(router, array_at(scratch, (rows, expert_count), np.float32), chosen, routing_weights)
    factors = array_at(mixture.expert_scales, (expert_count,), np.float32)
    for row in range(rows):
        for rank in range(top_k):
            routing_weights[row, rank] *= factors[chosen[row, rank]]
    norm_rows(attended, rows, width, mixture.norm_experts_input, offset, epsilon, read)
    rest = mixed + rows * width * ITEM_SIZE
    pass_record.active_experts += mix_experts(
        pass_record.thread_pool, pass_record.threads, experts, chosen, routing_weights, read, mixed, rest
    )
    norm_rows(mixed, rows, width, mixture.norm_experts_output, offset, epsilon, mixed)
    add_in_place(dense, mixed, rows * width, np.float32(1))


@compiled
def _mix(pass_record: Record, layer: Record, inputs: int, rows: int, scratch: int) -> None:
    """Write each row's weighted sum of expert outputs to ``scratch``, and after the sums the shared gate's scores."""
    experts, router = layer.experts, layer.router
    shared_scores = scratch + rows * pass_record.hidden * ITEM_SIZE
    scores_at = shared_scores + rows * ITEM_SIZE
    scores = array_at(scores_at, (rows, experts.count), types.float32)
    chosen, routing_weights = np.empty((rows, router.top_k), np.int64), np.empty((rows, router.top_k), np.float32)
    multiply(pass_record, router.scores, inputs, rows, scores_at)
    route(router, scores, chosen, routing_weights)
    if router.shared_gate.kernels:
        multiply(pass_record, router.shared_gate, inputs, rows, shared_scores)
    rest = scores_at + rows * experts.count * ITEM_SIZE
    pass_record.active_experts += mix_experts(
        pass_record.thread_pool, pass_record.threads, experts, chosen, routing_weights, inputs, scratch, rest
    )


@compiled
def _add_shared(pass_record: Record, layer: Record, rows: int, mixed: int, outputs: int) -> None:
    """Add the gated output of the shared expert, if any, to ``_mix``'s output ``mixed``; copy the sum to ``outputs``.

    ``outputs`` initially holds the shared expert's output.
    """
    size = rows * pass_record.hidden
    if layer.down.kernels:
        scores = array_at(mixed + size * ITEM_SIZE, (rows,), types.float32)
        for row in range(rows):
            gate, at = np.float32(1), row * pass_record.hidden * ITEM_SIZE
            if layer.router.shared_gate.kernels:
                gate /= np.float32(1) + np.exp(-scores[row])
            add_in_place(mixed + at, outputs + at, pass_record.hidden, gate)
    copy_floats(mixed, size, outputs)


MIX, ADD_SHARED, ADD_MIXTURE = range(3)
"""Steps of a layer's experts, for ``expert_function``."""
EXPERT_STEP = types.void(*[types.int64] * 7)
"""Signature of ``expert_function``."""
call_expert_step = caller_of(EXPERT_STEP)


@c_function(EXPERT_STEP)
def expert_function() -> Any:
    """Return the C function that computes any step of a layer's experts for some rows."""

    def compute_experts(
        pass_at: int, layer_at: int, step: int, read: int, rows: int, scratch: int, outputs: int
    ) -> None:
        pass_record, layer = struct_at(pass_at, PASS), struct_at(layer_at, LAYER)
        if step == MIX:
            _mix(pass_record, layer, read, rows, scratch)
        elif step == ADD_SHARED:
            _add_shared(pass_record, layer, rows, scratch, outputs)
        else:
            _add_mixture(pass_record, layer, read, rows, outputs, scratch)

    return compute_experts
