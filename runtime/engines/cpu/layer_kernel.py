"""Computes decoder layers in compiled code.

Each row is computed independently and in a fixed order of operations, so its result doesn't depend, bit for bit, on the
other rows or the number of threads.
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
    attention_scratch_size,
    block_queries,
    query_blocks,
)
from hdtool.runtime.engines.cpu.delta_rule import gate_heads, split_gates
from hdtool.runtime.engines.cpu.expert_kernel import ADD_MIXTURE, ADD_SHARED, MIX
from hdtool.runtime.engines.cpu.layer_record import (
    ADDED_MIXTURE,
    EPSILON,
    EXPERT_FUNCTION,
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
    INTERLEAVED,
    KEYS,
    LAYER_ROTARY_WIDTH,
    MASK,
    MASK_ROW,
    MASK_SLOT,
    MATMUL_FIELDS,
    MIXER,
    NEW,
    NORM_AFTER_MIXER,
    NORM_AFTER_MLP,
    NORM_BEFORE_MIXER,
    NORM_BEFORE_MLP,
    NORM_INPUT,
    NORM_K,
    NORM_Q,
    NORM_V,
    NORMS_ALL,
    OFFSET,
    OUTPUTS,
    PASS_FIELDS,
    RESIDUAL,
    ROTARY,
    ROTARY_TABLES,
    ROTARY_WIDTH,
    ROW_OFFSETS,
    ROW_POSITIONS,
    SCALE,
    SINKS,
    SLOT_STRIDE,
    SLOTS,
    SOFTCAP,
    STEP_FUNCTION,
    TANH_GATE,
    THREADS,
    TO_DOWN,
    TO_GATE,
    TO_KEYS,
    TO_OUTPUT,
    TO_QUERIES,
    TO_UP,
    TO_VALUES,
    TOTAL_ROWS,
    VALUES,
    WIDTH,
    WINDOW,
    Record,
    compute_step,
    multiply,
    multiply_by,
)
from hdtool.runtime.engines.cpu.mix import mix, mixer_scratch_size
from hdtool.runtime.kernels.compiled import WORD_SIZE, Ints, array_at, compiled, copy_floats, float_of
from hdtool.runtime.kernels.gemm import MATMUL_ARGUMENTS, call_at
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

NORM, APPEND, ATTEND, ADD_MIXER_OUTPUT, GATE, ADD_MLP_OUTPUT, SPLIT, GATE_HEADS, GATE_INPUT, ADD_INPUT, SCALE_OUTPUT = (
    range(11)
)
"""Steps of a layer between its matmuls, for ``step_function``."""


@cache
def step_function() -> Any:
    """Return the C function that computes any of a layer's steps between its matmuls.

    A call computes the units from ``first`` to ``end``, so that threads can share a step. Units are blocks of queries
    for ``ATTEND`` and rows otherwise.
    """

    @cfunc(types.void(*[types.int64] * MATMUL_ARGUMENTS), cache=True)
    def compute_step(
        pass_at: int, layer_at: int, starts_at: int, step: int, one: int, two: int, three: int, first: int, end: int
    ) -> None:
        pass_record, layer = array_at(pass_at, (PASS_FIELDS,), types.int64), array_at(layer_at, (FIELDS,), types.int64)
        starts = array_at(starts_at, (pass_record[SLOTS],), types.int64)
        width, inner = pass_record[HIDDEN], layer[TO_GATE * MATMUL_FIELDS + 2]
        rows, at, at_inner = end - first, first * width * ITEM_SIZE, first * inner * ITEM_SIZE
        if step == NORM:
            _norm(pass_record, layer[NORM_BEFORE_MIXER], one + at, rows, two + at)
        elif step == APPEND:
            _append(pass_record, layer, starts, one, two, three, first, end)
        elif step == ATTEND:
            _attend(pass_record, layer, starts, one, two, three, first, end)
        elif step == ADD_MIXER_OUTPUT:
            _add(pass_record, layer[NORM_AFTER_MIXER], one + at, two + at, rows)
            _norm(pass_record, layer[NORM_BEFORE_MLP], one + at, rows, three + at)
        elif step == GATE:
            if pass_record[TANH_GATE]:
                gelu_in_place(one + at_inner, two + at_inner, rows * inner)
            else:
                silu_in_place(one + at_inner, two + at_inner, rows * inner)
        elif step == SPLIT:
            split_gates(one, two, layer[HEADS] * layer[GROUPS], layer[WIDTH], first, end)
        elif step == GATE_HEADS:
            gate_heads(one, two, layer[HEADS] * layer[GROUPS], layer[WIDTH], first, end)
        elif step == GATE_INPUT:
            _gate_input(pass_record, layer, one, first, end)
        elif step == ADD_INPUT:
            _add(pass_record, layer[NORM_INPUT], one + at, two + at, rows)
        elif step == SCALE_OUTPUT:
            scale_in_place(one + at, rows * width, array_at(layer[FACTOR], (1,), types.float32)[0])
        else:
            _add(pass_record, layer[NORM_AFTER_MLP], one + at, two + at, rows)

    return compute_step


@compiled
def _norm(pass_record: Record, weight: int, hidden: int, rows: int, normed: int) -> None:
    """Normalize ``rows`` rows at ``hidden`` and write them to ``normed``; do nothing if ``weight`` is 0."""
    if weight:
        epsilon, offset = float_of(pass_record, EPSILON), float_of(pass_record, OFFSET)
        norm_rows(hidden, rows, pass_record[HIDDEN], weight, offset, epsilon, normed)


@compiled
def _add(pass_record: Record, weight: int, hidden: int, added: int, rows: int) -> None:
    _norm(pass_record, weight, added, rows, added)
    add_in_place(hidden, added, rows * pass_record[HIDDEN], float_of(pass_record, RESIDUAL))


@compiled
def _gate_input(pass_record: Record, layer: Record, gate: int, first: int, end: int) -> None:
    """Activate the gates of rows ``first`` to ``end - 1`` and multiply them by the per-layer input, in place."""
    width = layer[INPUT_GATE + 2]
    for row in range(first, end):
        layer_input = pass_record[INPUTS] + (row * pass_record[INPUTS_STRIDE] + layer[INPUT_AT]) * ITEM_SIZE
        if pass_record[TANH_GATE]:
            gelu_in_place(gate + row * width * ITEM_SIZE, layer_input, width)
        else:
            silu_in_place(gate + row * width * ITEM_SIZE, layer_input, width)


@compiled
def _offsets(pass_record: Record) -> Ints:
    """Return the index of each sequence's first row, followed by the total number of rows."""
    return array_at(pass_record[ROW_OFFSETS], (pass_record[SLOTS] + 1,), types.int64)


