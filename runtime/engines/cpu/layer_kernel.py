"""Decoder layers in compiled code: matmuls, and what lies between them.

Each row is computed by itself, in an order of operations that its own numbers determine, so its bits depend neither on
other rows nor on the number of threads.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cfunc, types

from hdtool.runtime.engines.cpu.attention import (
    MOST_QUERIES,
    QUERIES,
    attend,
    attention_numbers,
    block_queries,
    query_blocks,
)
from hdtool.runtime.engines.cpu.layer_record import (
    BESIDE,
    EPSILON,
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
    OF_EXPERTS,
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
    TEAM,
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
"""Addresses of the records of the experts and of what chooses them; of the weights of norms: of the output of the MLP,
of what experts read, of what they give, and of what the router reads, which is multiplied by a factor, here by its
bits; and of what the share of each expert is multiplied by."""
BESIDE_FIELDS = BESIDE_SHARES + 1


@compiled
def add_experts(shape: Numbers, at: int, attended: int, rows: int, dense: int, scratch: int) -> None:
    """Norm the output of an MLP, and add that of experts, by the record at an address; rows of hidden states."""
    record = array_at(at, (BESIDE_FIELDS,), np.int64)
    experts = array_at(record[BESIDE_EXPERTS], (EXPERT_FIELDS,), np.int64)
    router = array_at(record[BESIDE_ROUTER], (ROUTER_FIELDS,), np.int64)
    number, width, top = experts[EXPERT_COUNT], shape[HIDDEN], router[TOP_K]
    epsilon, offset, team, threads = float_of(shape, EPSILON), float_of(shape, OFFSET), shape[TEAM], shape[THREADS]
    read = scratch + rows * number * ITEM_SIZE
    mixed = read + rows * width * ITEM_SIZE
    norm_rows(dense, rows, width, record[BESIDE_NORM_DENSE], offset, epsilon, dense)
    norm_rows(attended, rows, width, record[BESIDE_NORM_ROUTED], np.float32(0), epsilon, read)
    scale_in_place(read, rows * width, float_of(record, BESIDE_FACTOR))
    multiply_by(shape, router, ROUTE, read, rows, scratch)
    chosen, shares = np.empty((rows, top), np.int64), np.empty((rows, top), np.float32)
    route(router, array_at(scratch, (rows, number), np.float32), chosen, shares)
    factors = array_at(record[BESIDE_SHARES], (number,), np.float32)
    for row in range(rows):
        for rank in range(top):
            shares[row, rank] *= factors[chosen[row, rank]]
    norm_rows(attended, rows, width, record[BESIDE_NORM_READ], offset, epsilon, read)
    mix_experts(team, threads, experts, chosen, shares, read, mixed, mixed + rows * width * ITEM_SIZE)
    norm_rows(mixed, rows, width, record[BESIDE_NORM_MIXED], offset, epsilon, mixed)
    add_in_place(dense, mixed, rows * width, np.float32(1))


NORM, APPEND, ATTEND, ADD_MIXED, GATE, ADD_END, SPLIT, GATE_HEADS, GATE_INPUT, ADD_INPUT, SCALE_END = range(11)
"""The parts of a layer between its matmuls."""


@cache
def part_function() -> Any:
    """All parts between matmuls as one C function; threads share its units, which are rows, or blocks of queries."""

    @cfunc(types.void(*[types.int64] * MATMUL_ARGUMENTS), cache=True)
    def compute_part(
        of_pass: int, of_layer: int, of_starts: int, part: int, one: int, two: int, three: int, first: int, end: int
    ) -> None:
        shape, layer = array_at(of_pass, (PASS_FIELDS,), types.int64), array_at(of_layer, (FIELDS,), types.int64)
        starts = array_at(of_starts, (shape[SLOTS],), types.int64)
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
    """What a matmul reads of hidden states; nothing is written where it reads them as they are."""
    if weight:
        epsilon, offset = float_of(shape, EPSILON), float_of(shape, OFFSET)
        norm_rows(hidden, rows, shape[HIDDEN], weight, offset, epsilon, normed)


@compiled
def _add(shape: Numbers, weight: int, hidden: int, added: int, rows: int) -> None:
    _norm(shape, weight, added, rows, added)
    add_in_place(hidden, added, rows * shape[HIDDEN], float_of(shape, RESIDUAL))


@compiled
def _gate_input(shape: Numbers, layer: Numbers, gate: int, first: int, end: int) -> None:
    """The gated unit of the inputs that the layer alone has, for some rows."""
    width = layer[INPUT_GATE + 2]
    for row in range(first, end):
        given = shape[INPUTS] + (row * shape[INPUTS_STRIDE] + layer[INPUT_AT]) * ITEM_SIZE
        if shape[TANH_GATE]:
            gelu_in_place(gate + row * width * ITEM_SIZE, given, width)
        else:
            silu_in_place(gate + row * width * ITEM_SIZE, given, width)


@compiled
def _offsets(shape: Numbers) -> Numbers:
    """Where the rows of each sequence begin, and the end of the last one's."""
    return array_at(shape[ROW_OFFSETS], (shape[SLOTS] + 1,), types.int64)


