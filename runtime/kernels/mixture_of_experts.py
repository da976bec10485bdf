"""Routes tokens to experts and mixes their outputs, reading only the weights of experts that a token is routed to.

A token's expert outputs are added in expert order, so its result is bitwise independent of other tokens.
"""

from __future__ import annotations

import numpy as np
from numba import types

from hdtool.runtime.kernels.compiled import Array, Record, array_at, compiled, copy_floats
from hdtool.runtime.kernels.matmul_choice import MATMUL
from hdtool.runtime.kernels.row_operations import (
    activate,
    add_in_place,
    gate_halves,
    gate_pairs,
)
from hdtool.runtime.kernels.thread_pool import parallel_matmul
from hdtool.runtime.kernels.vector_code import ITEM_SIZE

ROUTER = np.dtype(
    [
        ("scores", MATMUL),
        ("top_k", np.int64),  # experts per token
        ("has_sigmoids", np.bool_),  # True if routing weights are sigmoids of the scores instead of a softmax
        ("renormalizes", np.bool_),  # True if a token's routing weights are scaled to sum to 1
        ("correction", np.int64),  # address of a term added to routing weights only to choose experts, or 0
        ("groups", np.int64),  # number of expert groups
        ("used_groups", np.int64),  # number of expert groups per token
        ("group_top", np.int64),  # 1 to rank groups by their best score, 2 by the sum of their two best scores
        ("factor", np.float32),  # applied to the final routing weights
        ("sum_offset", np.float32),  # added to the sum by which routing weights are divided
        ("min_sum", np.float32),  # minimum of this sum
        ("shared_gate", MATMUL),  # its one row gives the sigmoid that weights the shared expert; none for a weight of 1
    ],
    align=True,
)


@compiled
def route(router: Record, scores: Array, chosen: Array, routing_weights: Array) -> None:
    """Write the top experts of each row to ``chosen``, best first, and their weights to ``routing_weights``.

    ``scores`` ``[rows, experts]`` are overwritten.
    """
    rows, top_k = chosen.shape
    factor = router.factor
    for row in range(rows):
        row_scores = scores[row]
        choices = row_scores.copy()
        _to_routing_weights(row_scores, router.has_sigmoids)
        if router.correction:
            correction = array_at(router.correction, (len(row_scores),), types.float32)
            for expert in range(len(row_scores)):
                choices[expert] = row_scores[expert] + correction[expert]
        if router.used_groups < router.groups:
            _hide_groups(choices, router.groups, router.used_groups, router.group_top)
        total = np.float32(0)
        for rank in range(top_k):
            best = np.argmax(choices)
            chosen[row, rank], routing_weights[row, rank] = best, row_scores[best]
            total += row_scores[best]
            choices[best] = -np.inf
        divisor = max(total + router.sum_offset, router.min_sum) if router.renormalizes else np.float32(1)
        for rank in range(top_k):
            routing_weights[row, rank] = routing_weights[row, rank] / divisor * factor


@compiled
def _to_routing_weights(scores: Array, is_sigmoid: bool) -> None:
    if is_sigmoid:
        for expert in range(len(scores)):
            scores[expert] = np.float32(1) / (np.float32(1) + np.exp(-scores[expert]))
        return
    largest, total = scores.max(), np.float32(0)
    for expert in range(len(scores)):
        scores[expert] = np.exp(scores[expert] - largest)
        total += scores[expert]
    for expert in range(len(scores)):
        scores[expert] /= total


@compiled
def _hide_groups(choices: Array, groups: int, used: int, top: int) -> None:
    """Rank groups by the sum of their ``top`` (1 or 2) best scores; set scores outside the best ``used`` to -inf."""
    size = len(choices) // groups
    best = np.empty(groups, np.float32)
    for group in range(groups):
        first, second = np.float32(-np.inf), np.float32(-np.inf)
        for expert in range(group * size, (group + 1) * size):
            if choices[expert] > first:
                first, second = choices[expert], first
            elif choices[expert] > second:
                second = choices[expert]
        best[group] = first + second if top > 1 else first
    is_used = np.zeros(groups, np.bool_)
    for _ in range(used):
        top_group = np.argmax(best)
        is_used[top_group], best[top_group] = True, -np.inf
    for group in range(groups):
        if not is_used[group]:
            choices[group * size : (group + 1) * size] = -np.inf