@compiled
def _append(
    pass_record: Record, layer: Record, starts: Ints, queries: int, keys: int, values: int, first: int, end: int
) -> None:
    """Normalize and rotate queries and keys of rows ``first`` to ``end - 1``; write keys and values to the KV cache.

    ``queries``, ``keys`` and ``values`` are the addresses of matmul outputs, which are changed in place. ``starts``
    holds the cache position of each sequence's first row.
    """
    heads, width = layer[HEADS], layer[WIDTH]
    query_heads, size = heads * layer[GROUPS], width * ITEM_SIZE
    offsets, slot = _offsets(pass_record), 0
    for row in range(first, end):
        while row >= offsets[slot + 1]:
            slot += 1
        position = row - offsets[slot]
        _prepare_heads(pass_record, layer, layer[NORM_Q], row, query_heads, queries + row * query_heads * size)
        if not layer[TO_KEYS * MATMUL_FIELDS]:
            continue
        row_keys, row_values = keys + row * heads * size, values + row * heads * size
        if not layer[TO_VALUES * MATMUL_FIELDS]:
            copy_floats(row_keys, heads * width, row_values)
        _prepare_heads(pass_record, layer, layer[NORM_K], row, heads, row_keys)
        if layer[NORM_V]:
            epsilon, offset = float_of(pass_record, EPSILON), float_of(pass_record, OFFSET)
            norm_rows(row_values, heads, width, layer[NORM_V], offset, epsilon, row_values)
        first_cached = slot * layer[SLOT_STRIDE] + (starts[slot] + position) * width
        for head in range(heads):
            cached = (first_cached + head * layer[HEAD_STRIDE]) * ITEM_SIZE
            copy_floats(row_keys + head * size, width, layer[KEYS] + cached)
            copy_floats(row_values + head * size, width, layer[VALUES] + cached)


