"""Computes the scan of Mamba-2, head by head.

For each row, the head's state ``[value, key]`` decays, and the outer product of the row's value and key is added. The
in-projection gives a gate, the convolution's input (values, keys and queries of all heads) and each head's time step.
Values, keys and queries are called x, B and C in the paper.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from hdtool.runtime.engines.cpu.convolution import BEFORE, PADDING, convolve, silu_of
from hdtool.runtime.engines.cpu.delta_rule import decay_of, step_of
from hdtool.runtime.kernels.compiled import Ints, Record, array_at, clear_floats, compiled, copy_floats, generated
from hdtool.runtime.kernels.row_operations import norm_row, scale_in_place, silu_in_place
from hdtool.runtime.kernels.vector_code import FLOAT, INDEX, ITEM_SIZE, LANES, FloatCode


@generated(*[types.int64] * 6, types.float32, types.int64)
def _scan(
    builder: Any, state: Any, into: Any, key: Any, query: Any, width: Any, value: Any, decay: Any, written: Any
) -> None:
    """Update ``LANES`` rows of a state and write their products with a query.

    Each row of the state decays, and the key times the row's value is added to it.
    """
    code = FloatCode(builder)
    factor = code.splat(decay)
    rows = [builder.mul(width, INDEX(lane)) for lane in range(LANES)]
    values = [code.splat(code.read(code.at(value, INDEX(lane)), FLOAT)) for lane in range(LANES)]

    def add(index: Any, sums: list[Any]) -> list[Any]:
        keys, queries = code.read(code.at(key, index)), code.read(code.at(query, index))
        totals = []
        for row, row_value, sum_ in zip(rows, values, sums, strict=True):
            offset = builder.add(row, index)
            numbers = builder.fmul(code.read(code.at(state, offset)), factor)
            numbers = code.multiply_add(keys, row_value, numbers)
            code.store(numbers, code.at(into, offset))
            totals.append(code.multiply_add(numbers, queries, sum_))
        return totals

    sums = code.loop(width, [code.number(0.0)] * LANES, add)
    code.store(code.sums_of(sums), written)


@generated(*[types.int64] * 3, types.float32)
def _add_scaled(builder: Any, sums: Any, numbers: Any, size: Any, factor: Any) -> None:
    """``sums += numbers * factor``"""
    code = FloatCode(builder)
    by = code.splat(factor)

    def apply(index: Any, _: list[Any]) -> list[Any]:
        address = code.at(sums, index)
        code.store(code.multiply_add(code.read(code.at(numbers, index)), by, code.read(address)), address)
        return []

    code.loop(size, [], apply)


@compiled
def projected_size(layer: Record) -> int:
    """Return the number of float32 values per row in the output of the in-projection."""
    return layer.state_heads * layer.value_width + layer.channels + layer.state_heads  # type: ignore[no-any-return]


@compiled
def prepare_scan(
    pass_record: Record,
    layer: Record,
    origins: Record,
    row: int,
    projected: int,
    window: int,
    convolved: int,
    values: int,
    keys: int,
    decays: int,
) -> None:
    """Convolve one row of a sequence, and compute its keys, its decays and the products of its values and time steps.

    ``projected`` is the address of the in-projection's outputs for the whole sequence, and the other addresses belong
    to this row.
    """
    if origins[row].parent == PADDING:
        return
    channels, heads, width = layer.channels, layer.state_heads, layer.value_width
    inner, stride = heads * width, projected_size(layer)
    convolve(layer, origins, row, projected + inner * ITEM_SIZE, stride, window, convolved)
    silu_of(convolved, channels)
    copy_floats(convolved, inner, values)
    copy_floats(convolved + inner * ITEM_SIZE, layer.key_heads * layer.key_width, keys)
    at = projected + (row * stride + inner + channels) * ITEM_SIZE
    time_steps, forgets = array_at(at, (heads,), types.float32), array_at(decays, (heads,), types.float32)
    for head in range(heads):
        step = step_of(layer, head, time_steps[head])
        if pass_record.advances and step < layer.min_step:
            step = layer.min_step
        forgets[head] = decay_of(layer, head, step)
        scale_in_place(values + head * width * ITEM_SIZE, width, step)


@compiled
def scan_kept_size(layer: Record) -> int:
    """Return how many float32 values the mixer keeps per row.

    These are the in-projection's output, values times their time steps, keys and decays.
    """
    heads, keys = layer.state_heads, layer.key_heads * layer.key_width
    return projected_size(layer) + heads * layer.value_width + keys + heads  # type: ignore[no-any-return]


@compiled
def scan_state_size(layer: Record) -> int:
    """Return the size, in float32 values, of the state rows that are computed together."""
    return layer.key_width * LANES  # type: ignore[no-any-return]


@compiled
def scan_head(
    pass_record: Record,
    layer: Record,
    origins: Record,
    slot: int,
    head: int,
    buffers: int,
    convolved: int,
    values: int,
    keys: int,
    decays: int,
    written: int,
) -> None:
    """Compute one head for all rows of a sequence.

    The addresses from ``convolved`` on are those of the sequence's first row.
    """
    channels, key_heads, width, height = layer.channels, layer.key_heads, layer.key_width, layer.value_width
    heads, rows = layer.state_heads, len(origins)
    key_head = head // (heads // key_heads)
    state = layer.state + (slot * layer.state_stride + head * height * width) * ITEM_SIZE
    size = scan_state_size(layer) * ITEM_SIZE
    skip = array_at(layer.skip, (heads,), types.float32)[head]
    for first in range(0, height, LANES):
        before, last = state + first * width * ITEM_SIZE, -1
        for row in range(rows):
            if origins[row].parent == PADDING:
                continue
            source, into = origins[row].source, buffers + origins[row].target * size
            read = before if source == BEFORE else buffers + source * size
            key = keys + (row * key_heads + key_head) * width * ITEM_SIZE
            query = convolved + (row * channels + heads * height + (key_heads + key_head) * width) * ITEM_SIZE
            at = ((row * heads + head) * height + first) * ITEM_SIZE
            decay = array_at(decays, (rows, heads), types.float32)[row, head]
            _scan(read, into, key, query, width, values + at, decay, written + at)
            unscaled = convolved + (row * channels + head * height + first) * ITEM_SIZE
            _add_scaled(written + at, unscaled, LANES, skip)
            last = into
        if pass_record.advances:
            copy_floats(last, LANES * width, before)


@compiled
def gate_scan(layer: Record, origins: Record, row: int, gates: int, mixed: int) -> None:
    """Multiply one row's output by its gate, and normalize each group of heads before or after, if there is a norm.

    The result is written to ``mixed``; ``gates`` are overwritten.
    """
    inner = layer.state_heads * layer.value_width
    if origins[row].parent == PADDING:
        clear_floats(mixed, inner)
        return
    if layer.gates_after_norm:
        _norm_groups(layer, mixed, mixed)
    silu_in_place(gates, mixed, inner)
    if layer.gate_norm and not layer.gates_after_norm:
        _norm_groups(layer, gates, mixed)
    else:
        copy_floats(gates, inner, mixed)


@compiled
def _norm_groups(layer: Record, read: int, written: int) -> None:
    groups = layer.key_heads
    size = layer.state_heads * layer.value_width // groups
    for group in range(groups):
        at = group * size * ITEM_SIZE
        norm_row(read + at, layer.gate_norm + at, np.float32(0), size, layer.gate_epsilon, written + at)


@compiled
def replay_scan(
    layer: Record, slot: int, head: int, path: Ints, values: int, keys: int, decays: int, unread: int
) -> None:
    """Advance one head's state along a path of rows, by replaying the kept values, keys and decays.

    ``unread`` is the address of memory for outputs that aren't used.
    """
    key_heads, width, height, heads = layer.key_heads, layer.key_width, layer.value_width, layer.state_heads
    key_head = head // (heads // key_heads)
    state = layer.state + (slot * layer.state_stride + head * height * width) * ITEM_SIZE
    for first in range(0, height, LANES):
        at = state + first * width * ITEM_SIZE
        for row in path:
            key = keys + (row * key_heads + key_head) * width * ITEM_SIZE
            value = values + ((row * heads + head) * height + first) * ITEM_SIZE
            decay = array_at(decays, (row + 1, heads), types.float32)[row, head]
            _scan(at, at, key, key, width, value, decay, unread)