EXPERTS = np.dtype(
    [
        ("count", np.int64),
        ("width", np.int64),  # hidden size
        ("inner", np.int64),  # intermediate size
        ("expand", np.int64),  # address of the gate and up matmul's kernels
        ("gate", np.int64),  # address of the first expert's matrix
        ("gate_size", np.int64),  # bytes per expert
        ("up", np.int64),  # address of the first expert's matrix; 0 if interleaved with the gate, or without gates
        ("up_size", np.int64),
        ("expand_bias", np.int64),  # address, 0 for none
        ("reduce", np.int64),  # address of the down matmul's kernels
        ("down", np.int64),  # address of the first expert's matrix
        ("down_size", np.int64),
        ("reduce_bias", np.int64),  # address, 0 for none
        ("has_pairs", np.bool_),  # True if gate and up are interleaved in their bias
        ("alpha", np.float32),  # constants of the activation with ``has_pairs``
        ("limit", np.float32),
        ("activation", np.int64),  # without ``has_pairs``, see ``row_operations.ACTIVATIONS``
    ],
    align=True,
)


def experts_scratch_size(experts: Record, rows: int) -> int:
    """Return the size of the scratch memory that ``mix_experts`` needs, in float32 numbers."""
    return int(2 * rows * (experts["width"] + experts["inner"]))


@compiled
def mix_experts(
    thread_pool: int,
    threads: int,
    experts: Record,
    chosen: Array,
    routing_weights: Array,
    inputs: int,
    outputs: int,
    scratch: int,
) -> int:
    """Write each row's weighted sum of expert outputs; return the number of distinct experts used.

    ``chosen`` and ``routing_weights`` ``[rows, top_k]`` are each row's experts and their weights. ``inputs`` and
    ``outputs`` are addresses of float32 rows, ``scratch`` that of ``experts_scratch_size`` numbers.
    """
    rows, top_k = chosen.shape
    width, inner = experts.width, experts.inner
    array_at(outputs, (rows * width,), types.float32)[:] = 0
    gathered, gate = scratch, scratch + rows * width * ITEM_SIZE
    products = gate + 2 * rows * inner * ITEM_SIZE
    order = np.argsort(chosen.ravel(), kind="mergesort")
    first = active_experts = 0
    while first < rows * top_k:
        expert = chosen[order[first] // top_k, order[first] % top_k]
        end = first
        while end < rows * top_k and chosen[order[end] // top_k, order[end] % top_k] == expert:
            row = order[end] // top_k
            copy_floats(inputs + row * width * ITEM_SIZE, width, gathered + (end - first) * width * ITEM_SIZE)
            end += 1
        count = end - first
        _expand(thread_pool, threads, experts, expert, gathered, count, gate)
        matrix = experts.down + expert * experts.down_size
        bias = experts.reduce_bias + expert * width * ITEM_SIZE if experts.reduce_bias else 0
        parallel_matmul(thread_pool, threads, experts.reduce, matrix, width, inner, gate, count, products, bias)
        for pair in range(first, end):
            row, product = order[pair] // top_k, products + (pair - first) * width * ITEM_SIZE
            add_in_place(outputs + row * width * ITEM_SIZE, product, width, routing_weights[row, order[pair] % top_k])
        first, active_experts = end, active_experts + 1
    return active_experts


@compiled
def _expand(thread_pool: int, threads: int, experts: Record, expert: int, inputs: int, rows: int, gate: int) -> None:
    """Write ``act(gate) * up`` of one expert, or ``act(up)`` if experts have no gate, to ``gate``.

    ``gate`` must have room for both projections of all rows.
    """
    width, inner = experts.width, experts.inner
    matrix, up_matrix = experts.gate + expert * experts.gate_size, experts.up + expert * experts.up_size
    bias = experts.expand_bias + 2 * expert * inner * ITEM_SIZE if experts.expand_bias else 0
    alpha, limit = experts.alpha, experts.limit
    if experts.has_pairs and not experts.up:
        parallel_matmul(thread_pool, threads, experts.expand, matrix, 2 * inner, width, inputs, rows, gate, bias)
        gate_pairs(gate, rows * inner, alpha, limit, gate)
        return
    up = gate + rows * inner * ITEM_SIZE if experts.up else 0
    parallel_matmul(thread_pool, threads, experts.expand, matrix, inner, width, inputs, rows, gate, 0)
    if up:
        parallel_matmul(thread_pool, threads, experts.expand, up_matrix, inner, width, inputs, rows, up, 0)
    if experts.has_pairs:
        for row in range(rows):
            first = row * inner * ITEM_SIZE
            gate_halves(gate + first, up + first, bias, inner, alpha, limit)
    else:
        activate(experts.activation, gate, up, rows * inner)