@compiled
def _prepare_heads(pass_record: Record, layer: Record, norm: int, row: int, heads: int, at: int) -> None:
    """Normalize and rotate a row's queries or keys in place."""
    width, rotated_width, row_size = layer[WIDTH], layer[LAYER_ROTARY_WIDTH], pass_record[ROTARY_WIDTH] * ITEM_SIZE
    epsilon, offset = float_of(pass_record, EPSILON), float_of(pass_record, OFFSET)
    if norm and pass_record[NORMS_ALL]:
        norm_row(at, norm, offset, heads * width, epsilon, at)
    rows = pass_record[TOTAL_ROWS]
    cos = pass_record[ROTARY_TABLES] + (layer[ROTARY] * 2 * rows + row) * row_size
    sin = cos + rows * row_size
    for head in range(heads):
        head_at = at + head * width * ITEM_SIZE
        if norm and not pass_record[NORMS_ALL]:
            norm_row(head_at, norm, offset, width, epsilon, head_at)
        if layer[ROTARY] < 0:
            continue
        if pass_record[INTERLEAVED]:
            rotate_pairs(head_at, cos, sin, rotated_width, head_at)
        else:
            rotate_head(head_at, cos, sin, rotated_width, head_at)


@compiled
def _attend(
    pass_record: Record, layer: Record, starts: Ints, queries: int, scratch: int, written: int, first: int, end: int
) -> None:
    """Compute attention for query blocks ``first`` to ``end - 1``, numbered consecutively over all sequences."""
    heads, groups, width = layer[HEADS], layer[GROUPS], layer[WIDTH]
    offsets, block = _offsets(pass_record), block_queries(pass_record[SLOTS] * heads, pass_record[THREADS])
    memory, units = (
        attention_scratch_size(starts.max() + pass_record[NEW], width, block),
        _attention_blocks(pass_record, layer),
    )
    # Each part of the work has its own scratch memory; the part's index is ``first * parts / units``, rounded up.
    part_scratch = scratch + -(-first * parts_of(pass_record[THREADS], units, 1) // units) * memory * ITEM_SIZE
    before = blocks = 0
    for slot in range(pass_record[SLOTS]):
        before, new = before + blocks, offsets[slot + 1] - offsets[slot]
        blocks = heads * query_blocks(new, groups, block)
        if before >= end or before + blocks <= first:
            continue
        at = offsets[slot] * heads * groups * width * ITEM_SIZE
        cached = slot * layer[SLOT_STRIDE] * ITEM_SIZE
        mask = pass_record[MASK] + slot * pass_record[MASK_SLOT] * ITEM_SIZE if pass_record[MASK] and new > 1 else 0
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
            pass_record[MASK_ROW],
            float_of(pass_record, SCALE),
            float_of(pass_record, SOFTCAP),
            layer[WINDOW],
            pass_record[ROW_POSITIONS] + offsets[slot] * WORD_SIZE,
            layer[SINKS],
            part_scratch,
            written + at,
            block,
            max(first - before, 0),
            min(end - before, blocks),
        )


