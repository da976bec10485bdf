"""Computes the gated delta rule of Qwen3.5 and other models, head by head.

For each row, the head's state decays, and the difference between the row's value and what the state returns for the
row's key is added at that key. A state ``[key, value]`` is computed a few columns at a time for all rows of a tree, so
that the working set stays in the core's cache. The order of operations per column doesn't depend on how many columns
are computed together.

In Kimi's delta attention, each key channel of a state has a decay of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from hdtool.runtime.engines.cpu.convolution import BEFORE, PADDING, convolve, silu_of
from hdtool.runtime.kernels.compiled import Ints, Record, array_at, clear_floats, compiled, copy_floats, generated
from hdtool.runtime.kernels.row_operations import norm_row, silu_in_place
from hdtool.runtime.kernels.vector_code import FLOAT, INDEX, ITEM_SIZE, LANES, FloatCode

LINEAR_FROM = np.float32(20)
"""Input above which a softplus returns its input, as in PyTorch."""


@compiled
def step_of(layer: Record, head: int, number: Any) -> Any:
    """Return a head's time step, ``softplus(number + bias)``, from its projection ``number`` and the head's bias."""
    total = np.float32(number + array_at(layer.step_bias, (layer.state_heads,), types.float32)[head])
    return total if total > LINEAR_FROM else np.float32(np.log1p(np.exp(total)))


@compiled
def decay_of(layer: Record, head: int, step: Any) -> Any:
    """Return the factor by which a head's state decays in a time step."""
    rate = np.float32(np.exp(array_at(layer.decay_log, (layer.state_heads,), types.float32)[head]))
    return np.float32(np.exp(np.float32(-rate * step)))


@generated(*[types.int64] * 3)
def _multiply_by_sigmoid(builder: Any, gates: Any, numbers: Any, size: Any) -> None:
    """``numbers *= sigmoid(gates)``"""
    code = FloatCode(builder)

    def apply(index: Any, _: list[Any]) -> list[Any]:
        address = code.at(numbers, index)
        divisor = builder.fadd(code.exp(builder.fneg(code.read(code.at(gates, index)))), code.number(1.0))
        code.store(builder.fdiv(code.read(address), divisor), address)
        return []

    code.loop(size, [], apply)


@compiled
def split_gates(joined: int, queries: int, heads: int, width: int, first: int, end: int) -> None:
    """Copy the queries of rows ``first`` to ``end - 1`` from ``joined``, where each head's gates follow its queries."""
    size = width * ITEM_SIZE
    for head in range(first * heads, end * heads):
        copy_floats(joined + 2 * head * size, width, queries + head * size)


@compiled
def gate_heads(joined: int, attended: int, heads: int, width: int, first: int, end: int) -> None:
    """Multiply the attention outputs of rows ``first`` to ``end - 1`` by the sigmoid of their gates, in place."""
    size = width * ITEM_SIZE
    for head in range(first * heads, end * heads):
        _multiply_by_sigmoid(joined + (2 * head + 1) * size, attended + head * size, width)


EPSILON = np.float32(1e-6)
"""Epsilon of the L2 norms of queries and keys."""
VECTORS = 4
"""Number of vectors of a state's columns that are computed together, if the state is wide enough."""
ONE = np.float32(1)


@generated(types.int64, types.int64, types.float32, types.float32, types.int64)
def unit_row(builder: Any, read: Any, width: Any, epsilon: Any, factor: Any, written: Any) -> None:
    """``written = factor * read / sqrt(sum(read**2) + epsilon)``"""
    code = FloatCode(builder)

    def square(index: Any, sums: list[Any]) -> list[Any]:
        numbers = code.read(code.at(read, index))
        return [code.multiply_add(numbers, numbers, sums[0])]

    (squares,) = code.loop(width, [code.number(0.0)], square)
    root = code.call("llvm.sqrt.f32", FLOAT, builder.fadd(code.total(squares), epsilon))
    scale = code.splat(builder.fdiv(factor, root))

    def apply(index: Any, _: list[Any]) -> list[Any]:
        code.store(builder.fmul(code.read(code.at(read, index)), scale), code.at(written, index))
        return []

    code.loop(width, [], apply)


