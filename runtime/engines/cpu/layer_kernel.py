"""Computes decoder layers in compiled code.

Each row is computed independently and in a fixed order of operations, so its result doesn't depend, bit for bit, on the
other rows or the number of threads.
"""

from __future__ import annotations

from typing import Any

from numba import types

from hdtool.runtime.engines.cpu.attention import (
    BLOCK_QUERIES,
    MAX_BLOCK_QUERIES,
    attend,
    attention_scratch_size,
    block_queries,
    gate_heads,
    query_blocks,
    split_gates,
)
from hdtool.runtime.engines.cpu.latent_attention import ABSORB, EXPAND, STORE, absorbed_scratch_size, turned_at
from hdtool.runtime.engines.cpu.layer_experts import ADD_MIXTURE, ADD_SHARED, MIX, call_expert_step
from hdtool.runtime.engines.cpu.layer_record import (
    LAYER,
    PASS,
    apply_norm,
    compute_step,
    multiply,
    multiply_adapted,
    offsets_of,
    rotate,
    starts_of,
)
from hdtool.runtime.engines.cpu.mixer_kernel import mix, mixer_scratch_size
from hdtool.runtime.kernels.compiled import (
    Record,
    array_at,
    c_function,
    compiled,
    copy_floats,
    struct_address,
    struct_at,
    zeroed_records,
)
from hdtool.runtime.kernels.matmul import STEP
from hdtool.runtime.kernels.row_operations import (
    activate,
    add_in_place,
    norm_rows,
    scale_in_place,
)
from hdtool.runtime.kernels.thread_pool import parts_of
from hdtool.runtime.kernels.vector_code import ITEM_SIZE

NORM, APPEND, ATTEND, ADD_MIXER_OUTPUT, GATE, ADD_MLP_OUTPUT, SPLIT, GATE_HEADS, GATE_INPUT, ADD_INPUT, SCALE_OUTPUT = (
    range(11)
)
ADD_MIXED, JOIN, NORM_ATTENDED = range(SCALE_OUTPUT + 1, SCALE_OUTPUT + 4)
"""Steps of a layer between its matmuls, for ``step_function``."""


@c_function(STEP)
def step_function() -> Any:
    """Return the C function that computes any of a layer's steps between its matmuls.

    A call computes the units from ``first`` to ``end``, so that threads can share a step. Units are blocks of queries
    for ``ATTEND`` and rows otherwise.
    """

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
        width, inner = pass_record.hidden, layer.gate.out_features
        rows, at, at_inner = end - first, first * width * ITEM_SIZE, first * inner * ITEM_SIZE
        if step == NORM:
            _norm(pass_record, layer.norm_before_mixer, one + at, rows, two + at)
        elif step == APPEND:
            _append(pass_record, layer.attention, one, two, three, first, end)
        elif step == ATTEND:
            _attend(pass_record, layer.attention, one, two, three, first, end)
        elif step == ADD_MIXER_OUTPUT:
            _add(pass_record, layer.norm_after_mixer, one + at, two + at, rows)
            _norm(pass_record, layer.norm_before_mlp, one + at, rows, three + at)
        elif step == GATE:
            up = two + at_inner if layer.up.kernels else 0
            activate(pass_record.activation, one + at_inner, up, rows * inner)
        elif step == SPLIT:
            split_gates(one, two, layer.attention, first, end)
        elif step == GATE_HEADS:
            gate_heads(one, two, layer.attention, first, end)
        elif step == GATE_INPUT:
            _gate_input(pass_record, layer, one, first, end)
        elif step == ADD_INPUT:
            _add(pass_record, layer.norm_input, one + at, two + at, rows)
        elif step == SCALE_OUTPUT:
            scale_in_place(one + at, rows * width, array_at(layer.factor, (1,), types.float32)[0])
        elif step == ADD_MIXED:
            add_in_place(one + at, two + at, rows * width, pass_record.residual)
        elif step == JOIN:
            _join(pass_record, layer.side_norm, one, two, first, end)
        elif step == NORM_ATTENDED:
            _norm(pass_record, layer.norm_before_mlp, one + at, rows, one + at)
        else:
            _add(pass_record, layer.norm_after_mlp, one + at, two + at, rows)

    return compute_step


@compiled
def _norm(pass_record: Record, norm: Record, hidden: int, rows: int, normed: int) -> None:
    """Normalize ``rows`` rows at ``hidden`` and write them to ``normed``; do nothing without a norm."""
    if norm.weight:
        apply_norm(pass_record, norm, pass_record.epsilon, hidden, rows, pass_record.hidden, normed)


