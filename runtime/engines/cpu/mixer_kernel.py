"""Computes a layer's mixer over all rows of a pass: its matmuls and the parallel steps between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import types

from hdtool.runtime.engines.cpu import convolution, delta_rule, mamba2
from hdtool.runtime.engines.cpu.convolution import buffers_of, copy_windows, shift_window
from hdtool.runtime.engines.cpu.layer_record import (
    DELTA_RULE,
    LAYER,
    PASS,
    SHORT_CONVOLUTION,
    compute_step,
    multiply,
)
from hdtool.runtime.kernels.compiled import Array, Ints, Record, array_at, c_function, compiled, struct_at
from hdtool.runtime.kernels.matmul import STEP
from hdtool.runtime.kernels.thread_pool import PARTS_PER_THREAD, parts_of
from hdtool.runtime.kernels.vector_code import ITEM_SIZE, LANES

if TYPE_CHECKING:
    from hdtool.runtime.caches.recurrent_states import States
    from hdtool.runtime.engines.cpu.mixer_table import MixerTable

WINDOWS, SHIFT, ARRANGE, PREPARE, RECUR, GATE, REPLAY = range(7)
"""Steps of mixers between their matmuls, for ``mixer_function``.

A short convolution has no recurrence: ``ARRANGE`` gates its inputs, and ``GATE`` convolves and gates the results.
"""
PATH_SLOT, COUNT, LISTED_ROWS, PATH = range(4)
"""Fields of a path's record; the path's rows become part of the context.

PATH_SLOT: the path's sequence. COUNT: number of rows of the path. LISTED_ROWS: number of rows that this record lists,
which may be only the last rows of the path. PATH: first of the listed rows.
"""


def sizes_of(mixer: Record) -> tuple[int, int, int]:
    """Return how many float32 values a mixer needs as scratch memory per row, keeps per row, and has per state buffer.

    What it keeps of a row is needed until the row is accepted or rejected. Only recurrences have state buffers.
    """
    if mixer.kind == SHORT_CONVOLUTION:
        return 4 * mixer.convolution.channels, mixer.convolution.channels, 0
    recurrence = delta_rule if mixer.kind == DELTA_RULE else mamba2
    return recurrence.scratch_size(mixer), recurrence.kept_size(mixer), recurrence.state_size(mixer)


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
    pass_record: Record, mixer: Record, step: int, scratch: int, kept: int, first: int, end: int
) -> None:
    projected = _work_at(pass_record, scratch)
    mixed = projected + 3 * pass_record.total_rows * mixer.convolution.channels * ITEM_SIZE
    for row in range(first, end):
        if step == ARRANGE:
            convolution.gate_input(mixer.convolution, row, projected, kept)
        else:
            convolution.convolve_gated(pass_record, mixer.convolution, row, kept, scratch, projected, mixed)


@compiled
def _compute_delta(
    pass_record: Record, mixer: Record, step: int, scratch: int, kept: int, path_at: int, first: int, end: int
) -> None:
    rows, heads = pass_record.total_rows, mixer.heads
    rows_at = delta_rule.delta_rows(mixer, rows, kept, _work_at(pass_record, scratch))
    if step == REPLAY:
        (slot, path), unread = _path_at(path_at), _part_buffers(pass_record, scratch, first, heads)
        for head in range(first, end):
            delta_rule.replay_delta(pass_record, mixer, rows_at, slot, head, path, unread)
        return
    buffers = _part_buffers(pass_record, scratch, first, pass_record.slots * heads)
    for unit in range(first, end):
        if step == ARRANGE and mixer.delta.steps.kernels:
            delta_rule.join_inputs(mixer, rows, rows_at, unit)
        elif step == ARRANGE:
            delta_rule.spread_inputs(mixer, rows, rows_at, unit)
        elif step == PREPARE:
            delta_rule.prepare_delta(pass_record, mixer, rows_at, unit, scratch)
        elif step == RECUR:
            delta_rule.recur_delta(pass_record, mixer, rows_at, unit // heads, unit % heads, buffers)
        else:
            delta_rule.gate_delta(pass_record, mixer, rows_at, unit)


@compiled
def _compute_scan(
    pass_record: Record, mixer: Record, step: int, scratch: int, kept: int, path_at: int, first: int, end: int
) -> None:
    heads, at = mixer.heads, mamba2.scan_rows(mixer, pass_record.total_rows, kept, _work_at(pass_record, scratch))
    if step == REPLAY:
        (slot, path), unread = _path_at(path_at), _part_buffers(pass_record, scratch, first, heads)
        for head in range(first, end):
            mamba2.replay_scan(pass_record, mixer, at, slot, head, path, unread)
        return
    buffers = _part_buffers(pass_record, scratch, first, pass_record.slots * heads)
    for unit in range(first, end):
        if step == PREPARE:
            mamba2.prepare_scan(pass_record, mixer, at, unit, scratch)
        elif step == RECUR:
            mamba2.recur_scan(pass_record, mixer, at, unit // heads, unit % heads, buffers)
        else:
            mamba2.gate_scan(pass_record, mixer, at, unit)


@compiled
def _path_at(address: int) -> tuple[int, Ints]:
    """Return ``(slot, rows)`` from the path record at ``address``: the path's slot and its listed rows."""
    head = array_at(address, (PATH,), types.int64)
    return head[PATH_SLOT], array_at(address, (PATH + head[LISTED_ROWS],), types.int64)[PATH:]


