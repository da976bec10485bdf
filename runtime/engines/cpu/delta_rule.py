"""Computes the gated delta rule of Qwen3.5 and other models, head by head.

For each row, the head's state decays, and the difference between the row's value and what the state returns for the
row's key, times the write strength, is added at that key. A state ``[key, value]`` is computed a few columns at a time
for all rows of a tree, so that the working set stays in the core's cache. The order of operations per column doesn't
depend on how many columns are computed together.

In Kimi's delta attention, each key channel of a state has a decay of its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types

from hdtool.runtime.engines.cpu.convolution import BEFORE, PADDING, convolve, is_padding, origins_at
from hdtool.runtime.kernels.compiled import Ints, Record, array_at, clear_floats, compiled, copy_floats, generated
from hdtool.runtime.kernels.matrix_formats import cases
from hdtool.runtime.kernels.row_operations import (
    elementwise,
    multiply_by_sigmoid,
    norm_row,
    silu_in_place,
    silu_of,
    unit_row,
)
from hdtool.runtime.kernels.vector_code import FLOAT, INDEX, ITEM_SIZE, LANES, FloatCode

LINEAR_FROM = np.float32(20)
"""Input above which a softplus returns its input, as in PyTorch."""


@compiled
def step_of(mixer: Record, head: int, number: Any) -> Any:
    """Return a head's time step, ``softplus(number + bias)``, from its projection ``number`` and the head's bias."""
    total = np.float32(number + array_at(mixer.step_bias, (mixer.heads,), types.float32)[head])
    return total if total > LINEAR_FROM else np.float32(np.log1p(np.exp(total)))


@compiled
def decay_of(mixer: Record, head: int, step: Any) -> Any:
    """Return the factor by which a head's state decays in a time step."""
    rate = np.float32(np.exp(array_at(mixer.decay_log, (mixer.heads,), types.float32)[head]))
    return np.float32(np.exp(np.float32(-rate * step)))


EPSILON = np.float32(1e-6)
"""Epsilon of the L2 norms of queries and keys."""
VECTORS = 4
"""Number of vectors of a state's columns that are computed together, if the state is wide enough."""
ONE = np.float32(1)


CHANNELS = 0
"""Shape for ``_step`` of a block whose key channels each have a decay; other shapes are a block's number of vectors."""
BLOCKS = {CHANNELS: (1, True), 1: (1, False), VECTORS: (VECTORS, False)}
"""Number of vectors of a block of columns, and whether each key channel has a decay, by shape."""


def _step(*, learns: bool) -> Any:
    """Return an intrinsic that multiplies a query by a block of columns of the decayed state.

    With ``learns``, the intrinsic first adds the outer product of ``key`` and ``change`` to the columns and writes them
    to ``into``; otherwise, it ignores these three. ``decay`` is the address of the head's decay or decays.
    """

    @generated(*[types.int64] * 11)
    def step(
        builder: Any,
        state: Any,
        stride: Any,
        into: Any,
        into_stride: Any,
        key: Any,
        query: Any,
        width: Any,
        decay: Any,
        change: Any,
        written: Any,
        shape: Any,
    ) -> None:
        code = FloatCode(builder)

        def generate(vectors: int, *, by_channel: bool) -> None:
            factor = None if by_channel else code.splat(code.read(decay, FLOAT))
            changes = [code.read(code.at(change, INDEX(vector * LANES))) for vector in range(vectors)] if learns else []

            def add(index: Any, sums: list[Any]) -> list[Any]:
                totals = list(sums)
                for half in range(2):
                    key_row = builder.add(index, INDEX(half))
                    row = code.at(state, builder.mul(key_row, stride))
                    target = code.at(into, builder.mul(key_row, into_stride))
                    weight = code.splat(code.read(code.at(key, key_row), FLOAT)) if learns else None
                    query_weight = code.splat(code.read(code.at(query, key_row), FLOAT))
                    by = factor or code.splat(code.read(code.at(decay, key_row), FLOAT))
                    for vector in range(vectors):
                        numbers = builder.fmul(code.read(code.at(row, INDEX(vector * LANES))), by)
                        if learns:
                            numbers = code.multiply_add(weight, changes[vector], numbers)
                            code.store(numbers, code.at(target, INDEX(vector * LANES)))
                        at = half * vectors + vector
                        totals[at] = code.multiply_add(numbers, query_weight, totals[at])
                return totals

            sums = code.loop(width, [code.number(0.0)] * (2 * vectors), add, 2)
            for vector in range(vectors):
                sum_ = builder.fadd(sums[vector], sums[vectors + vector])
                code.store(sum_, code.at(written, INDEX(vector * LANES)))

        for _, (vectors, by_channel) in cases(builder, shape, BLOCKS):
            generate(vectors, by_channel=by_channel)

    return step