@compiled
def _attention_blocks(pass_record: Record, layer: Record) -> int:
    """Return the total number of query blocks of all sequences and key heads."""
    offsets, blocks = _offsets(pass_record), 0
    block = block_queries(pass_record[SLOTS] * layer[HEADS], pass_record[THREADS])
    for slot in range(pass_record[SLOTS]):
        blocks += query_blocks(offsets[slot + 1] - offsets[slot], layer[GROUPS], block)
    return blocks * layer[HEADS]  # type: ignore[no-any-return]


@compiled
def _widest(layers: Record) -> tuple[int, int]:
    """Return ``(queries, keys)``: the maximum widths of a row's queries and of its keys over all layers."""
    queries, keys = 0, 0
    for number in range(len(layers)):
        key_size = layers[number, HEADS] * layers[number, WIDTH]
        queries, keys = max(queries, key_size * layers[number, GROUPS]), max(keys, key_size)
    return queries, keys


@compiled
def layers_scratch_size(pass_record: Record, layers: Record, positions: int) -> int:
    """Return how many float32 values of scratch memory ``compute_layers`` needs for up to ``positions`` positions."""
    rows, attention_scratch = pass_record[TOTAL_ROWS], 0
    queries, keys = _widest(layers)
    row_scratch_size = pass_record[HIDDEN] + 2 * (queries + keys) + 2 * pass_record[INNER]
    if pass_record[GATES_HEADS]:
        row_scratch_size += 2 * queries
    # A pass over fewer sequences may use larger blocks, which need more memory; smaller blocks give more parts.
    block = MAX_BLOCK_QUERIES if pass_record[THREADS] < 2 else BLOCK_QUERIES
    for number in range(len(layers)):
        layer = layers[number]
        blocks = pass_record[SLOTS] * layer[HEADS] * query_blocks(pass_record[NEW], layer[GROUPS], block)
        parts = parts_of(pass_record[THREADS], blocks, 1)
        attention_scratch = max(
            attention_scratch, parts * attention_scratch_size(positions, layer[WIDTH], MAX_BLOCK_QUERIES)
        )
    total = rows * row_scratch_size + max(attention_scratch, rows * pass_record[EXPERT_SCRATCH])
    return max(total, rows * pass_record[HIDDEN] + mixer_scratch_size(pass_record))  # type: ignore[no-any-return]


@compiled
def _compute(
    pass_record: Record, layer: Record, starts: Ints, step: int, one: int, two: int, three: int, units: int, work: int
) -> None:
    compute_step(pass_record, pass_record[STEP_FUNCTION], layer, starts, step, one, two, three, units, work)


@compiled
def _compute_experts(
    pass_record: Record, layer: Record, step: int, read: int, rows: int, scratch: int, outputs: int
) -> None:
    addresses = pass_record.ctypes.data, layer.ctypes.data
    call_at(pass_record[EXPERT_FUNCTION], *addresses, step, read, rows, scratch, outputs, 0, 0)


