"""Computes a layer's mixer over all rows of a pass: its matmuls and the parallel steps between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import types

from hdtool.runtime.engines.cpu import convolution, delta_rule, mamba2
from hdtool.runtime.engines.cpu.convolution import (
    buffers_of,
    copy_windows,
    origins_at,
    shift_window,
    window_size,
)
from hdtool.runtime.engines.cpu.layer_record import (
    DELTA_RULE,
    LAYER,
    PASS,
    SHORT_CONVOLUTION,
    compute_step,
    multiply,
    multiply_scaled,
)
from hdtool.runtime.kernels.compiled import Array, Ints, Record, array_at, c_function, compiled, struct_at
from hdtool.runtime.kernels.gemm import STEP
from hdtool.runtime.kernels.thread_pool import PARTS_PER_THREAD, parts_of
from hdtool.runtime.kernels.vector_code import ITEM_SIZE, LANES

if TYPE_CHECKING:
    from hdtool.runtime.caches.states import States
    from hdtool.runtime.engines.cpu.mixer_table import MixerTable

WINDOWS, SHIFT, GATE_INPUTS, CONVOLVE_GATED = range(4)
PREPARE_DELTA, RECUR_DELTA, GATE_DELTA, REPLAY_DELTA = range(4, 8)
PREPARE_SCAN, SCAN, GATE_SCAN, REPLAY_SCAN, JOIN, SPREAD = range(8, 14)
"""Steps of mixers between their matmuls, for ``mixer_function``."""
PATH_SLOT, COUNT, LISTED_ROWS, PATH = range(4)
"""Fields of a path's record; the path's rows become part of the context.

PATH_SLOT: the path's sequence. COUNT: number of rows of the path. LISTED_ROWS: number of rows that this record lists,
which may be only the last rows of the path. PATH: first of the listed rows.
"""


@compiled
def row_scratch_size(layer: Record) -> int:
    """Return how many float32 values of scratch memory a layer's mixer needs per row."""
    channels, values = layer.channels, layer.state_heads * layer.value_width
    if layer.mixer == SHORT_CONVOLUTION:
        return 4 * channels  # type: ignore[no-any-return]
    if layer.mixer == DELTA_RULE:
        size = channels + 2 * values + layer.state_heads * (1 + layer.decay_width)
        return size if layer.fourth.kernels else size + channels + values + 2 * layer.state_heads  # type: ignore[no-any-return]
    return channels + values  # type: ignore[no-any-return]


@compiled
def kept_size(layer: Record) -> int:
    """Return how many float32 values a layer's mixer keeps per row until the row is accepted or rejected."""
    if layer.mixer == SHORT_CONVOLUTION:
        return layer.channels  # type: ignore[no-any-return]
    return delta_rule.delta_kept_size(layer) if layer.mixer == DELTA_RULE else mamba2.scan_kept_size(layer)


@compiled
def state_buffer_size(layer: Record) -> int:
    """Return how many float32 values a state buffer of a layer's mixer holds; 0 if the mixer has no recurrence."""
    if layer.mixer == SHORT_CONVOLUTION:
        return 0
    return delta_rule.delta_state_size(layer) if layer.mixer == DELTA_RULE else mamba2.scan_state_size(layer)


@compiled
def mixer_scratch_size(pass_record: Record) -> int:
    """Return how many float32 values of scratch memory ``mix`` needs."""
    if not pass_record.mixer_row:
        return 0
    rows = pass_record.slots * pass_record.new
    return _work_at(pass_record, 0) // ITEM_SIZE + rows * pass_record.mixer_row  # type: ignore[no-any-return]


@compiled
def _buffers_at(pass_record: Record, scratch: int) -> int:
    return scratch + pass_record.slots * pass_record.mixer_window * ITEM_SIZE  # type: ignore[no-any-return]


