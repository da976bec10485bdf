"""Computes decoder layers in compiled code.

Each row is computed independently and in a fixed order of operations, so its result is bitwise the same for any other
rows and any number of threads.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cfunc, types

from hdtool.runtime.engines.cpu.attention import (
    BLOCK_QUERIES,
    MAX_BLOCK_QUERIES,
    attend,
    attention_numbers,
    block_queries,
    query_blocks,
)
from hdtool.runtime.engines.cpu.layer_record import (
    BESIDE,
    EPSILON,
    EXPERT_SCRATCH,
    EXPERTS,
    FACTOR,
    FIELDS,
    GATES_HEADS,
    GROUPS,
    HEAD_STRIDE,
    HEADS,
    HIDDEN,
    INNER,
    INPUT_AT,
    INPUT_GATE,
    INPUT_OUT,
    INPUTS,
    INPUTS_STRIDE,
    KEYS,
    MASK,
    MASK_ROW,
    MASK_SLOT,
    MATMUL_FIELDS,
    MIXER,
    NEW,
    NORM_BEFORE,
    NORM_END,
    NORM_INPUT,
    NORM_K,
    NORM_MIDDLE,
    NORM_MIXED,
    NORM_Q,
    NORM_V,
    NORMS_ALL,
    OFFSET,
    OUTPUTS,
    PAIRED,
    PART,
    PASS_FIELDS,
    PLACES,
    RESIDUAL,
    ROTARY,
    ROTARY_WIDTH,
    ROTATED,
    ROUTER,
    ROW_OFFSETS,
    SCALE,
    SINKS,
    SLOT_STRIDE,
    SLOTS,
    SOFTCAP,
    TANH_GATE,
    THREAD_POOL,
    THREADS,
    TO_DOWN,
    TO_GATE,
    TO_KEYS,
    TO_OUTPUT,
    TO_QUERIES,
    TO_UP,
    TO_VALUES,
    TOTAL_ROWS,
    TURNED,
    VALUES,
    WIDTH,
    WINDOW,
    WOKEN,
    Numbers,
    compute_part,
    multiply,
    multiply_by,
)
from hdtool.runtime.engines.cpu.mixers.delta_rule import gate_heads, split_gates
from hdtool.runtime.engines.cpu.mixers.mix import mix, mixer_function, mixer_numbers
from hdtool.runtime.kernels.compiled import WORD_SIZE, array_at, compiled, copy_numbers, float_of
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
from hdtool.runtime.kernels.thread_pool import parts_of
from hdtool.runtime.kernels.vector_code import (
    ITEM_SIZE,
    add_in_place,
    gelu_in_place,
    norm_row,
    norm_rows,
    rotate_head,
    rotate_pairs,
    scale_in_place,
    silu_in_place,
)

(
    BESIDE_EXPERTS,
    BESIDE_ROUTER,
    BESIDE_NORM_DENSE,
    BESIDE_NORM_READ,
    BESIDE_NORM_MIXED,
    BESIDE_NORM_ROUTED,
    BESIDE_FACTOR,
    BESIDE_SHARES,
) = range(8)
"""Record of a mixture of experts that is added to an MLP.