def _recalled(vectors: int, decay_type: Any = types.float32) -> Any:
    """Return an intrinsic that multiplies a key by ``vectors * LANES`` columns of the decayed state.

    ``decay`` is the head's decay, or as an int64 the address of a decay for each key channel.
    """

    @generated(*[types.int64] * 4, decay_type, types.int64)
    def recall(builder: Any, state: Any, stride: Any, key: Any, width: Any, decay: Any, written: Any) -> None:
        code = FloatCode(builder)
        factor = code.splat(decay) if decay_type == types.float32 else None

        def add(index: Any, sums: list[Any]) -> list[Any]:
            totals = list(sums)
            for half in range(2):
                key_row = builder.add(index, INDEX(half))
                row = code.at(state, builder.mul(key_row, stride))
                weight = code.splat(code.read(code.at(key, key_row), FLOAT))
                by = factor or code.splat(code.read(code.at(decay, key_row), FLOAT))
                for vector in range(vectors):
                    numbers = builder.fmul(code.read(code.at(row, INDEX(vector * LANES))), by)
                    at = half * vectors + vector
                    totals[at] = code.multiply_add(numbers, weight, totals[at])
            return totals

        sums = code.loop(width, [code.number(0.0)] * (2 * vectors), add, 2)
        for vector in range(vectors):
            sum_ = builder.fadd(sums[vector], sums[vectors + vector])
            code.store(sum_, code.at(written, INDEX(vector * LANES)))

    return recall


def _learned(vectors: int, decay_type: Any = types.float32) -> Any:
    """Return an intrinsic that updates ``vectors * LANES`` columns of a state and then multiplies a query by them.

    The columns decay, and the outer product of the key and ``change`` is added to them. For ``decay``, see
    ``_recalled``.
    """

    @generated(*[types.int64] * 7, decay_type, types.int64, types.int64)
    def learn(
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
    ) -> None:
        code = FloatCode(builder)
        factor = code.splat(decay) if decay_type == types.float32 else None
        changes = [code.read(code.at(change, INDEX(vector * LANES))) for vector in range(vectors)]

        def add(index: Any, sums: list[Any]) -> list[Any]:
            totals = list(sums)
            for half in range(2):
                key_row = builder.add(index, INDEX(half))
                row = code.at(state, builder.mul(key_row, stride))
                target = code.at(into, builder.mul(key_row, into_stride))
                weight, query_weight = (code.splat(code.read(code.at(one, key_row), FLOAT)) for one in (key, query))
                by = factor or code.splat(code.read(code.at(decay, key_row), FLOAT))
                for vector in range(vectors):
                    numbers = builder.fmul(code.read(code.at(row, INDEX(vector * LANES))), by)
                    numbers = code.multiply_add(weight, changes[vector], numbers)
                    code.store(numbers, code.at(target, INDEX(vector * LANES)))
                    at = half * vectors + vector
                    totals[at] = code.multiply_add(numbers, query_weight, totals[at])
            return totals

        sums = code.loop(width, [code.number(0.0)] * (2 * vectors), add, 2)
        for vector in range(vectors):
            sum_ = builder.fadd(sums[vector], sums[vectors + vector])
            code.store(sum_, code.at(written, INDEX(vector * LANES)))

    return learn


_recall_wide, _recall_narrow = _recalled(VECTORS), _recalled(1)
_learn_wide, _learn_narrow = _learned(VECTORS), _learned(1)
_recall_channels, _learn_channels = _recalled(1, types.int64), _learned(1, types.int64)


@generated(*[types.int64] * 3, types.float32, types.int64)
def _change(builder: Any, value: Any, held: Any, size: Any, strength: Any, written: Any) -> None:
    """``written = (value - held) * strength``"""
    code = FloatCode(builder)
    by = code.splat(strength)

    def apply(index: Any, _: list[Any]) -> list[Any]:
        missing = builder.fsub(code.read(code.at(value, index)), code.read(code.at(held, index)))
        code.store(builder.fmul(missing, by), code.at(written, index))
        return []

    code.loop(size, [], apply)