_recall, _learn = _step(learns=False), _step(learns=True)
_change = elementwise(
    lambda code, value, held, strength: code.builder.fmul(code.builder.fsub(value, held), strength),
    2,
    1,
    in_place=False,
)
"""Writes ``(value - held) * strength``."""


class DeltaRows(NamedTuple):
    """Addresses of what a delta rule computes for a pass's rows: values kept to replay them, then scratch memory."""

    inputs: int
    """Queries, keys and values before the convolution."""
    keys: int
    changes: int
    """Values whose outer product with a row's key is added to the state."""
    decays: int
    convolved: int
    gates: int
    steps: int
    strengths: int
    mixed: int
    """Output of each head."""


@compiled
def delta_rows(mixer: Record, rows: int, kept: int, scratch: int) -> DeltaRows:
    """Return the addresses for ``rows`` rows: kept values from ``kept`` on, scratch memory from ``scratch`` on."""
    heads, channels = rows * mixer.heads * ITEM_SIZE, rows * mixer.convolution.channels * ITEM_SIZE
    keys, values = rows * mixer.key_heads * mixer.key_width * ITEM_SIZE, heads * mixer.value_width
    changes, gates = kept + channels + keys, scratch + channels
    steps = gates + values
    strengths = steps + heads * mixer.delta.decay_width
    return DeltaRows(
        kept, kept + channels, changes, changes + values, scratch, gates, steps, strengths, strengths + heads
    )


@compiled
def kept_size(mixer: Record) -> int:
    """Return how many float32 values are kept per row."""
    return delta_rows(mixer, 1, 0, 0).decays // ITEM_SIZE + mixer.heads * mixer.delta.decay_width  # type: ignore[no-any-return]


@compiled
def scratch_size(mixer: Record) -> int:
    """Return how many float32 values of scratch memory are needed per row, including those for ``grouped_at``."""
    heads, values = mixer.heads, mixer.heads * mixer.value_width
    size = delta_rows(mixer, 1, 0, 0).mixed // ITEM_SIZE + values
    return size if mixer.delta.steps.kernels else size + mixer.convolution.channels + values + 2 * heads  # type: ignore[no-any-return]


@compiled
def grouped_at(mixer: Record, rows: int, rows_at: DeltaRows) -> tuple[int, int]:
    """Return the addresses of the outputs of two matmuls grouped by key head; see ``spread_inputs``."""
    values = mixer.heads * mixer.value_width
    inputs = rows_at.mixed + rows * values * ITEM_SIZE
    return inputs, inputs + rows * (mixer.convolution.channels + values) * ITEM_SIZE


@compiled
def separate_at(mixer: Record, rows: int, rows_at: DeltaRows) -> tuple[int, int, int]:
    """Return the addresses of queries, keys and values that come from separate matmuls."""
    size = rows * mixer.key_heads * mixer.key_width * ITEM_SIZE
    return rows_at.convolved, rows_at.convolved + size, rows_at.convolved + 2 * size


@compiled
def join_inputs(mixer: Record, rows: int, rows_at: DeltaRows, row: int) -> None:
    """Copy a row's queries, keys and values next to each other."""
    queries, keys, values = separate_at(mixer, rows, rows_at)
    width, size = mixer.key_heads * mixer.key_width, mixer.heads * mixer.value_width
    written = rows_at.inputs + row * mixer.convolution.channels * ITEM_SIZE
    copy_floats(queries + row * width * ITEM_SIZE, width, written)
    copy_floats(keys + row * width * ITEM_SIZE, width, written + width * ITEM_SIZE)
    copy_floats(values + row * size * ITEM_SIZE, size, written + 2 * width * ITEM_SIZE)