BESIDE_EXPERTS, BESIDE_ROUTER: addresses of their records. BESIDE_NORM_DENSE to BESIDE_NORM_ROUTED: addresses of the
norm weights for the MLP's output, the experts' input, the experts' output and the router's input. BESIDE_FACTOR: bits
of the factor of the router's input. BESIDE_SHARES: address of the factors of the experts' outputs.
"""
BESIDE_FIELDS = BESIDE_SHARES + 1


@compiled
def add_experts(shape: Numbers, record_at: int, attended: int, rows: int, dense: int, scratch: int) -> None:
    """Norm an MLP's output ``dense`` in place and add the normed experts' output.

    ``record_at`` is the address of the mixture's record, and ``attended`` that of the hidden states after attention,
    which the router and the experts read.
    """
    record = array_at(record_at, (BESIDE_FIELDS,), np.int64)
    experts = array_at(record[BESIDE_EXPERTS], (EXPERT_FIELDS,), np.int64)
    router = array_at(record[BESIDE_ROUTER], (ROUTER_FIELDS,), np.int64)
    expert_count, width, top_k = experts[EXPERT_COUNT], shape[HIDDEN], router[TOP_K]
    epsilon, offset = float_of(shape, EPSILON), float_of(shape, OFFSET)
    read = scratch + rows * expert_count * ITEM_SIZE
    mixed = read + rows * width * ITEM_SIZE
    norm_rows(dense, rows, width, record[BESIDE_NORM_DENSE], offset, epsilon, dense)
    norm_rows(attended, rows, width, record[BESIDE_NORM_ROUTED], np.float32(0), epsilon, read)
    scale_in_place(read, rows * width, float_of(record, BESIDE_FACTOR))
    multiply_by(shape, router, ROUTE, read, rows, scratch)
    chosen, shares = np.empty((rows, top_k), np.int64), np.empty((rows, top_k), np.float32)
    route(router, array_at(scratch, (rows, expert_count), np.float32), chosen, shares)
    factors = array_at(record[BESIDE_SHARES], (expert_count,), np.float32)
    for row in range(rows):
        for rank in range(top_k):
            shares[row, rank] *= factors[chosen[row, rank]]
    norm_rows(attended, rows, width, record[BESIDE_NORM_READ], offset, epsilon, read)
    rest = mixed + rows * width * ITEM_SIZE
    shape[WOKEN] += mix_experts(shape[THREAD_POOL], shape[THREADS], experts, chosen, shares, read, mixed, rest)
    norm_rows(mixed, rows, width, record[BESIDE_NORM_MIXED], offset, epsilon, mixed)
    add_in_place(dense, mixed, rows * width, np.float32(1))


NORM, APPEND, ATTEND, ADD_MIXED, GATE, ADD_END, SPLIT, GATE_HEADS, GATE_INPUT, ADD_INPUT, SCALE_END = range(11)
"""Steps of a layer between its matmuls, for ``part_function``."""


@cache
def part_function() -> Any:
    """Return the C function that computes any step between matmuls.

    A call computes the units from ``first`` to ``end``, so that threads can share a step. Units are blocks of queries
    for ``ATTEND`` and rows otherwise.
    """

    @cfunc(types.void(*[types.int64] * MATMUL_ARGUMENTS), cache=True)
    def compute_part(
        pass_at: int, layer_at: int, starts_at: int, part: int, one: int, two: int, three: int, first: int, end: int
    ) -> None:
        shape, layer = array_at(pass_at, (PASS_FIELDS,), types.int64), array_at(layer_at, (FIELDS,), types.int64)
        starts = array_at(starts_at, (shape[SLOTS],), types.int64)
        width, inner = shape[HIDDEN], layer[TO_GATE * MATMUL_FIELDS + 2]
        rows, at, at_inner = end - first, first * width * ITEM_SIZE, first * inner * ITEM_SIZE
        if part == NORM:
            _norm(shape, layer[NORM_BEFORE], one + at, rows, two + at)
        elif part == APPEND:
            _append(shape, layer, starts, one, two, three, first, end)
        elif part == ATTEND:
            _attend(shape, layer, starts, one, two, three, first, end)
        elif part == ADD_MIXED:
            _add(shape, layer[NORM_MIXED], one + at, two + at, rows)
            _norm(shape, layer[NORM_MIDDLE], one + at, rows, three + at)
        elif part == GATE:
            if shape[TANH_GATE]:
                gelu_in_place(one + at_inner, two + at_inner, rows * inner)
            else:
                silu_in_place(one + at_inner, two + at_inner, rows * inner)
        elif part == SPLIT:
            split_gates(one, two, layer[HEADS] * layer[GROUPS], layer[WIDTH], first, end)
        elif part == GATE_HEADS:
            gate_heads(one, two, layer[HEADS] * layer[GROUPS], layer[WIDTH], first, end)
        elif part == GATE_INPUT:
            _gate_input(shape, layer, one, first, end)
        elif part == ADD_INPUT:
            _add(shape, layer[NORM_INPUT], one + at, two + at, rows)
        elif part == SCALE_END:
            scale_in_place(one + at, rows * width, array_at(layer[FACTOR], (1,), types.float32)[0])
        else:
            _add(shape, layer[NORM_END], one + at, two + at, rows)

    return compute_part


@compiled
def _norm(shape: Numbers, weight: int, hidden: int, rows: int, normed: int) -> None:
    """Norm some rows for a matmul; do nothing if ``weight`` is 0."""
    if weight:
        epsilon, offset = float_of(shape, EPSILON), float_of(shape, OFFSET)
        norm_rows(hidden, rows, shape[HIDDEN], weight, offset, epsilon, normed)


@compiled
def _add(shape: Numbers, weight: int, hidden: int, added: int, rows: int) -> None:
    _norm(shape, weight, added, rows, added)
    add_in_place(hidden, added, rows * shape[HIDDEN], float_of(shape, RESIDUAL))


@compiled
def _gate_input(shape: Numbers, layer: Numbers, gate: int, first: int, end: int) -> None:
    """Multiply the activated gate by the layer's own input, for some rows, in place."""
    width = layer[INPUT_GATE + 2]
    for row in range(first, end):
        layer_input = shape[INPUTS] + (row * shape[INPUTS_STRIDE] + layer[INPUT_AT]) * ITEM_SIZE
        if shape[TANH_GATE]:
            gelu_in_place(gate + row * width * ITEM_SIZE, layer_input, width)
        else:
            silu_in_place(gate + row * width * ITEM_SIZE, layer_input, width)