@compiled
def _add(pass_record: Record, norm: Record, hidden: int, added: int, rows: int) -> None:
    _norm(pass_record, norm, added, rows, added)
    add_in_place(hidden, added, rows * pass_record.hidden, pass_record.residual)


@compiled
def _join(pass_record: Record, norm: Record, hidden: int, joined: int, first: int, end: int) -> None:
    """Write the hidden states of rows ``first`` to ``end - 1``, each joined with the row's embedding and normalized."""
    width, at = pass_record.hidden, 2 * pass_record.hidden * ITEM_SIZE
    for row in range(first, end):
        copy_floats(hidden + row * width * ITEM_SIZE, width, joined + row * at)
        copy_floats(pass_record.embedded + row * width * ITEM_SIZE, width, joined + row * at + width * ITEM_SIZE)
    apply_norm(pass_record, norm, pass_record.epsilon, joined + first * at, end - first, 2 * width, joined + first * at)


@compiled
def _gate_input(pass_record: Record, layer: Record, gate: int, first: int, end: int) -> None:
    """Activate the gates of rows ``first`` to ``end - 1`` and multiply them by the per-layer input, in place."""
    width = layer.input_gate.out_features
    for row in range(first, end):
        layer_input = pass_record.inputs + (row * pass_record.inputs_stride + layer.input_offset) * ITEM_SIZE
        activate(pass_record.activation, gate + row * width * ITEM_SIZE, layer_input, width)


@compiled
def _append(pass_record: Record, attention: Record, queries: int, keys: int, values: int, first: int, end: int) -> None:
    """Normalize and rotate queries and keys of rows ``first`` to ``end - 1``; write keys and values to the KV cache.

    ``queries``, ``keys`` and ``values`` are the addresses of matmul outputs, which are changed in place.
    """
    heads, width = attention.heads, attention.width
    query_heads, size = heads * attention.groups, width * ITEM_SIZE
    offsets, starts, slot = offsets_of(pass_record), starts_of(pass_record), 0
    for row in range(first, end):
        while row >= offsets[slot + 1]:
            slot += 1
        position, row_queries = row - offsets[slot], queries + row * query_heads * size
        _prepare_heads(pass_record, attention, attention.norm_queries, row, query_heads, row_queries)
        if not attention.keys.kernels:
            continue
        row_keys, row_values = keys + row * heads * size, values + row * heads * size
        if not attention.values.kernels:
            copy_floats(row_keys, heads * width, row_values)
        _prepare_heads(pass_record, attention, attention.norm_keys, row, heads, row_keys)
        if attention.norm_values:
            epsilon, offset = pass_record.epsilon, pass_record.norm_offset
            norm_rows(row_values, heads, width, attention.norm_values, offset, epsilon, row_values)
        first_cached = slot * attention.slot_stride + (starts[slot] + position) * width
        for head in range(heads):
            cached = (first_cached + head * attention.head_stride) * ITEM_SIZE
            copy_floats(row_keys + head * size, width, attention.cached_keys + cached)
            copy_floats(row_values + head * size, width, attention.cached_values + cached)


@compiled
def _prepare_heads(pass_record: Record, attention: Record, norm: Record, row: int, heads: int, heads_at: int) -> None:
    """Normalize and rotate a row's queries or keys in place."""
    width = attention.width
    if norm.weight:
        normed_rows, columns = (1, heads * width) if pass_record.norms_all_heads else (heads, width)
        apply_norm(pass_record, norm, pass_record.epsilon, heads_at, normed_rows, columns, heads_at)
    if attention.rotary >= 0:
        for head_at in range(heads_at, heads_at + heads * width * ITEM_SIZE, width * ITEM_SIZE):
            rotate(pass_record, attention, row, head_at, attention.rotary_width, head_at)


