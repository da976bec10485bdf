"""Computes the scan of Mamba-2, head by head.

For each row, the head's state ``[value, key]`` decays, and the outer product of the row's value and key is added. The
in-projection gives a gate, the convolution's input (values, keys and queries of all heads) and each head's time step.
Values, keys and queries are called x, B and C in the paper.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types

from hdtool.runtime.engines.cpu.convolution import BEFORE, PADDING, convolve, is_padding, origins_at
from hdtool.runtime.engines.cpu.delta_rule import decay_of, step_of
from hdtool.runtime.kernels.compiled import Ints, Record, array_at, clear_floats, compiled, copy_floats, generated
from hdtool.runtime.kernels.row_operations import elementwise, norm_row, scale_in_place, silu_in_place, silu_of
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


_add_scaled = elementwise(lambda code, sum_, number, factor: code.multiply_add(number, factor, sum_), 2, 1)
"""Computes ``sums += numbers * factor``."""


class ScanRows(NamedTuple):
    """Addresses of what a scan computes for a pass's rows: values kept to replay them, then scratch memory."""

    projected: int
    """Output of the in-projection."""
    values: int
    """Values times their time steps."""
    keys: int
    decays: int
    convolved: int
    mixed: int
    """Output of each head."""


@compiled
def projected_size(mixer: Record) -> int:
    """Return the number of float32 values per row in the output of the in-projection."""
    return mixer.heads * mixer.value_width + mixer.convolution.channels + mixer.heads  # type: ignore[no-any-return]


@compiled
def scan_rows(mixer: Record, rows: int, kept: int, scratch: int) -> ScanRows:
    """Return the addresses for ``rows`` rows: kept values from ``kept`` on, scratch memory from ``scratch`` on."""
    values = kept + rows * projected_size(mixer) * ITEM_SIZE
    keys = values + rows * mixer.heads * mixer.value_width * ITEM_SIZE
    decays = keys + rows * mixer.key_heads * mixer.key_width * ITEM_SIZE
    return ScanRows(kept, values, keys, decays, scratch, scratch + rows * mixer.convolution.channels * ITEM_SIZE)


@compiled
def scratch_size(mixer: Record) -> int:
    """Return how many float32 values of scratch memory are needed per row."""
    return scan_rows(mixer, 1, 0, 0).mixed // ITEM_SIZE + mixer.heads * mixer.value_width  # type: ignore[no-any-return]


@compiled
def kept_size(mixer: Record) -> int:
    """Return how many float32 values are kept per row."""
    return scan_rows(mixer, 1, 0, 0).decays // ITEM_SIZE + mixer.heads  # type: ignore[no-any-return]


@compiled
def prepare_scan(pass_record: Record, mixer: Record, rows_at: ScanRows, row: int, windows: int) -> None:
    """Convolve a row, and compute its keys, its decays and the products of its values and time steps."""
    if is_padding(pass_record, row):
        return
    channels, heads, width = mixer.convolution.channels, mixer.heads, mixer.value_width
    inner, stride, keys = heads * width, projected_size(mixer), mixer.key_heads * mixer.key_width
    convolved, values = rows_at.convolved + row * channels * ITEM_SIZE, rows_at.values + row * inner * ITEM_SIZE
    convolve(pass_record, mixer.convolution, row, rows_at.projected + inner * ITEM_SIZE, stride, windows, convolved)
    silu_of(convolved, channels)
    copy_floats(convolved, inner, values)
    copy_floats(convolved + inner * ITEM_SIZE, keys, rows_at.keys + row * keys * ITEM_SIZE)
    time_steps = array_at(rows_at.projected + (row * stride + inner + channels) * ITEM_SIZE, (heads,), types.float32)
    forgets = array_at(rows_at.decays + row * heads * ITEM_SIZE, (heads,), types.float32)
    for head in range(heads):
        step = step_of(mixer, head, time_steps[head])
        if pass_record.advances and step < mixer.scan.min_step:
            step = mixer.scan.min_step
        forgets[head] = decay_of(mixer, head, step)
        scale_in_place(values + head * width * ITEM_SIZE, width, step)


@compiled
def state_size(mixer: Record) -> int:
    """Return the size, in float32 values, of the state rows that are computed together."""
    return mixer.key_width * LANES  # type: ignore[no-any-return]