@compiled
def _offsets(shape: Numbers) -> Numbers:
    """Return the first row of each sequence, and the end of the last one."""
    return array_at(shape[ROW_OFFSETS], (shape[SLOTS] + 1,), types.int64)


@compiled
def _append(
    shape: Numbers, layer: Numbers, starts: Numbers, queries: int, keys: int, values: int, first: int, end: int
) -> None:
    """Norm and rotate queries and keys of some rows, and write keys and values to the KV cache from ``starts`` on.

    ``queries``, ``keys`` and ``values`` are the addresses of matmul outputs, which are changed in place.
    """
    heads, width = layer[HEADS], layer[WIDTH]
    query_heads, size = heads * layer[GROUPS], width * ITEM_SIZE
    offsets, slot = _offsets(shape), 0
    for row in range(first, end):
        while row >= offsets[slot + 1]:
            slot += 1
        position = row - offsets[slot]
        _prepare_heads(shape, layer, layer[NORM_Q], row, query_heads, queries + row * query_heads * size)
        if not layer[TO_KEYS * MATMUL_FIELDS]:
            continue
        row_keys, row_values = keys + row * heads * size, values + row * heads * size
        if not layer[TO_VALUES * MATMUL_FIELDS]:
            copy_numbers(row_keys, heads * width, row_values)
        _prepare_heads(shape, layer, layer[NORM_K], row, heads, row_keys)
        if layer[NORM_V]:
            epsilon, offset = float_of(shape, EPSILON), float_of(shape, OFFSET)
            norm_rows(row_values, heads, width, layer[NORM_V], offset, epsilon, row_values)
        first_cached = slot * layer[SLOT_STRIDE] + (starts[slot] + position) * width
        for head in range(heads):
            cached = (first_cached + head * layer[HEAD_STRIDE]) * ITEM_SIZE
            copy_numbers(row_keys + head * size, width, layer[KEYS] + cached)
            copy_numbers(row_values + head * size, width, layer[VALUES] + cached)