@compiled
def _work_at(pass_record: Record, scratch: int) -> int:
    buffers = pass_record.threads * PARTS_PER_THREAD * buffers_of(pass_record.new)
    return _buffers_at(pass_record, scratch) + buffers * pass_record.mixer_state * ITEM_SIZE  # type: ignore[no-any-return]


@compiled
def _part_buffers(pass_record: Record, scratch: int, first: int, units: int) -> int:
    """Return the address of the state buffers for the part of a job that begins with unit ``first`` of ``units``."""
    part = -(-first * parts_of(pass_record.threads, units, 1) // units)
    before = part * buffers_of(pass_record.new) * pass_record.mixer_state * ITEM_SIZE
    return _buffers_at(pass_record, scratch) + before  # type: ignore[no-any-return]


@compiled
def _compute_convolution(
    pass_record: Record, layer: Record, step: int, scratch: int, kept: int, first: int, end: int
) -> None:
    new, size = pass_record.new, layer.channels * ITEM_SIZE
    projected = _work_at(pass_record, scratch)
    mixed = projected + 3 * pass_record.slots * new * size
    if step == GATE_INPUTS:
        convolution.gate_inputs(layer, projected, kept, first, end)
        return
    for row in range(first, end):
        slot, slot_row = row // new, row % new
        slot_offset, window = slot * new * size, scratch + slot * window_size(layer) * ITEM_SIZE
        convolution.convolve_gated(
            layer,
            origins_at(pass_record.origins, slot, new),
            slot_row,
            kept + slot_offset,
            window,
            projected + 3 * slot_offset,
            mixed + row * size,
        )


@compiled
def _compute_delta(
    pass_record: Record, layer: Record, step: int, scratch: int, kept: int, path_at: int, first: int, end: int
) -> None:
    new, heads = pass_record.new, layer.state_heads
    rows = pass_record.slots * new
    channels, head_bytes = layer.channels * ITEM_SIZE, heads * ITEM_SIZE
    key_bytes, value_bytes = layer.key_heads * layer.key_width * ITEM_SIZE, layer.value_width * head_bytes
    decay_bytes = layer.decay_width * head_bytes
    keys = kept + rows * channels
    changes = keys + rows * key_bytes
    decays = changes + rows * value_bytes
    convolved = _work_at(pass_record, scratch)
    gates = convolved + rows * channels
    steps = gates + rows * value_bytes
    strengths = steps + rows * decay_bytes
    mixed = strengths + rows * head_bytes
    if step == JOIN:
        values = convolved + 2 * rows * key_bytes
        delta_rule.join_inputs(
            convolved, convolved + rows * key_bytes, values, key_bytes, value_bytes, kept, first, end
        )
    elif step == SPREAD:
        inputs = mixed + rows * value_bytes
        scores = inputs + rows * (channels + value_bytes)
        delta_rule.spread_inputs(layer, inputs, scores, kept, gates, strengths, steps, first, end)
    elif step == PREPARE_DELTA:
        for row in range(first, end):
            slot, slot_row = row // new, row % new
            delta_rule.prepare_delta(
                layer,
                origins_at(pass_record.origins, slot, new),
                slot_row,
                kept + slot * new * channels,
                scratch + slot * window_size(layer) * ITEM_SIZE,
                convolved + row * channels,
                keys + row * key_bytes,
                steps + row * decay_bytes,
                decays + row * decay_bytes,
                strengths + row * head_bytes,
            )
    elif step == RECUR_DELTA:
        buffers = _part_buffers(pass_record, scratch, first, pass_record.slots * heads)
        for unit in range(first, end):
            slot, at = unit // heads, unit // heads * new
            delta_rule.recur_delta(
                pass_record,
                layer,
                origins_at(pass_record.origins, slot, new),
                slot,
                unit % heads,
                buffers,
                convolved + at * channels,
                keys + at * key_bytes,
                decays + at * decay_bytes,
                strengths + at * head_bytes,
                changes + at * value_bytes,
                mixed + at * value_bytes,
            )
    elif step == GATE_DELTA:
        for row in range(first, end):
            origins, at = origins_at(pass_record.origins, row // new, new), row * value_bytes
            delta_rule.gate_delta(layer, origins, row % new, gates + at, mixed + at)
    else:
        slot, path = _path_at(path_at)
        at, unread = slot * new, _part_buffers(pass_record, scratch, first, heads)
        for head in range(first, end):
            delta_rule.replay_delta(
                layer,
                slot,
                head,
                path,
                keys + at * key_bytes,
                decays + at * decay_bytes,
                changes + at * value_bytes,
                unread,
            )


@compiled
def _compute_scan(
    pass_record: Record, layer: Record, step: int, scratch: int, kept: int, path_at: int, first: int, end: int
) -> None:
    new, heads = pass_record.new, layer.state_heads
    rows, row_bytes = pass_record.slots * new, mamba2.projected_size(layer) * ITEM_SIZE
    channels, head_bytes = layer.channels * ITEM_SIZE, heads * ITEM_SIZE
    key_bytes, value_bytes = layer.key_heads * layer.key_width * ITEM_SIZE, layer.value_width * head_bytes
    values = kept + rows * row_bytes
    keys = values + rows * value_bytes
    decays = keys + rows * key_bytes
    convolved = _work_at(pass_record, scratch)
    mixed = convolved + rows * channels
    if step == PREPARE_SCAN:
        for row in range(first, end):
            slot, slot_row = row // new, row % new
            mamba2.prepare_scan(
                pass_record,
                layer,
                origins_at(pass_record.origins, slot, new),
                slot_row,
                kept + slot * new * row_bytes,
                scratch + slot * window_size(layer) * ITEM_SIZE,
                convolved + row * channels,
                values + row * value_bytes,
                keys + row * key_bytes,
                decays + row * head_bytes,
            )
    elif step == SCAN:
        buffers = _part_buffers(pass_record, scratch, first, pass_record.slots * heads)
        for unit in range(first, end):
            slot, at = unit // heads, unit // heads * new
            mamba2.scan_head(
                pass_record,
                layer,
                origins_at(pass_record.origins, slot, new),
                slot,
                unit % heads,
                buffers,
                convolved + at * channels,
                values + at * value_bytes,
                keys + at * key_bytes,
                decays + at * head_bytes,
                mixed + at * value_bytes,
            )
    elif step == GATE_SCAN:
        for row in range(first, end):
            origins = origins_at(pass_record.origins, row // new, new)
            mamba2.gate_scan(layer, origins, row % new, kept + row * row_bytes, mixed + row * value_bytes)
    else:
        slot, path = _path_at(path_at)
        at, unread = slot * new, _part_buffers(pass_record, scratch, first, heads)
        for head in range(first, end):
            mamba2.replay_scan(
                layer,
                slot,
                head,
                path,
                values + at * value_bytes,
                keys + at * key_bytes,
                decays + at * head_bytes,
                unread,
            )


@compiled
def _path_at(address: int) -> tuple[int, Ints]:
    """Return ``(slot, rows)`` from the path record at ``address``: the path's slot and its listed rows."""
    head = array_at(address, (PATH,), types.int64)
    return head[PATH_SLOT], array_at(address, (PATH + head[LISTED_ROWS],), types.int64)[PATH:]


@compiled
def _shift(pass_record: Record, layer: Record, kept: int, path_at: int, first: int, end: int) -> None:
    slot, path = _path_at(path_at)
    stride, inputs = layer.channels, kept
    if layer.mixer not in (SHORT_CONVOLUTION, DELTA_RULE):
        stride = mamba2.projected_size(layer)
        inputs += layer.state_heads * layer.value_width * ITEM_SIZE
    count = array_at(path_at, (PATH,), types.int64)[COUNT]
    shift_window(layer, slot, inputs + slot * pass_record.new * stride * ITEM_SIZE, stride, count, path, first, end)


@c_function(STEP)
def mixer_function() -> Any:
    """Return the C function that computes any step of a mixer between its matmuls.

    A call computes the units from ``first`` to ``end``: rows, heads or vectors of channels, depending on the step.
    """

    def compute_mixer(
        pass_at: int,
        layer_at: int,
        _: int,
        step: int,
        scratch: int,
        kept: int,
        path_at: int,
        __: int,
        first: int,
        end: int,
    ) -> None:
        pass_record, layer = struct_at(pass_at, PASS), struct_at(layer_at, LAYER)
        if step == WINDOWS:
            copy_windows(layer, scratch, first, end)
        elif step == SHIFT:
            _shift(pass_record, layer, kept, path_at, first, end)
        elif step <= CONVOLVE_GATED:
            _compute_convolution(pass_record, layer, step, scratch, kept, first, end)
        elif step <= REPLAY_DELTA or step >= JOIN:
            _compute_delta(pass_record, layer, step, scratch, kept, path_at, first, end)
        else:
            _compute_scan(pass_record, layer, step, scratch, kept, path_at, first, end)

    return compute_mixer


@compiled
def _kept_at(pass_record: Record, layer: Record) -> int:
    """Return the address of the values that a layer keeps for the rows of a pass.

    In a pass over a prompt, all layers share one address, because nothing reads a layer's values later.
    """
    earlier = 0 if pass_record.advances else layer.journal_offset * pass_record.slots * pass_record.new
    return pass_record.journal + earlier * ITEM_SIZE  # type: ignore[no-any-return]


@compiled
def _multiply_twice(
    pass_record: Record, first: Record, second: Record, read: int, rows: int, between: int, written: int
) -> None:
    """Multiply rows by ``first``, if there is that matmul, and then by ``second``."""
    if first.kernels:
        multiply(pass_record, first, read, rows, between)
        read = between
    multiply(pass_record, second, read, rows, written)


@compiled
def mix(pass_record: Record, layer: Record, starts: Ints, read: int, rows: int, scratch: int, written: int) -> None:
    """Compute a layer's mixer for all rows at ``read`` and write its output to ``written``.

    The layer's states are updated only if the pass record's ``ADVANCES`` is set.
    """
    function, kept, work = pass_record.mixer_function, _kept_at(pass_record, layer), _work_at(pass_record, scratch)
    channels, heads, vectors = layer.channels, layer.state_heads, layer.channels // LANES
    values, state_work = heads * layer.value_width, rows * heads * layer.value_width * layer.key_width
    addresses, slots, keys = (scratch, kept, 0), pass_record.slots, layer.key_heads * layer.key_width
    channel_work, value_work = rows * channels, rows * values
    window = slots * vectors * LANES
    compute_step(pass_record, function, layer, starts, WINDOWS, *addresses, slots * vectors, window)
    if layer.mixer == SHORT_CONVOLUTION:
        multiply(pass_record, layer.first, read, rows, work)
        compute_step(pass_record, function, layer, starts, GATE_INPUTS, *addresses, rows, channel_work)
        compute_step(pass_record, function, layer, starts, CONVOLVE_GATED, *addresses, rows, channel_work)
        mixed = work + 3 * rows * channels * ITEM_SIZE
    elif layer.mixer == DELTA_RULE:
        gates = work + rows * channels * ITEM_SIZE
        steps = gates + rows * values * ITEM_SIZE
        strengths = steps + rows * heads * layer.decay_width * ITEM_SIZE
        mixed = strengths + rows * heads * ITEM_SIZE
        if not layer.fourth.kernels:
            inputs = strengths + rows * (heads + values) * ITEM_SIZE
            multiply(pass_record, layer.first, read, rows, inputs)
            multiply(pass_record, layer.second, read, rows, inputs + rows * (channels + values) * ITEM_SIZE)
            compute_step(pass_record, function, layer, starts, SPREAD, *addresses, rows, channel_work)
        elif layer.fifth.kernels:
            separate = work + rows * keys * ITEM_SIZE
            multiply(pass_record, layer.first, read, rows, work)
            multiply(pass_record, layer.fifth, read, rows, separate)
            multiply(pass_record, layer.sixth, read, rows, separate + rows * keys * ITEM_SIZE)
            compute_step(pass_record, function, layer, starts, JOIN, *addresses, rows, channel_work)
        else:
            multiply(pass_record, layer.first, read, rows, kept)
        if layer.fourth.kernels:
            _multiply_twice(pass_record, layer.gate_input, layer.second, read, rows, mixed, gates)
            multiply(pass_record, layer.third, read, rows, strengths)
            _multiply_twice(pass_record, layer.decay_input, layer.fourth, read, rows, mixed, steps)
        compute_step(pass_record, function, layer, starts, PREPARE_DELTA, *addresses, rows, channel_work)
        compute_step(pass_record, function, layer, starts, RECUR_DELTA, *addresses, slots * heads, state_work)
        compute_step(pass_record, function, layer, starts, GATE_DELTA, *addresses, rows, value_work)
    else:
        multiply_scaled(pass_record, layer, starts, layer.first, layer.factors.first, read, rows, kept)
        compute_step(pass_record, function, layer, starts, PREPARE_SCAN, *addresses, rows, channel_work)
        compute_step(pass_record, function, layer, starts, SCAN, *addresses, slots * heads, state_work)
        compute_step(pass_record, function, layer, starts, GATE_SCAN, *addresses, rows, value_work)
        mixed = work + rows * channels * ITEM_SIZE
    if pass_record.advances:
        # The windows aren't needed anymore, so their memory holds the path: the last rows of the prompt.
        new, columns = pass_record.new, min(pass_record.new, layer.columns)
        path = array_at(scratch, (PATH + columns,), types.int64)
        path[PATH_SLOT], path[COUNT], path[LISTED_ROWS] = 0, new, columns
        for column in range(columns):
            path[PATH + column] = new - columns + column
        compute_step(pass_record, function, layer, starts, SHIFT, scratch, kept, scratch, vectors, window)
    multiply_scaled(pass_record, layer, starts, layer.mixer_out, layer.factors.mixer_out, mixed, rows, written)


@compiled
def accept(pass_record: Record, layers: Record, starts: Ints, path: Ints, scratch: int) -> None:
    """Advance the mixers' states along a path of a pass's rows, by replaying the values kept for these rows.

    The states must be those before the pass.
    """
    function, count = pass_record.mixer_function, path[COUNT]
    for number in range(len(layers)):
        layer = layers[number]
        if not layer.mixer:
            continue
        addresses = scratch, _kept_at(pass_record, layer), path.ctypes.data
        vectors, heads = layer.channels // LANES, layer.state_heads
        compute_step(pass_record, function, layer, starts, SHIFT, *addresses, vectors, vectors * LANES)
        if layer.mixer != SHORT_CONVOLUTION:
            step = REPLAY_DELTA if layer.mixer == DELTA_RULE else REPLAY_SCAN
            work = count * heads * layer.value_width * layer.key_width
            compute_step(pass_record, function, layer, starts, step, *addresses, heads, work)


class KeptRows:
    """A copy of the values that mixers kept for the rows of one pass over trees."""

    def __init__(self, mixers: MixerTable, pass_record: Record, layers: Record, journal: Array) -> None:
        self._mixers, self._pass_record, self._layers, self._journal = mixers, pass_record, layers, journal
        pass_record.journal, pass_record.thread_pool = journal.ctypes.data, 0

    def accept(self, path: Array, states: States) -> None:
        """Advance a slot's states along a path of its rows; ``states`` may have moved in memory since the pass."""
        self._mixers.fill_states(self._layers, states, int(path[PATH_SLOT]))
        scratch = torch.empty(mixer_scratch_size(self._pass_record), dtype=torch.float32)
        accept(self._pass_record, self._layers, np.zeros(1, np.int64), path, scratch.data_ptr())