@compiled
def recur_scan(pass_record: Record, mixer: Record, rows_at: ScanRows, slot: int, head: int, buffers: int) -> None:
    """Compute one head for all rows of a sequence; if the pass ``advances``, also update the sequence's state."""
    channels, key_heads, width, height = mixer.convolution.channels, mixer.key_heads, mixer.key_width, mixer.value_width
    heads, new = mixer.heads, pass_record.new
    key_head, origins = head // (heads // key_heads), origins_at(pass_record.origins, slot, new)
    state = mixer.state + (slot * mixer.state_stride + head * height * width) * ITEM_SIZE
    size = state_size(mixer) * ITEM_SIZE
    skip = array_at(mixer.scan.skip, (heads,), types.float32)[head]
    for first in range(0, height, LANES):
        before, last = state + first * width * ITEM_SIZE, -1
        for slot_row in range(new):
            if origins[slot_row].parent == PADDING:
                continue
            row = slot * new + slot_row
            source, into = origins[slot_row].source, buffers + origins[slot_row].target * size
            read = before if source == BEFORE else buffers + source * size
            key = rows_at.keys + (row * key_heads + key_head) * width * ITEM_SIZE
            query = rows_at.convolved + (row * channels + heads * height + (key_heads + key_head) * width) * ITEM_SIZE
            offset = ((row * heads + head) * height + first) * ITEM_SIZE
            decay = array_at(rows_at.decays + (row * heads + head) * ITEM_SIZE, (1,), types.float32)[0]
            _scan(read, into, key, query, width, rows_at.values + offset, decay, rows_at.mixed + offset)
            unscaled = rows_at.convolved + (row * channels + head * height + first) * ITEM_SIZE
            _add_scaled(rows_at.mixed + offset, unscaled, LANES, skip)
            last = into
        if pass_record.advances:
            copy_floats(last, LANES * width, before)


@compiled
def gate_scan(pass_record: Record, mixer: Record, rows_at: ScanRows, row: int) -> None:
    """Multiply a row's output by its gate, and normalize each group of heads before or after, if there is a norm."""
    inner = mixer.heads * mixer.value_width
    gates, mixed = rows_at.projected + row * projected_size(mixer) * ITEM_SIZE, rows_at.mixed + row * inner * ITEM_SIZE
    if is_padding(pass_record, row):
        clear_floats(mixed, inner)
        return
    if mixer.scan.gates_after_norm:
        _norm_groups(mixer, mixed, mixed)
    silu_in_place(gates, mixed, inner)
    if mixer.norm and not mixer.scan.gates_after_norm:
        _norm_groups(mixer, gates, mixed)
    else:
        copy_floats(gates, inner, mixed)


@compiled
def _norm_groups(mixer: Record, read: int, written: int) -> None:
    groups = mixer.key_heads
    size = mixer.heads * mixer.value_width // groups
    for group in range(groups):
        at = group * size * ITEM_SIZE
        norm_row(read + at, mixer.norm + at, np.float32(0), size, mixer.epsilon, written + at)


@compiled
def replay_scan(
    pass_record: Record, mixer: Record, rows_at: ScanRows, slot: int, head: int, path: Ints, unread: int
) -> None:
    """Advance one head's state along a path of a sequence's rows, by replaying the kept values, keys and decays.

    ``unread`` is the address of memory for outputs that aren't used.
    """
    key_heads, width, height, heads = mixer.key_heads, mixer.key_width, mixer.value_width, mixer.heads
    key_head = head // (heads // key_heads)
    state = mixer.state + (slot * mixer.state_stride + head * height * width) * ITEM_SIZE
    for first in range(0, height, LANES):
        into = state + first * width * ITEM_SIZE
        for slot_row in path:
            row = slot * pass_record.new + slot_row
            key = rows_at.keys + (row * key_heads + key_head) * width * ITEM_SIZE
            value = rows_at.values + ((row * heads + head) * height + first) * ITEM_SIZE
            decay = array_at(rows_at.decays + (row * heads + head) * ITEM_SIZE, (1,), types.float32)[0]
            _scan(into, into, key, key, width, value, decay, unread)