@compiled
def _append(
    shape: Numbers, layer: Numbers, starts: Numbers, queries: int, keys: int, values: int, first: int, end: int
) -> None:
    """Rotate queries and keys of some rows, and append keys and values to the cache after ``starts``.

    ``queries``, ``keys`` and ``values`` are the outputs of their matmuls, and are changed in place.
    """
    heads, width = layer[HEADS], layer[WIDTH]
    query_heads, size = heads * layer[GROUPS], width * ITEM_SIZE
    offsets, slot = _offsets(shape), 0
    for row in range(first, end):
        while row >= offsets[slot + 1]:
            slot += 1
        place = row - offsets[slot]
        _prepare_heads(shape, layer, layer[NORM_Q], row, query_heads, queries + row * query_heads * size)
        if not layer[TO_KEYS * MATMUL_FIELDS]:
            continue
        own_keys, own_values = keys + row * heads * size, values + row * heads * size
        if not layer[TO_VALUES * MATMUL_FIELDS]:
            copy_numbers(own_keys, heads * width, own_values)
        _prepare_heads(shape, layer, layer[NORM_K], row, heads, own_keys)
        if layer[NORM_V]:
            epsilon, offset = float_of(shape, EPSILON), float_of(shape, OFFSET)
            norm_rows(own_values, heads, width, layer[NORM_V], offset, epsilon, own_values)
        first_kept = slot * layer[SLOT_STRIDE] + (starts[slot] + place) * width
        for head in range(heads):
            kept = (first_kept + head * layer[HEAD_STRIDE]) * ITEM_SIZE
            copy_numbers(own_keys + head * size, width, layer[KEYS] + kept)
            copy_numbers(own_values + head * size, width, layer[VALUES] + kept)


@compiled
def _prepare_heads(shape: Numbers, layer: Numbers, norm: int, row: int, heads: int, at: int) -> None:
    """Norm and rotate the queries or the keys of a row."""
    width, turned, of_row = layer[WIDTH], layer[TURNED], shape[ROTARY_WIDTH] * ITEM_SIZE
    epsilon, offset = float_of(shape, EPSILON), float_of(shape, OFFSET)
    if norm and shape[NORMS_ALL]:
        norm_row(at, norm, offset, heads * width, epsilon, at)
    rows = shape[TOTAL_ROWS]
    cos = shape[ROTATED] + (layer[ROTARY] * 2 * rows + row) * of_row
    sin = cos + rows * of_row
    for head in range(heads):
        of_head = at + head * width * ITEM_SIZE
        if norm and not shape[NORMS_ALL]:
            norm_row(of_head, norm, offset, width, epsilon, of_head)
        if layer[ROTARY] < 0:
            continue
        if shape[PAIRED]:
            rotate_pairs(of_head, cos, sin, turned, of_head)
        else:
            rotate_head(of_head, cos, sin, turned, of_head)