@compiled
def compute_layers(pass_record: Record, layers: Record, starts: Ints, hidden: int, scratch: int) -> None:
    """Compute the layers: update the rows at ``hidden`` in place, and append their keys and values to the KV cache.

    Sequence ``i`` continues at cache position ``starts[i]``.
    """
    rows = pass_record[TOTAL_ROWS]
    max_queries, max_keys = _widest(layers)
    hidden_size, inner_size = rows * pass_record[HIDDEN], rows * pass_record[INNER]
    normed = scratch
    queries = normed + hidden_size * ITEM_SIZE
    keys = queries + rows * max_queries * ITEM_SIZE
    values = keys + rows * max_keys * ITEM_SIZE
    attended = values + rows * max_keys * ITEM_SIZE
    gate = attended + rows * max_queries * ITEM_SIZE
    up = gate + inner_size * ITEM_SIZE
    gated = up + inner_size * ITEM_SIZE
    rest = gated + 2 * rows * max_queries * pass_record[GATES_HEADS] * ITEM_SIZE
    for number in range(len(layers)):
        layer = layers[number]
        _compute(pass_record, layer, starts, NORM, hidden, normed, 0, rows, hidden_size)
        read = normed if layer[NORM_BEFORE_MIXER] else hidden
        if layer[MIXER]:
            mix(pass_record, layer, starts, read, rows, queries, normed)
        else:
            query_size = rows * layer[HEADS] * layer[GROUPS] * layer[WIDTH]
            multiply(pass_record, layer, TO_QUERIES, read, rows, gated if pass_record[GATES_HEADS] else queries)
            if layer[TO_KEYS * MATMUL_FIELDS]:
                multiply(pass_record, layer, TO_KEYS, read, rows, keys)
            if layer[TO_VALUES * MATMUL_FIELDS]:
                multiply(pass_record, layer, TO_VALUES, read, rows, values)
            if pass_record[GATES_HEADS]:
                _compute(pass_record, layer, starts, SPLIT, gated, queries, 0, rows, query_size)
            _compute(pass_record, layer, starts, APPEND, queries, keys, values, rows, query_size)
            blocks, work = _attention_blocks(pass_record, layer), query_size * (starts.max() + pass_record[NEW])
            _compute(pass_record, layer, starts, ATTEND, queries, rest, attended, blocks, work)
            if pass_record[GATES_HEADS]:
                _compute(pass_record, layer, starts, GATE_HEADS, gated, attended, 0, rows, query_size)
            multiply(pass_record, layer, TO_OUTPUT, attended, rows, normed)
        _compute(pass_record, layer, starts, ADD_MIXER_OUTPUT, hidden, normed, normed, rows, hidden_size)
        read = normed if layer[NORM_BEFORE_MLP] else hidden
        if layer[EXPERTS]:
            _compute_experts(pass_record, layer, MIX, read, rows, rest, 0)
        if layer[TO_DOWN * MATMUL_FIELDS]:
            multiply(pass_record, layer, TO_GATE, read, rows, gate)
            multiply(pass_record, layer, TO_UP, read, rows, up)
            _compute(pass_record, layer, starts, GATE, gate, up, 0, rows, rows * layer[TO_GATE * MATMUL_FIELDS + 2])
            multiply(pass_record, layer, TO_DOWN, gate, rows, normed)
        if layer[ADDED_MIXTURE]:
            _compute_experts(pass_record, layer, ADD_MIXTURE, hidden, rows, rest, normed)
        if layer[EXPERTS]:
            _compute_experts(pass_record, layer, ADD_SHARED, 0, rows, rest, normed)
        _compute(pass_record, layer, starts, ADD_MLP_OUTPUT, hidden, normed, 0, rows, hidden_size)
        if layer[INPUT_GATE]:
            multiply_by(pass_record, layer, INPUT_GATE, hidden, rows, gate)
            _compute(pass_record, layer, starts, GATE_INPUT, gate, 0, 0, rows, rows * layer[INPUT_GATE + 2])
            multiply_by(pass_record, layer, INPUT_OUT, gate, rows, normed)
            _compute(pass_record, layer, starts, ADD_INPUT, hidden, normed, 0, rows, hidden_size)
        if layer[FACTOR]:
            _compute(pass_record, layer, starts, SCALE_OUTPUT, hidden, 0, 0, rows, hidden_size)
        if layer[OUTPUTS]:
            copy_floats(hidden, hidden_size, layer[OUTPUTS])


def compile_layers() -> None:
    """Compile everything in this module now, so that the first pass doesn't have to.

    What only models with experts or recurrent layers need is compiled when their records are filled in.
    """
    pass_record, layer, starts = (np.zeros(size, np.int64) for size in (PASS_FIELDS, FIELDS, 1))
    step_function()
    layers_scratch_size(pass_record, layer.reshape(1, -1), 0)
    compute_layers(pass_record, layer.reshape(1, -1)[:0], starts, 0, 0)