@compiled
def join_inputs(
    queries: int, keys: int, values: int, key_bytes: int, value_bytes: int, written: int, first: int, end: int
) -> None:
    """Copy the queries, keys and values of rows ``first`` to ``end - 1`` next to each other.

    ``key_bytes`` and ``value_bytes`` are the sizes in bytes of a row's keys (or queries) and of its values.
    """
    for row in range(first, end):
        at = written + row * (2 * key_bytes + value_bytes)
        copy_floats(queries + row * key_bytes, key_bytes // ITEM_SIZE, at)
        copy_floats(keys + row * key_bytes, key_bytes // ITEM_SIZE, at + key_bytes)
        copy_floats(values + row * value_bytes, value_bytes // ITEM_SIZE, at + 2 * key_bytes)


@compiled
def spread_inputs(
    layer: Record,
    inputs: int,
    scores: int,
    joined: int,
    gates: int,
    strengths: int,
    steps: int,
    first: int,
    end: int,
) -> None:
    """Regroup the inputs of rows ``first`` to ``end - 1`` by kind instead of by key head.

    For each key head, ``inputs`` has a query, a key, values and gates, and ``scores`` has write strengths and time
    steps. Queries, keys and values of a row are written next to each other to ``joined``.
    """
    heads, width, states = layer.key_heads, layer.key_width, layer.state_heads
    heads_per_key = states // heads
    values, keys = heads_per_key * layer.value_width, heads * width
    for row in range(first, end):
        for head in range(heads):
            read = inputs + (row * heads + head) * 2 * (width + values) * ITEM_SIZE
            at = joined + row * layer.channels * ITEM_SIZE
            copy_floats(read, width, at + head * width * ITEM_SIZE)
            copy_floats(read + width * ITEM_SIZE, width, at + (keys + head * width) * ITEM_SIZE)
            read += 2 * width * ITEM_SIZE
            copy_floats(read, values, at + (2 * keys + head * values) * ITEM_SIZE)
            copy_floats(read + values * ITEM_SIZE, values, gates + (row * heads + head) * values * ITEM_SIZE)
            head_offset = (row * states + head * heads_per_key) * ITEM_SIZE
            copy_floats(scores + 2 * head_offset, heads_per_key, strengths + head_offset)
            copy_floats(scores + 2 * head_offset + heads_per_key * ITEM_SIZE, heads_per_key, steps + head_offset)


@compiled
def _write_channel_decays(layer: Record, steps: int, decays: int) -> None:
    """Write one row's decays of all key channels, computed from the projections at ``steps``."""
    heads, width, bound = layer.state_heads, layer.key_width, layer.decay_bound
    shape = heads, width
    numbers, forgets = array_at(steps, shape, types.float32), array_at(decays, shape, types.float32)
    biases, logs = array_at(layer.step_bias, shape, types.float32), array_at(layer.decay_log, (heads,), types.float32)
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
def prepare_delta(
    layer: Record,
    origins: Record,
    row: int,
    inputs: int,
    window: int,
    convolved: int,
    keys: int,
    steps: int,
    decays: int,
    strengths: int,
) -> None:
    """Convolve one row of a sequence, normalize its queries and keys, and compute its decays and write strengths.

    ``inputs`` is the address of the sequence's input rows, and the other addresses belong to this row. ``strengths``
    are changed in place.
    """
    if origins[row].parent == PADDING:
        return
    channels, heads, width = layer.channels, layer.key_heads, layer.key_width
    convolve(layer, origins, row, inputs, channels, window, convolved)
    silu_of(convolved, channels)
    size, factor = width * ITEM_SIZE, np.float32(1 / np.sqrt(width))
    for head in range(heads):
        unit_row(convolved + head * size, width, EPSILON, factor, convolved + head * size)
        unit_row(convolved + (heads + head) * size, width, EPSILON, ONE, keys + head * size)
    states = layer.state_heads
    time_steps, forgets = array_at(steps, (states,), types.float32), array_at(decays, (states,), types.float32)
    learns, strength = array_at(strengths, (states,), types.float32), layer.strength
    if layer.decay_width > 1:
        _write_channel_decays(layer, steps, decays)
    for head in range(states):
        if layer.decay_width == 1:
            forgets[head] = decay_of(layer, head, step_of(layer, head, time_steps[head]))
        learns[head] = strength / (ONE + np.float32(np.exp(-learns[head])))


@compiled
def delta_kept_size(layer: Record) -> int:
    """Return how many float32 values are kept per row: convolution inputs, keys, state changes and decays."""
    heads = layer.state_heads
    keys, values = layer.key_heads * layer.key_width, heads * layer.value_width
    return layer.channels + keys + values + heads * layer.decay_width  # type: ignore[no-any-return]


@compiled
def delta_state_size(layer: Record) -> int:
    """Return the size, in float32 values, of the state columns that are computed together."""
    return layer.key_width * min(layer.value_width, VECTORS * LANES)  # type: ignore[no-any-return]


@compiled
def recur_delta(
    pass_record: Record,
    layer: Record,
    origins: Record,
    slot: int,
    head: int,
    buffers: int,
    convolved: int,
    keys: int,
    decays: int,
    strengths: int,
    changes: int,
    written: int,
) -> None:
    """Compute one head for all rows of a sequence, and write each row's change to ``changes``.

    The outer product of a row's key and its change is added to the state.

    The addresses from ``convolved`` on are those of the sequence's first row.
    """
    channels, key_heads, width, values = layer.channels, layer.key_heads, layer.key_width, layer.value_width
    heads, rows, decay_width = layer.state_heads, len(origins), layer.decay_width
    key_head = head // (heads // key_heads)
    state = layer.state + (slot * layer.state_stride + head * width * values) * ITEM_SIZE
    size = delta_state_size(layer) * ITEM_SIZE
    column = 0
    while column < values:
        is_wide = values - column >= VECTORS * LANES and decay_width == 1
        block = VECTORS * LANES if is_wide else LANES
        before, last = state + column * ITEM_SIZE, -1
        for row in range(rows):
            if origins[row].parent == PADDING:
                continue
            source, into = origins[row].source, buffers + origins[row].target * size
            read, stride = (before, values) if source == BEFORE else (buffers + source * size, block)
            query = convolved + (row * channels + key_head * width) * ITEM_SIZE
            key = keys + (row * key_heads + key_head) * width * ITEM_SIZE
            value = convolved + (row * channels + 2 * key_heads * width + head * values + column) * ITEM_SIZE
            at = ((row * heads + head) * values + column) * ITEM_SIZE
            decay_at = decays + (row * heads + head) * decay_width * ITEM_SIZE
            decay = array_at(decay_at, (1,), types.float32)[0]
            strength = array_at(strengths, (rows, heads), types.float32)[row, head]
            change, out = changes + at, written + at
            if decay_width > 1:
                _recall_channels(read, stride, key, width, decay_at, out)
                _change(value, out, block, strength, change)
                _learn_channels(read, stride, into, block, key, query, width, decay_at, change, out)
            elif is_wide:
                _recall_wide(read, stride, key, width, decay, out)
                _change(value, out, block, strength, change)
                _learn_wide(read, stride, into, block, key, query, width, decay, change, out)
            else:
                _recall_narrow(read, stride, key, width, decay, out)
                _change(value, out, block, strength, change)
                _learn_narrow(read, stride, into, block, key, query, width, decay, change, out)
            last = into
        if pass_record.advances:
            for key_row in range(width):
                copy_floats(last + key_row * block * ITEM_SIZE, block, before + key_row * values * ITEM_SIZE)
        column += block


@compiled
def gate_delta(layer: Record, origins: Record, row: int, gates: int, mixed: int) -> None:
    """Normalize each head's output for one row and multiply it by the head's gate, in place.

    A gate is a sigmoid in a delta attention and a SiLU otherwise.
    """
    heads, values = layer.state_heads, layer.value_width
    if origins[row].parent == PADDING:
        clear_floats(mixed, heads * values)
        return
    for head in range(heads):
        at = head * values * ITEM_SIZE
        norm_row(mixed + at, layer.gate_norm, np.float32(0), values, layer.gate_epsilon, mixed + at)
    if layer.decay_width > 1:
        _multiply_by_sigmoid(gates, mixed, heads * values)
        return
    silu_in_place(gates, mixed, heads * values)
    copy_floats(gates, heads * values, mixed)


@compiled
def replay_delta(
    layer: Record, slot: int, head: int, path: Ints, keys: int, decays: int, changes: int, unread: int
) -> None:
    """Advance one head's state along a path of rows, by replaying the kept keys, decays and changes.

    ``unread`` is the address of memory for outputs that aren't used.
    """
    key_heads, width, values = layer.key_heads, layer.key_width, layer.value_width
    heads, decay_width = layer.state_heads, layer.decay_width
    key_head = head // (heads // key_heads)
    state = layer.state + (slot * layer.state_stride + head * width * values) * ITEM_SIZE
    column = 0
    while column < values:
        is_wide = values - column >= VECTORS * LANES and decay_width == 1
        at = state + column * ITEM_SIZE
        for row in path:
            key = keys + (row * key_heads + key_head) * width * ITEM_SIZE
            change = changes + ((row * heads + head) * values + column) * ITEM_SIZE
            decay_at = decays + (row * heads + head) * decay_width * ITEM_SIZE
            decay = array_at(decay_at, (1,), types.float32)[0]
            if decay_width > 1:
                _learn_channels(at, values, at, values, key, key, width, decay_at, change, unread)
            elif is_wide:
                _learn_wide(at, values, at, values, key, key, width, decay, change, unread)
            else:
                _learn_narrow(at, values, at, values, key, key, width, decay, change, unread)
        column += VECTORS * LANES if is_wide else LANES