@compiled
def spread_inputs(mixer: Record, rows: int, rows_at: DeltaRows, row: int) -> None:
    """Regroup a row's inputs by kind instead of by key head.

    For each key head, the first matmul gives a query, a key, values and gates, and the second write strengths and time
    steps. Queries, keys and values are written next to each other.
    """
    inputs, scores = grouped_at(mixer, rows, rows_at)
    heads, width, states = mixer.key_heads, mixer.key_width, mixer.heads
    heads_per_key = states // heads
    values, keys = heads_per_key * mixer.value_width, heads * width
    written = rows_at.inputs + row * mixer.convolution.channels * ITEM_SIZE
    for head in range(heads):
        read = inputs + (row * heads + head) * 2 * (width + values) * ITEM_SIZE
        copy_floats(read, width, written + head * width * ITEM_SIZE)
        copy_floats(read + width * ITEM_SIZE, width, written + (keys + head * width) * ITEM_SIZE)
        read += 2 * width * ITEM_SIZE
        copy_floats(read, values, written + (2 * keys + head * values) * ITEM_SIZE)
        copy_floats(read + values * ITEM_SIZE, values, rows_at.gates + (row * heads + head) * values * ITEM_SIZE)
        offset = (row * states + head * heads_per_key) * ITEM_SIZE
        copy_floats(scores + 2 * offset, heads_per_key, rows_at.strengths + offset)
        copy_floats(scores + 2 * offset + heads_per_key * ITEM_SIZE, heads_per_key, rows_at.steps + offset)


@compiled
def _write_channel_decays(mixer: Record, steps: int, decays: int) -> None:
    """Write one row's decays of all key channels, computed from the projections at ``steps``."""
    heads, width, bound = mixer.heads, mixer.key_width, mixer.delta.decay_bound
    shape = heads, width
    numbers, forgets = array_at(steps, shape, types.float32), array_at(decays, shape, types.float32)
    biases, logs = array_at(mixer.step_bias, shape, types.float32), array_at(mixer.decay_log, (heads,), types.float32)
    for head in range(heads):
        rate = np.float32(np.exp(logs[head]))
        for channel in range(width):
            step = np.float32(numbers[head, channel] + biases[head, channel])
            if bound:
                log = bound / (ONE + np.float32(np.exp(-rate * step)))
            else:
                log = -rate * (step if step > LINEAR_FROM else np.float32(np.log1p(np.exp(step))))
            forgets[head, channel] = np.exp(log)


@compiled
def prepare_delta(pass_record: Record, mixer: Record, rows_at: DeltaRows, row: int, windows: int) -> None:
    """Convolve a row, normalize its queries and keys, and compute its decays and write strengths."""
    if is_padding(pass_record, row):
        return
    channels, heads, width, states = mixer.convolution.channels, mixer.key_heads, mixer.key_width, mixer.heads
    convolved, size = rows_at.convolved + row * channels * ITEM_SIZE, width * ITEM_SIZE
    convolve(pass_record, mixer.convolution, row, rows_at.inputs, channels, windows, convolved)
    silu_of(convolved, channels)
    factor = np.float32(1 / np.sqrt(width))
    for head in range(heads):
        unit_row(convolved + head * size, width, EPSILON, factor, convolved + head * size)
        unit_row(convolved + (heads + head) * size, width, EPSILON, ONE, rows_at.keys + (row * heads + head) * size)
    decay_bytes = states * mixer.delta.decay_width * ITEM_SIZE
    steps, decays = rows_at.steps + row * decay_bytes, rows_at.decays + row * decay_bytes
    time_steps, forgets = array_at(steps, (states,), types.float32), array_at(decays, (states,), types.float32)
    learns = array_at(rows_at.strengths + row * states * ITEM_SIZE, (states,), types.float32)
    strength = mixer.delta.strength
    if mixer.delta.decay_width > 1:
        _write_channel_decays(mixer, steps, decays)
    for head in range(states):
        if mixer.delta.decay_width == 1:
            forgets[head] = decay_of(mixer, head, step_of(mixer, head, time_steps[head]))
        learns[head] = strength / (ONE + np.float32(np.exp(-learns[head])))


@compiled
def state_size(mixer: Record) -> int:
    """Return the size, in float32 values, of the state columns that are computed together."""
    return mixer.key_width * min(mixer.value_width, VECTORS * LANES)  # type: ignore[no-any-return]


@compiled
def _shape(mixer: Record, column: int) -> int:
    """Return the shape, for ``_step``, of the block of a state's columns that begins with ``column``."""
    if mixer.delta.decay_width > 1:
        return CHANNELS
    return VECTORS if mixer.value_width - column >= VECTORS * LANES else 1