@compiled
def _attend(
    pass_record: Record, attention: Record, queries: int, scratch: int, written: int, first: int, end: int
) -> None:
    """Compute attention for query blocks ``first`` to ``end - 1``, numbered consecutively over all sequences."""
    offsets, block = offsets_of(pass_record), block_queries(pass_record.slots * attention.heads, pass_record.threads)
    units, turned = _attention_blocks(pass_record, attention), turned_at(pass_record, attention, queries)
    memory = attention_scratch_size(starts_of(pass_record).max() + pass_record.new, attention.width, block)
    # Each part of the work has its own scratch memory; the part's index is ``first * parts / units``, rounded up.
    scratch += -(-first * parts_of(pass_record.threads, units, 1) // units) * memory * ITEM_SIZE
    before = blocks = 0
    for slot in range(pass_record.slots):
        before, new = before + blocks, offsets[slot + 1] - offsets[slot]
        blocks = attention.heads * query_blocks(new, attention.groups, block)
        if before < end and first < before + blocks:
            begin, last = max(first - before, 0), min(end - before, blocks)
            attend(pass_record, attention, slot, queries, turned, scratch, written, block, begin, last)


@compiled
def _attention_blocks(pass_record: Record, attention: Record) -> int:
    """Return the total number of query blocks of all sequences and key heads."""
    offsets, blocks = offsets_of(pass_record), 0
    block = block_queries(pass_record.slots * attention.heads, pass_record.threads)
    for slot in range(pass_record.slots):
        blocks += query_blocks(offsets[slot + 1] - offsets[slot], attention.groups, block)
    return blocks * attention.heads  # type: ignore[no-any-return]


@compiled
def _widest(layers: Record) -> tuple[int, int]:
    """Return ``(queries, keys)``: the maximum widths of a row's queries and of its keys over all layers."""
    queries, keys = 0, 0
    for number in range(len(layers)):
        attention, latents = layers[number].attention, layers[number].attention.latents
        width = max(attention.width, latents.plain + latents.rotated, latents.values)
        queries = max(queries, attention.heads * attention.groups * width, latents.queries.out_features)
        keys = max(keys, attention.heads * attention.width + latents.rotated, latents.gate.out_features)
    return queries, keys


@compiled
def _side_scratch_size(pass_record: Record, layer: Record) -> int:
    """Return how many float32 values of scratch memory a layer's side block needs per row."""
    adapted = 0
    for adapter in (layer.adapters.queries, layer.adapters.gate):
        adapted = max(adapted, adapter.first.out_features + adapter.second.out_features)
    return 2 * pass_record.hidden + adapted if layer.side_out.kernels else 0


@compiled
def layers_scratch_size(pass_record: Record, layers: Record, positions: int) -> int:
    """Return how many float32 values of scratch memory ``compute_layers`` needs for up to ``positions`` positions."""
    rows, attention_scratch, side_scratch = pass_record.total_rows, 0, 0
    queries, keys = _widest(layers)
    row_scratch_size = pass_record.hidden + 2 * (queries + keys) + 2 * pass_record.inner
    if pass_record.gates_heads or pass_record.latent_function:
        row_scratch_size += 2 * queries
    # A pass over fewer sequences may use larger blocks, which need more memory; smaller blocks give more parts.
    block = MAX_BLOCK_QUERIES if pass_record.threads < 2 else BLOCK_QUERIES
    for number in range(len(layers)):
        attention = layers[number].attention
        blocks = pass_record.slots * attention.heads * query_blocks(pass_record.new, attention.groups, block)
        parts = parts_of(pass_record.threads, blocks, 1)
        attention_scratch = max(
            attention_scratch, parts * attention_scratch_size(positions, attention.width, MAX_BLOCK_QUERIES)
        )
        if attention.latents.expansion:
            parts = parts_of(pass_record.threads, attention.groups, 1)
            attention_scratch = max(attention_scratch, parts * absorbed_scratch_size(attention.width))
        side_scratch = max(side_scratch, _side_scratch_size(pass_record, layers[number]))
    row_scratch_size += side_scratch
    total = rows * row_scratch_size + max(attention_scratch, rows * pass_record.expert_scratch)
    return max(total, 2 * rows * pass_record.hidden + mixer_scratch_size(pass_record))  # type: ignore[no-any-return]


@compiled
def _compute(
    pass_record: Record, layer: Record, step: int, one: int, two: int, three: int, units: int, work: int
) -> None:
    compute_step(pass_record, pass_record.step_function, layer, step, one, two, three, units, work)


@compiled
def _compute_gated(pass_record: Record, layer: Record, read: int, rows: int, gate: int, up: int, scratch: int) -> None:
    """Compute the inputs of the MLP's last matmul, from the rows at ``read``, and write them to ``gate``."""
    adapters = layer.adapters
    multiply_adapted(pass_record, layer.gate, adapters.gate, read, rows, scratch, gate)
    if layer.up.kernels:
        multiply_adapted(pass_record, layer.up, adapters.up, read, rows, scratch, up)
    _compute(pass_record, layer, GATE, gate, up, 0, rows, rows * layer.gate.out_features)


@compiled
def _attend_blocks(pass_record: Record, layer: Record, queries: int, scratch: int, attended: int, work: int) -> None:
    blocks, positions = _attention_blocks(pass_record, layer.attention), starts_of(pass_record).max() + pass_record.new
    _compute(pass_record, layer, ATTEND, queries, scratch, attended, blocks, work * positions)


@compiled
def _attend_heads(
    pass_record: Record, layer: Record, read: int, rows: int, memory: Any, gated: int, scratch: int
) -> None:
    """Write the inputs of an attention's last matmul, computed from the rows at ``read``, to the last of ``memory``.

    ``memory`` has the addresses to which queries, keys, values and these inputs are written.
    """
    attention, adapters = layer.attention, layer.adapters
    query_size = rows * attention.heads * attention.groups * attention.width
    (queries, keys, values, attended), given = memory, (read, rows, scratch)
    projected = gated if pass_record.gates_heads else queries
    multiply_adapted(pass_record, attention.queries, adapters.queries, *given, projected)
    if attention.keys.kernels:
        multiply_adapted(pass_record, attention.keys, adapters.keys, *given, keys)
    if attention.values.kernels:
        multiply_adapted(pass_record, attention.values, adapters.values, *given, values)
    if pass_record.gates_heads:
        _compute(pass_record, layer, SPLIT, gated, queries, 0, rows, query_size)
    _compute(pass_record, layer, APPEND, queries, keys, values, rows, query_size)
    _attend_blocks(pass_record, layer, queries, scratch, attended, query_size)
    if pass_record.gates_heads:
        _compute(pass_record, layer, GATE_HEADS, gated, attended, 0, rows, query_size)


@compiled
def _compute_beside(
    pass_record: Record,
    layer: Record,
    hidden: int,
    rows: int,
    normed: int,
    memory: Any,
    gate: int,
    up: int,
    gated: int,
    joined: int,
) -> None:
    """Write what a mixer reads to ``normed``: the norm of hidden states plus the output of the block beside it."""
    size = rows * pass_record.hidden
    rest = joined + 2 * size * ITEM_SIZE
    _compute(pass_record, layer, JOIN, hidden, joined, 0, rows, 2 * size)
    _attend_heads(pass_record, layer, joined, rows, memory, gated, rest)
    multiply(pass_record, layer.attention.out, memory[3], rows, normed)
    _compute(pass_record, layer, NORM_ATTENDED, normed, 0, 0, rows, size)
    _compute_gated(pass_record, layer, normed, rows, gate, up, rest)
    multiply(pass_record, layer.down, gate, rows, normed)
    multiply(pass_record, layer.side_out, normed, rows, joined)
    _compute(pass_record, layer, ADD_MIXED, joined, hidden, 0, rows, size)
    _compute(pass_record, layer, NORM, joined, normed, 0, rows, size)


@compiled
def _attend_to_latents(
    pass_record: Record,
    layer: Record,
    read: int,
    rows: int,
    queries: int,
    latents: int,
    attended: int,
    absorbed: int,
    scratch: int,
) -> None:
    """Write the inputs of a latent attention's last matmul, computed from the rows at ``read``, to ``queries``."""
    attention, function, normed = layer.attention, pass_record.latent_function, read
    record, heads = attention.latents, attention.groups
    multiply(pass_record, attention.keys, read, rows, latents)
    if record.queries.kernels:
        multiply(pass_record, record.queries, read, rows, attended)
        width = record.queries.out_features
        apply_norm(pass_record, record.norm_queries, record.epsilon, attended, rows, width, attended)
        read = attended
    multiply(pass_record, attention.queries, read, rows, queries)
    size = rows * heads * attention.width
    compute_step(pass_record, function, layer, STORE, queries, latents, absorbed, rows, size)
    work = size * record.plain
    compute_step(pass_record, function, layer, ABSORB, queries, scratch, absorbed, heads, work)
    _attend_blocks(pass_record, layer, absorbed, scratch, attended, size)
    gates = latents if record.gate.kernels else 0
    if gates:
        multiply(pass_record, record.gate, normed, rows, gates)
    compute_step(pass_record, function, layer, EXPAND, attended, queries, gates, heads, size * record.values)


@compiled
def _compute_experts(
    pass_record: Record, layer: Record, step: int, read: int, rows: int, scratch: int, outputs: int
) -> None:
    addresses = struct_address(pass_record), struct_address(layer)
    call_expert_step(pass_record.expert_function, (*addresses, step, read, rows, scratch, outputs))


@compiled
def compute_layers(pass_record: Record, layers: Record, hidden: int, scratch: int) -> None:
    """Compute the layers: update the rows at ``hidden`` in place; write to the KV cache and the mixers' journal."""
    rows = pass_record.total_rows
    max_queries, max_keys = _widest(layers)
    hidden_size, inner_size = rows * pass_record.hidden, rows * pass_record.inner
    normed = scratch
    queries = normed + hidden_size * ITEM_SIZE
    keys = queries + rows * max_queries * ITEM_SIZE
    values = keys + rows * max_keys * ITEM_SIZE
    attended = values + rows * max_keys * ITEM_SIZE
    gate = attended + rows * max_queries * ITEM_SIZE
    up = gate + inner_size * ITEM_SIZE
    gated = up + inner_size * ITEM_SIZE
    heads_memory = queries, keys, values, attended
    has_gated = pass_record.gates_heads or pass_record.latent_function
    rest = gated + (2 * rows * max_queries * ITEM_SIZE if has_gated else 0)
    for number in range(len(layers)):
        layer = layers[number]
        beside = layer.side_out.kernels != 0
        if beside:
            _compute_beside(pass_record, layer, hidden, rows, normed, heads_memory, gate, up, gated, rest)
        else:
            _compute(pass_record, layer, NORM, hidden, normed, 0, rows, hidden_size)
        read = normed if layer.norm_before_mixer.weight else hidden
        if pass_record.is_parallel:
            _compute_gated(pass_record, layer, read, rows, gate, up, rest)
        attends = layer.attention.queries.kernels != 0 and not beside
        if layer.mixer.kind:
            mixed = queries if attends else normed
            mix(pass_record, layer, read, rows, queries + hidden_size * ITEM_SIZE, mixed)
            if attends:
                _compute(pass_record, layer, ADD_MIXED, hidden, mixed, 0, rows, hidden_size)
        if layer.attention.latents.expansion:
            _attend_to_latents(pass_record, layer, read, rows, queries, keys, attended, gated, rest)
            multiply(pass_record, layer.attention.out, queries, rows, normed)
        elif attends:
            _attend_heads(pass_record, layer, read, rows, heads_memory, gated, rest)
            multiply(pass_record, layer.attention.out, attended, rows, normed)
        if layer.mixer.kind or attends:
            step = ADD_MIXED if beside else ADD_MIXER_OUTPUT
            _compute(pass_record, layer, step, hidden, normed, normed, rows, hidden_size)
            read = normed if layer.norm_before_mlp.weight else hidden
        if layer.has_experts:
            _compute_experts(pass_record, layer, MIX, read, rows, rest, 0)
        if layer.down.kernels and not beside:
            if not pass_record.is_parallel:
                _compute_gated(pass_record, layer, read, rows, gate, up, rest)
            multiply(pass_record, layer.down, gate, rows, normed)
        if layer.has_added_mixture:
            _compute_experts(pass_record, layer, ADD_MIXTURE, hidden, rows, rest, normed)
        if layer.has_experts:
            _compute_experts(pass_record, layer, ADD_SHARED, 0, rows, rest, normed)
        if (layer.down.kernels and not beside) or layer.has_experts:
            _compute(pass_record, layer, ADD_MLP_OUTPUT, hidden, normed, 0, rows, hidden_size)
        if layer.input_gate.kernels:
            multiply(pass_record, layer.input_gate, hidden, rows, gate)
            _compute(pass_record, layer, GATE_INPUT, gate, 0, 0, rows, rows * layer.input_gate.out_features)
            multiply(pass_record, layer.input_out, gate, rows, normed)
            _compute(pass_record, layer, ADD_INPUT, hidden, normed, 0, rows, hidden_size)
        if layer.factor:
            _compute(pass_record, layer, SCALE_OUTPUT, hidden, 0, 0, rows, hidden_size)
        if layer.watched:
            copy_floats(hidden, hidden_size, layer.watched)


def compile_layers() -> None:
    """Compile everything in this module now, so that the first pass doesn't have to.

    What only models with experts, latent attention or mixers need is compiled when their records are filled in.
    """
    pass_record, layers = zeroed_records(PASS)[0], zeroed_records(LAYER, 0)
    step_function()
    layers_scratch_size(pass_record, layers, 0)
    compute_layers(pass_record, layers, 0, 0)