@compiled
def _shift(pass_record: Record, mixer: Record, kept: int, path_at: int, first: int, end: int) -> None:
    slot, path = _path_at(path_at)
    stride, inputs = mixer.convolution.channels, kept
    if mixer.kind not in (SHORT_CONVOLUTION, DELTA_RULE):
        stride = mamba2.projected_size(mixer)
        inputs += mixer.heads * mixer.value_width * ITEM_SIZE
    count = array_at(path_at, (PATH,), types.int64)[COUNT]
    inputs += slot * pass_record.new * stride * ITEM_SIZE
    shift_window(mixer.convolution, slot, inputs, stride, count, path, first, end)


@c_function(STEP)
def mixer_function() -> Any:
    """Return the C function that computes any step of a mixer between its matmuls.

    A call computes the units from ``first`` to ``end``: rows, heads or vectors of channels, depending on the step.
    """

    def compute_mixer(
        pass_at: int,
        layer_at: int,
        step: int,
        scratch: int,
        kept: int,
        path_at: int,
        _: int,
        __: int,
        first: int,
        end: int,
    ) -> None:
        pass_record, mixer = struct_at(pass_at, PASS), struct_at(layer_at, LAYER).mixer
        if step == WINDOWS:
            copy_windows(mixer.convolution, scratch, first, end)
        elif step == SHIFT:
            _shift(pass_record, mixer, kept, path_at, first, end)
        elif mixer.kind == SHORT_CONVOLUTION:
            _compute_convolution(pass_record, mixer, step, scratch, kept, first, end)
        elif mixer.kind == DELTA_RULE:
            _compute_delta(pass_record, mixer, step, scratch, kept, path_at, first, end)
        else:
            _compute_scan(pass_record, mixer, step, scratch, kept, path_at, first, end)

    return compute_mixer


@compiled
def _kept_at(pass_record: Record, mixer: Record) -> int:
    """Return the address of the values that a layer keeps for the rows of a pass.

    In a pass over a prompt, all layers share one address, because nothing reads a layer's values later.
    """
    earlier = 0 if pass_record.advances else mixer.journal_offset * pass_record.slots * pass_record.new
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
def _compute(
    pass_record: Record, layer: Record, step: int, scratch: int, kept: int, path: int, units: int, work: int
) -> None:
    compute_step(pass_record, pass_record.mixer_function, layer, step, scratch, kept, path, units, work)