@compiled
def recur_delta(pass_record: Record, mixer: Record, rows_at: DeltaRows, slot: int, head: int, buffers: int) -> None:
    """Compute one head for all rows of a sequence, and write each row's change.

    The outer product of a row's key and its change is added to the row's state. If the pass ``advances``, the
    sequence's state becomes that of the last row.
    """
    channels, key_heads, width, values = mixer.convolution.channels, mixer.key_heads, mixer.key_width, mixer.value_width
    heads, new, decay_width = mixer.heads, pass_record.new, mixer.delta.decay_width
    key_head, origins = head // (heads // key_heads), origins_at(pass_record.origins, slot, new)
    state = mixer.state + (slot * mixer.state_stride + head * width * values) * ITEM_SIZE
    size = state_size(mixer) * ITEM_SIZE
    column = 0
    while column < values:
        shape = _shape(mixer, column)
        block = LANES * max(1, shape)
        before, last = state + column * ITEM_SIZE, -1
        for slot_row in range(new):
            if origins[slot_row].parent == PADDING:
                continue
            row = slot * new + slot_row
            source, into = origins[slot_row].source, buffers + origins[slot_row].target * size
            read, stride = (before, values) if source == BEFORE else (buffers + source * size, block)
            query = rows_at.convolved + (row * channels + key_head * width) * ITEM_SIZE
            key = rows_at.keys + (row * key_heads + key_head) * width * ITEM_SIZE
            value = rows_at.convolved + (row * channels + 2 * key_heads * width + head * values + column) * ITEM_SIZE
            offset = ((row * heads + head) * values + column) * ITEM_SIZE
            decay = rows_at.decays + (row * heads + head) * decay_width * ITEM_SIZE
            strength = array_at(rows_at.strengths + (row * heads + head) * ITEM_SIZE, (1,), types.float32)[0]
            change, out = rows_at.changes + offset, rows_at.mixed + offset
            _recall(read, stride, 0, 0, 0, key, width, decay, 0, out, shape)
            _change(value, out, block, strength, change)
            _learn(read, stride, into, block, key, query, width, decay, change, out, shape)
            last = into
        if pass_record.advances:
            for key_row in range(width):
                copy_floats(last + key_row * block * ITEM_SIZE, block, before + key_row * values * ITEM_SIZE)
        column += block


@compiled
def gate_delta(pass_record: Record, mixer: Record, rows_at: DeltaRows, row: int) -> None:
    """Normalize each head's output for one row and multiply it by the head's gate, in place.

    A gate is a sigmoid in a delta attention and a SiLU otherwise.
    """
    values, size = mixer.value_width, mixer.heads * mixer.value_width
    gates, mixed = rows_at.gates + row * size * ITEM_SIZE, rows_at.mixed + row * size * ITEM_SIZE
    if is_padding(pass_record, row):
        clear_floats(mixed, size)
        return
    for head in range(mixer.heads):
        head_at = mixed + head * values * ITEM_SIZE
        norm_row(head_at, mixer.norm, np.float32(0), values, mixer.epsilon, head_at)
    if mixer.delta.decay_width > 1:
        multiply_by_sigmoid(mixed, gates, size)
        return
    silu_in_place(gates, mixed, size)
    copy_floats(gates, size, mixed)


@compiled
def replay_delta(
    pass_record: Record, mixer: Record, rows_at: DeltaRows, slot: int, head: int, path: Ints, unread: int
) -> None:
    """Advance one head's state along a path of a sequence's rows, by replaying the kept keys, decays and changes.

    ``unread`` is the address of memory for outputs that aren't used.
    """
    key_heads, width, values = mixer.key_heads, mixer.key_width, mixer.value_width
    heads, decay_width = mixer.heads, mixer.delta.decay_width
    key_head = head // (heads // key_heads)
    state = mixer.state + (slot * mixer.state_stride + head * width * values) * ITEM_SIZE
    column = 0
    while column < values:
        shape = _shape(mixer, column)
        into = state + column * ITEM_SIZE
        for slot_row in path:
            row = slot * pass_record.new + slot_row
            key = rows_at.keys + (row * key_heads + key_head) * width * ITEM_SIZE
            change = rows_at.changes + ((row * heads + head) * values + column) * ITEM_SIZE
            decay = rows_at.decays + (row * heads + head) * decay_width * ITEM_SIZE
            _learn(into, values, into, values, key, key, width, decay, change, unread, shape)
        column += LANES * max(1, shape)