@compiled
def _attend(
    shape: Numbers, layer: Numbers, starts: Numbers, queries: int, scratch: int, written: int, first: int, end: int
) -> None:
    """Attention of some blocks of queries, numbered sequence by sequence."""
    heads, groups, width = layer[HEADS], layer[GROUPS], layer[WIDTH]
    offsets, together = _offsets(shape), block_queries(shape[SLOTS] * heads, shape[THREADS])
    memory, units = attention_numbers(starts.max() + shape[NEW], width, together), _attention_blocks(shape, layer)
    # Rounded up, this is the number of the part: each of them has memory of its own.
    own = scratch + -(-first * parts_of(shape[THREADS], units, 1) // units) * memory * ITEM_SIZE
    before = blocks = 0
    for slot in range(shape[SLOTS]):
        before, new = before + blocks, offsets[slot + 1] - offsets[slot]
        blocks = heads * query_blocks(new, groups, together)
        if before >= end or before + blocks <= first:
            continue
        at = offsets[slot] * heads * groups * width * ITEM_SIZE
        kept = slot * layer[SLOT_STRIDE] * ITEM_SIZE
        mask = shape[MASK] + slot * shape[MASK_SLOT] * ITEM_SIZE if shape[MASK] and new > 1 else 0
        attend(
            queries + at,
            new,
            heads,
            groups,
            width,
            layer[KEYS] + kept,
            layer[VALUES] + kept,
            layer[HEAD_STRIDE],
            starts[slot],
            mask,
            shape[MASK_ROW],
            float_of(shape, SCALE),
            float_of(shape, SOFTCAP),
            layer[WINDOW],
            shape[PLACES] + offsets[slot] * WORD_SIZE,
            layer[SINKS],
            own,
            written + at,
            together,
            max(first - before, 0),
            min(end - before, blocks),
        )


@compiled
def _attention_blocks(shape: Numbers, layer: Numbers) -> int:
    """The blocks of queries of all sequences."""
    offsets, blocks = _offsets(shape), 0
    together = block_queries(shape[SLOTS] * layer[HEADS], shape[THREADS])
    for slot in range(shape[SLOTS]):
        blocks += query_blocks(offsets[slot + 1] - offsets[slot], layer[GROUPS], together)
    return blocks * layer[HEADS]  # type: ignore[no-any-return]


@compiled
def _widest(layers: Numbers) -> tuple[int, int]:
    """The most numbers of queries, and of keys, that a row has in a layer."""
    queries, keys = 0, 0
    for number in range(len(layers)):
        of_keys = layers[number, HEADS] * layers[number, WIDTH]
        queries, keys = max(queries, of_keys * layers[number, GROUPS]), max(keys, of_keys)
    return queries, keys


@compiled
def scratch_numbers(shape: Numbers, layers: Numbers, positions: int) -> int:
    """The float32 numbers of scratch memory that ``compute_layers`` needs."""
    rows, of_attention = shape[TOTAL_ROWS], 0
    queries, keys = _widest(layers)
    of_row = shape[HIDDEN] + 2 * (queries + keys) + 2 * shape[INNER]
    if shape[GATES_HEADS]:
        of_row += 2 * queries
    # Passes over fewer sequences may have larger blocks, and smaller ones make more parts.
    together = MOST_QUERIES if shape[THREADS] < 2 else QUERIES
    for number in range(len(layers)):
        layer = layers[number]
        blocks = shape[SLOTS] * layer[HEADS] * query_blocks(shape[NEW], layer[GROUPS], together)
        parts = parts_of(shape[THREADS], blocks, 1)
        of_attention = max(of_attention, parts * attention_numbers(positions, layer[WIDTH], MOST_QUERIES))
    whole = rows * of_row + max(of_attention, rows * shape[OF_EXPERTS])
    return max(whole, rows * shape[HIDDEN] + mixer_numbers(shape))  # type: ignore[no-any-return]


@compiled
def _compute(
    shape: Numbers, layer: Numbers, starts: Numbers, part: int, one: int, two: int, three: int, units: int, work: int
) -> None:
    compute_part(shape, shape[PART], layer, starts, part, one, two, three, units, work)


@compiled
def _mix(shape: Numbers, layer: Numbers, inputs: int, rows: int, scratch: int) -> None:
    """Write the outputs of the experts of a layer, then the scores of the one that all rows have."""
    experts = array_at(layer[EXPERTS], (EXPERT_FIELDS,), types.int64)
    router = array_at(layer[ROUTER], (ROUTER_FIELDS,), types.int64)
    of_shared = scratch + rows * shape[HIDDEN] * ITEM_SIZE
    at = of_shared + rows * ITEM_SIZE
    scores = array_at(at, (rows, experts[EXPERT_COUNT]), types.float32)
    chosen, shares = np.empty((rows, router[TOP_K]), np.int64), np.empty((rows, router[TOP_K]), np.float32)
    multiply_by(shape, router, ROUTE, inputs, rows, at)
    route(router, scores, chosen, shares)
    if router[SHARED_GATE]:
        multiply_by(shape, router, SHARED_GATE, inputs, rows, of_shared)
    rest = at + rows * experts[EXPERT_COUNT] * ITEM_SIZE
    mix_experts(shape[TEAM], shape[THREADS], experts, chosen, shares, inputs, scratch, rest)


@compiled
def _add_shared(shape: Numbers, layer: Numbers, rows: int, mixed: int, outputs: int) -> None:
    """Add what ``_mix`` wrote to the outputs of the expert that all rows have, if there is one."""
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
    """Compute all layers; ``hidden`` is changed in place."""
    rows = shape[TOTAL_ROWS]
    most_queries, most_keys = _widest(layers)
    numbers, inner_numbers = rows * shape[HIDDEN], rows * shape[INNER]
    normed = scratch
    queries = normed + numbers * ITEM_SIZE
    keys = queries + rows * most_queries * ITEM_SIZE
    values = keys + rows * most_keys * ITEM_SIZE
    attended = values + rows * most_keys * ITEM_SIZE
    gate = attended + rows * most_queries * ITEM_SIZE
    up = gate + inner_numbers * ITEM_SIZE
    gated = up + inner_numbers * ITEM_SIZE
    rest = gated + 2 * rows * most_queries * shape[GATES_HEADS] * ITEM_SIZE
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
    """Compile all of this ahead: a first pass would wait for it."""
    shape, layer, starts = (np.zeros(size, np.int64) for size in (PASS_FIELDS, FIELDS, 1))
    part_function()
    mixer_function()
    scratch_numbers(shape, layer.reshape(1, -1), 0)
    compute_layers(shape, layer.reshape(1, -1)[:0], starts, 0, 0)