@compiled
def mix(pass_record: Record, layer: Record, read: int, rows: int, scratch: int, written: int) -> None:
    """Compute a layer's mixer for all rows at ``read``, and write the mixer's output to ``written``.

    The layer's states are updated only if the pass ``advances`` them.
    """
    mixer, channels = layer.mixer, layer.mixer.convolution.channels
    kept, work = _kept_at(pass_record, mixer), _work_at(pass_record, scratch)
    vectors, heads = channels // LANES, pass_record.slots * mixer.heads
    values = rows * mixer.heads * mixer.value_width
    state_work, channel_work, window = values * mixer.key_width, rows * channels, pass_record.slots * vectors * LANES
    _compute(pass_record, layer, WINDOWS, scratch, kept, 0, pass_record.slots * vectors, window)
    if mixer.kind == SHORT_CONVOLUTION:
        multiply(pass_record, mixer.inputs, read, rows, work)
        _compute(pass_record, layer, ARRANGE, scratch, kept, 0, rows, channel_work)
        values, mixed = channel_work, work + 3 * channel_work * ITEM_SIZE
    elif mixer.kind == DELTA_RULE:
        mixed = _multiply_for_delta(pass_record, layer, read, rows, scratch, kept)
    else:
        multiply(pass_record, mixer.inputs, read, rows, kept)
        mixed = mamba2.scan_rows(mixer, rows, kept, work).mixed
    if mixer.kind != SHORT_CONVOLUTION:
        _compute(pass_record, layer, PREPARE, scratch, kept, 0, rows, channel_work)
        _compute(pass_record, layer, RECUR, scratch, kept, 0, heads, state_work)
    _compute(pass_record, layer, GATE, scratch, kept, 0, rows, values)
    if pass_record.advances:
        # The windows aren't needed anymore, so their memory holds the path: the last rows of the prompt.
        new, columns = pass_record.new, min(pass_record.new, mixer.convolution.taps)
        path = array_at(scratch, (PATH + columns,), types.int64)
        path[PATH_SLOT], path[COUNT], path[LISTED_ROWS] = 0, new, columns
        for column in range(columns):
            path[PATH + column] = new - columns + column
        _compute(pass_record, layer, SHIFT, scratch, kept, scratch, vectors, window)
    multiply(pass_record, mixer.out, mixed, rows, written)


@compiled
def _multiply_for_delta(pass_record: Record, layer: Record, read: int, rows: int, scratch: int, kept: int) -> int:
    """Compute the matmuls before a delta rule; return the address to which the rule writes its outputs."""
    mixer, delta = layer.mixer, layer.mixer.delta
    rows_at = delta_rule.delta_rows(mixer, rows, kept, _work_at(pass_record, scratch))
    if not delta.steps.kernels:
        inputs, scores = delta_rule.grouped_at(mixer, rows, rows_at)
        multiply(pass_record, mixer.inputs, read, rows, inputs)
        multiply(pass_record, delta.strengths, read, rows, scores)
    elif delta.keys.kernels:
        queries, keys, values = delta_rule.separate_at(mixer, rows, rows_at)
        multiply(pass_record, mixer.inputs, read, rows, queries)
        multiply(pass_record, delta.keys, read, rows, keys)
        multiply(pass_record, delta.values, read, rows, values)
    else:
        multiply(pass_record, mixer.inputs, read, rows, rows_at.inputs)
    if not delta.steps.kernels or delta.keys.kernels:
        _compute(pass_record, layer, ARRANGE, scratch, kept, 0, rows, rows * mixer.convolution.channels)
    if delta.steps.kernels:
        _multiply_twice(pass_record, delta.gate_input, delta.gates, read, rows, rows_at.mixed, rows_at.gates)
        multiply(pass_record, delta.strengths, read, rows, rows_at.strengths)
        _multiply_twice(pass_record, delta.decay_input, delta.steps, read, rows, rows_at.mixed, rows_at.steps)
    return rows_at.mixed


@compiled
def accept(pass_record: Record, layers: Record, path: Ints, scratch: int) -> None:
    """Advance the mixers' states along a path of a pass's rows, by replaying the values kept for these rows.

    The states must be those before the pass.
    """
    for number in range(len(layers)):
        layer, mixer = layers[number], layers[number].mixer
        if not mixer.kind:
            continue
        kept = _kept_at(pass_record, mixer)
        path_at: Any = np.int64(path.ctypes.data)
        vectors, heads = mixer.convolution.channels // LANES, mixer.heads
        _compute(pass_record, layer, SHIFT, scratch, kept, path_at, vectors, vectors * LANES)
        if mixer.kind != SHORT_CONVOLUTION:
            work = path[COUNT] * heads * mixer.value_width * mixer.key_width
            _compute(pass_record, layer, REPLAY, scratch, kept, path_at, heads, work)


class KeptRows:
    """A copy of the values that mixers kept for the rows of one pass over trees."""

    def __init__(self, mixers: MixerTable, pass_record: Record, layers: Record, journal: Array) -> None:
        self._mixers, self._pass_record, self._layers, self._journal = mixers, pass_record, layers, journal
        pass_record.journal, pass_record.thread_pool = journal.ctypes.data, 0

    def accept(self, path: Array, states: States) -> None:
        """Advance a slot's states along a path of its rows; ``states`` may have moved in memory since the pass."""
        self._mixers.fill_states(self._layers, states, int(path[PATH_SLOT]))
        scratch = torch.empty(mixer_scratch_size(self._pass_record), dtype=torch.float32)
        accept(self._pass_record, self._layers, path, scratch.data_ptr())