@compiled
def _prepare_heads(shape: Numbers, layer: Numbers, norm: int, row: int, heads: int, at: int) -> None:
    """Norm and rotate a row's queries or keys in place."""
    width, rotated_width, row_size = layer[WIDTH], layer[TURNED], shape[ROTARY_WIDTH] * ITEM_SIZE
    epsilon, offset = float_of(shape, EPSILON), float_of(shape, OFFSET)
    if norm and shape[NORMS_ALL]:
        norm_row(at, norm, offset, heads * width, epsilon, at)
    rows = shape[TOTAL_ROWS]
    cos = shape[ROTATED] + (layer[ROTARY] * 2 * rows + row) * row_size
    sin = cos + rows * row_size
    for head in range(heads):
        head_at = at + head * width * ITEM_SIZE
        if norm and not shape[NORMS_ALL]:
            norm_row(head_at, norm, offset, width, epsilon, head_at)
        if layer[ROTARY] < 0:
            continue
        if shape[PAIRED]:
            rotate_pairs(head_at, cos, sin, rotated_width, head_at)
        else:
            rotate_head(head_at, cos, sin, rotated_width, head_at)


@compiled
def _attend(
    shape: Numbers, layer: Numbers, starts: Numbers, queries: int, scratch: int, written: int, first: int, end: int
) -> None:
    """Attend from some blocks of queries, which are numbered through all sequences."""
    heads, groups, width = layer[HEADS], layer[GROUPS], layer[WIDTH]
    offsets, block = _offsets(shape), block_queries(shape[SLOTS] * heads, shape[THREADS])
    memory, units = attention_numbers(starts.max() + shape[NEW], width, block), _attention_blocks(shape, layer)
    # Each part of the work has its own scratch memory; the first unit, rounded up, gives the part's index.
    part_scratch = scratch + -(-first * parts_of(shape[THREADS], units, 1) // units) * memory * ITEM_SIZE
    before = blocks = 0
    for slot in range(shape[SLOTS]):
        before, new = before + blocks, offsets[slot + 1] - offsets[slot]
        blocks = heads * query_blocks(new, groups, block)
        if before >= end or before + blocks <= first:
            continue
        at = offsets[slot] * heads * groups * width * ITEM_SIZE
        cached = slot * layer[SLOT_STRIDE] * ITEM_SIZE
        mask = shape[MASK] + slot * shape[MASK_SLOT] * ITEM_SIZE if shape[MASK] and new > 1 else 0
        attend(
            queries + at,
            new,
            heads,
            groups,
            width,
            layer[KEYS] + cached,
            layer[VALUES] + cached,
            layer[HEAD_STRIDE],
            starts[slot],
            mask,
            shape[MASK_ROW],
            float_of(shape, SCALE),
            float_of(shape, SOFTCAP),
            layer[WINDOW],
            shape[PLACES] + offsets[slot] * WORD_SIZE,
            layer[SINKS],
            part_scratch,
            written + at,
            block,
            max(first - before, 0),
            min(end - before, blocks),
        )


@compiled
def _attention_blocks(shape: Numbers, layer: Numbers) -> int:
    """Return the number of query blocks in all sequences and heads."""
    offsets, blocks = _offsets(shape), 0
    block = block_queries(shape[SLOTS] * layer[HEADS], shape[THREADS])
    for slot in range(shape[SLOTS]):
        blocks += query_blocks(offsets[slot + 1] - offsets[slot], layer[GROUPS], block)
    return blocks * layer[HEADS]  # type: ignore[no-any-return]


@compiled
def _widest(layers: Numbers) -> tuple[int, int]:
    """Return the maximum width of a row's queries, and of its keys, over all layers."""
    queries, keys = 0, 0
    for number in range(len(layers)):
        key_numbers = layers[number, HEADS] * layers[number, WIDTH]
        queries, keys = max(queries, key_numbers * layers[number, GROUPS]), max(keys, key_numbers)
    return queries, keys


@compiled
def scratch_numbers(shape: Numbers, layers: Numbers, positions: int) -> int:
    """Return the scratch memory that ``compute_layers`` needs for contexts of ``positions``, in float32 values."""
    rows, attention_scratch = shape[TOTAL_ROWS], 0
    queries, keys = _widest(layers)
    row_numbers = shape[HIDDEN] + 2 * (queries + keys) + 2 * shape[INNER]
    if shape[GATES_HEADS]:
        row_numbers += 2 * queries
    # Passes over fewer sequences may use larger blocks, which need more memory; smaller blocks give more parts.
    block = MAX_BLOCK_QUERIES if shape[THREADS] < 2 else BLOCK_QUERIES
    for number in range(len(layers)):
        layer = layers[number]
        blocks = shape[SLOTS] * layer[HEADS] * query_blocks(shape[NEW], layer[GROUPS], block)
        parts = parts_of(shape[THREADS], blocks, 1)
        attention_scratch = max(
            attention_scratch, parts * attention_numbers(positions, layer[WIDTH], MAX_BLOCK_QUERIES)
        )
    total = rows * row_numbers + max(attention_scratch, rows * shape[EXPERT_SCRATCH])
    return max(total, rows * shape[HIDDEN] + mixer_numbers(shape))  # type: ignore[no-any-return]


@compiled
def _compute(
    shape: Numbers, layer: Numbers, starts: Numbers, part: int, one: int, two: int, three: int, units: int, work: int
) -> None:
    compute_part(shape, shape[PART], layer, starts, part, one, two, three, units, work)


@compiled
def _mix(shape: Numbers, layer: Numbers, inputs: int, rows: int, scratch: int) -> None:
    """Write the weighted sum of each row's experts to ``scratch``, followed by the shared gate's scores."""
    experts = array_at(layer[EXPERTS], (EXPERT_FIELDS,), types.int64)
    router = array_at(layer[ROUTER], (ROUTER_FIELDS,), types.int64)
    shared_scores = scratch + rows * shape[HIDDEN] * ITEM_SIZE
    scores_at = shared_scores + rows * ITEM_SIZE
    scores = array_at(scores_at, (rows, experts[EXPERT_COUNT]), types.float32)
    chosen, shares = np.empty((rows, router[TOP_K]), np.int64), np.empty((rows, router[TOP_K]), np.float32)
    multiply_by(shape, router, ROUTE, inputs, rows, scores_at)
    route(router, scores, chosen, shares)
    if router[SHARED_GATE]:
        multiply_by(shape, router, SHARED_GATE, inputs, rows, shared_scores)
    rest = scores_at + rows * experts[EXPERT_COUNT] * ITEM_SIZE
    shape[WOKEN] += mix_experts(shape[THREAD_POOL], shape[THREADS], experts, chosen, shares, inputs, scratch, rest)


@compiled
def _add_shared(shape: Numbers, layer: Numbers, rows: int, mixed: int, outputs: int) -> None:
    """Write the sum of what ``_mix`` wrote and the gated shared expert's ``outputs``, if any, to ``outputs``."""
    numbers = rows * shape[HIDDEN]
    if layer[TO_DOWN * MATMUL_FIELDS]:
        router = array_at(layer[ROUTER], (ROUTER_FIELDS,), types.int64)
        scores = array_at(mixed + numbers * ITEM_SIZE, (rows,), types.float32)
        for row in range(rows):
            share, at = np.float32(1), row * shape[HIDDEN] * ITEM_SIZE
            if router[SHARED_GATE]:
                share /= np.float32(1) + np.exp(-scores[row])
            add_in_place(mixed + at, outputs + at, shape[HIDDEN], share)
    copy_numbers(mixed, numbers, outputs)


@compiled
def compute_layers(shape: Numbers, layers: Numbers, starts: Numbers, hidden: int, scratch: int) -> None:
    """Compute the layers, updating the rows at ``hidden`` in place and writing to the KV cache from ``starts`` on."""
    rows = shape[TOTAL_ROWS]
    max_queries, max_keys = _widest(layers)
    numbers, inner_numbers = rows * shape[HIDDEN], rows * shape[INNER]
    normed = scratch
    queries = normed + numbers * ITEM_SIZE
    keys = queries + rows * max_queries * ITEM_SIZE
    values = keys + rows * max_keys * ITEM_SIZE
    attended = values + rows * max_keys * ITEM_SIZE
    gate = attended + rows * max_queries * ITEM_SIZE
    up = gate + inner_numbers * ITEM_SIZE
    gated = up + inner_numbers * ITEM_SIZE
    rest = gated + 2 * rows * max_queries * shape[GATES_HEADS] * ITEM_SIZE
    for number in range(len(layers)):
        layer = layers[number]
        _compute(shape, layer, starts, NORM, hidden, normed, 0, rows, numbers)
        read = normed if layer[NORM_BEFORE] else hidden
        if layer[MIXER]:
            mix(shape, layer, starts, read, rows, queries, normed)
        else:
            query_numbers = rows * layer[HEADS] * layer[GROUPS] * layer[WIDTH]
            multiply(shape, layer, TO_QUERIES, read, rows, gated if shape[GATES_HEADS] else queries)
            if layer[TO_KEYS * MATMUL_FIELDS]:
                multiply(shape, layer, TO_KEYS, read, rows, keys)
            if layer[TO_VALUES * MATMUL_FIELDS]:
                multiply(shape, layer, TO_VALUES, read, rows, values)
            if shape[GATES_HEADS]:
                _compute(shape, layer, starts, SPLIT, gated, queries, 0, rows, query_numbers)
            _compute(shape, layer, starts, APPEND, queries, keys, values, rows, query_numbers)
            blocks, work = _attention_blocks(shape, layer), query_numbers * (starts.max() + shape[NEW])
            _compute(shape, layer, starts, ATTEND, queries, rest, attended, blocks, work)
            if shape[GATES_HEADS]:
                _compute(shape, layer, starts, GATE_HEADS, gated, attended, 0, rows, query_numbers)
            multiply(shape, layer, TO_OUTPUT, attended, rows, normed)
        _compute(shape, layer, starts, ADD_MIXED, hidden, normed, normed, rows, numbers)
        read = normed if layer[NORM_MIDDLE] else hidden
        if layer[EXPERTS]:
            _mix(shape, layer, read, rows, rest)
        if layer[TO_DOWN * MATMUL_FIELDS]:
            multiply(shape, layer, TO_GATE, read, rows, gate)
            multiply(shape, layer, TO_UP, read, rows, up)
            _compute(shape, layer, starts, GATE, gate, up, 0, rows, rows * layer[TO_GATE * MATMUL_FIELDS + 2])
            multiply(shape, layer, TO_DOWN, gate, rows, normed)
        if layer[BESIDE]:
            add_experts(shape, layer[BESIDE], hidden, rows, normed, rest)
        if layer[EXPERTS]:
            _add_shared(shape, layer, rows, rest, normed)
        _compute(shape, layer, starts, ADD_END, hidden, normed, 0, rows, numbers)
        if layer[INPUT_GATE]:
            multiply_by(shape, layer, INPUT_GATE, hidden, rows, gate)
            _compute(shape, layer, starts, GATE_INPUT, gate, 0, 0, rows, rows * layer[INPUT_GATE + 2])
            multiply_by(shape, layer, INPUT_OUT, gate, rows, normed)
            _compute(shape, layer, starts, ADD_INPUT, hidden, normed, 0, rows, numbers)
        if layer[FACTOR]:
            _compute(shape, layer, starts, SCALE_END, hidden, 0, 0, rows, numbers)
        if layer[OUTPUTS]:
            copy_numbers(hidden, numbers, layer[OUTPUTS])


def compile_layers() -> None:
    """Compile everything in this module now, so that the first pass doesn't have to."""
    shape, layer, starts = (np.zeros(size, np.int64) for size in (PASS_FIELDS, FIELDS, 1))
    part_function()
    mixer_function()
    scratch_numbers(shape, layer.reshape(1, -1), 0)
    compute_layers(shape, layer.reshape(1, -1)[:0], starts, 0, 0)
