"""Computes a layer's mixer over all rows of a pass: its matmuls and the parallel steps between them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import cfunc, types

from hdtool.runtime.engines.cpu.layer_record import (
    ADVANCES,
    CHANNELS,
    COLUMNS,
    DELTA_RULE,
    FIELDS,
    FIFTH,
    FOURTH,
    JOURNAL,
    JOURNAL_AT,
    KEY_HEADS,
    KEY_WIDTH,
    MIXER,
    MIXER_PART,
    MIXER_ROW,
    MIXER_STATE,
    MIXER_WINDOW,
    NEW,
    ORIGINS,
    PASS_FIELDS,
    SHORT_CONVOLUTION,
    SIXTH,
    SLOTS,
    STATE_HEADS,
    THREAD_POOL,
    THREADS,
    TO_KEYS,
    TO_OUTPUT,
    TO_QUERIES,
    TO_VALUES,
    VALUE_WIDTH,
    Numbers,
    compute_part,
    multiply,
    multiply_by,
)
from hdtool.runtime.engines.cpu.mixers import convolution, delta_rule, mamba2
from hdtool.runtime.engines.cpu.mixers.convolution import (
    buffers_of,
    copy_windows,
    origins_at,
    shift_window,
    window_numbers,
)
from hdtool.runtime.kernels.compiled import Array, array_at, compiled
from hdtool.runtime.kernels.gemm import MATMUL_ARGUMENTS
from hdtool.runtime.kernels.thread_pool import PARTS_PER_THREAD, parts_of
from hdtool.runtime.kernels.vector_code import ITEM_SIZE, LANES

if TYPE_CHECKING:
    from hdtool.runtime.engines.cpu.weight_table import MixerTable
    from hdtool.runtime.model.cache.states import States

WINDOWS, SHIFT, GATE_INPUTS, CONVOLVE_GATED = range(4)
PREPARE_DELTA, RECUR_DELTA, GATE_DELTA, REPLAY_DELTA = range(4, 8)
PREPARE_SCAN, SCAN, GATE_SCAN, REPLAY_SCAN, JOIN, SPREAD = range(8, 14)
"""Steps of mixers between their matmuls, for ``mixer_function``."""
OF_SLOT, COUNT, GIVEN, PATH = range(4)
"""Record of a path that becomes part of the context.

OF_SLOT: the path's sequence. COUNT: number of its rows. GIVEN: number of rows that this record lists, which may be only
the last ones. PATH: first of the listed rows.
"""


@compiled
def row_numbers(layer: Numbers) -> int:
    """Return the scratch memory that a layer's mixer needs per row, in float32 values."""
    channels, values = layer[CHANNELS], layer[STATE_HEADS] * layer[VALUE_WIDTH]
    if layer[MIXER] == SHORT_CONVOLUTION:
        return 4 * channels  # type: ignore[no-any-return]
    if layer[MIXER] == DELTA_RULE:
        numbers = channels + 2 * values + 2 * layer[STATE_HEADS]
        return numbers if layer[FOURTH] else numbers + channels + values + 2 * layer[STATE_HEADS]  # type: ignore[no-any-return]
    return channels + values  # type: ignore[no-any-return]


@compiled
def kept_numbers(layer: Numbers) -> int:
    """Return how many float32 values a layer's mixer keeps per row until the row is accepted or rejected."""
    if layer[MIXER] == SHORT_CONVOLUTION:
        return layer[CHANNELS]  # type: ignore[no-any-return]
    return delta_rule.delta_kept_numbers(layer) if layer[MIXER] == DELTA_RULE else mamba2.scan_kept_numbers(layer)


@compiled
def state_numbers(layer: Numbers) -> int:
    """Return the size of one buffer for the state of a layer's mixer, in float32 values; 0 if it needs none."""
    if layer[MIXER] == SHORT_CONVOLUTION:
        return 0
    return delta_rule.delta_state_numbers(layer) if layer[MIXER] == DELTA_RULE else mamba2.scan_state_numbers(layer)


@compiled
def mixer_numbers(shape: Numbers) -> int:
    """Return the scratch memory that ``mix`` needs, in float32 values."""
    if not shape[MIXER_ROW]:
        return 0
    rows = shape[SLOTS] * shape[NEW]
    return _work_at(shape, 0) // ITEM_SIZE + rows * shape[MIXER_ROW]  # type: ignore[no-any-return]


@compiled
def _buffers_at(shape: Numbers, scratch: int) -> int:
    return scratch + shape[SLOTS] * shape[MIXER_WINDOW] * ITEM_SIZE  # type: ignore[no-any-return]


@compiled
def _work_at(shape: Numbers, scratch: int) -> int:
    parts = shape[THREADS] * PARTS_PER_THREAD
    return _buffers_at(shape, scratch) + parts * buffers_of(shape[NEW]) * shape[MIXER_STATE] * ITEM_SIZE  # type: ignore[no-any-return]


@compiled
def _part_buffers(shape: Numbers, scratch: int, first: int, units: int) -> int:
    """Return the address of a part's state buffers; the first unit, rounded up, gives the part's index."""
    part = -(-first * parts_of(shape[THREADS], units, 1) // units)
    before = part * buffers_of(shape[NEW]) * shape[MIXER_STATE] * ITEM_SIZE
    return _buffers_at(shape, scratch) + before  # type: ignore[no-any-return]


@compiled
def _compute_convolution(
    shape: Numbers, layer: Numbers, part: int, scratch: int, kept: int, first: int, end: int
) -> None:
    new, size = shape[NEW], layer[CHANNELS] * ITEM_SIZE
    projected = _work_at(shape, scratch)
    mixed = projected + 3 * shape[SLOTS] * new * size
    if part == GATE_INPUTS:
        convolution.gate_inputs(layer, projected, kept, first, end)
        return
    for row in range(first, end):
        slot, place = row // new, row % new
        of_slot, window = slot * new * size, scratch + slot * window_numbers(layer) * ITEM_SIZE
        convolution.convolve_gated(
            layer,
            origins_at(shape[ORIGINS], slot, new),
            place,
            kept + of_slot,
            window,
            projected + 3 * of_slot,
            mixed + row * size,
        )


@compiled
def _compute_delta(
    shape: Numbers, layer: Numbers, part: int, scratch: int, kept: int, of_path: int, first: int, end: int
) -> None:
    new, heads = shape[NEW], layer[STATE_HEADS]
    rows = shape[SLOTS] * new
    channels, of_heads = layer[CHANNELS] * ITEM_SIZE, heads * ITEM_SIZE
    of_keys, of_values = layer[KEY_HEADS] * layer[KEY_WIDTH] * ITEM_SIZE, layer[VALUE_WIDTH] * of_heads
    keys = kept + rows * channels
    changes = keys + rows * of_keys
    decays = changes + rows * of_values
    convolved = _work_at(shape, scratch)
    gates = convolved + rows * channels
    steps = gates + rows * of_values
    strengths = steps + rows * of_heads
    mixed = strengths + rows * of_heads
    if part == JOIN:
        values = convolved + 2 * rows * of_keys
        delta_rule.join_inputs(convolved, convolved + rows * of_keys, values, of_keys, of_values, kept, first, end)
    elif part == SPREAD:
        inputs = mixed + rows * of_values
        scores = inputs + rows * (channels + of_values)
        delta_rule.spread_inputs(layer, inputs, scores, kept, gates, strengths, steps, first, end)
    elif part == PREPARE_DELTA:
        for row in range(first, end):
            slot, place = row // new, row % new
            delta_rule.prepare_delta(
                layer,
                origins_at(shape[ORIGINS], slot, new),
                place,
                kept + slot * new * channels,
                scratch + slot * window_numbers(layer) * ITEM_SIZE,
                convolved + row * channels,
                keys + row * of_keys,
                steps + row * of_heads,
                decays + row * of_heads,
                strengths + row * of_heads,
            )
    elif part == RECUR_DELTA:
        buffers = _part_buffers(shape, scratch, first, shape[SLOTS] * heads)
        for unit in range(first, end):
            slot, at = unit // heads, unit // heads * new
            delta_rule.recur_delta(
                shape,
                layer,
                origins_at(shape[ORIGINS], slot, new),
                slot,
                unit % heads,
                buffers,
                convolved + at * channels,
                keys + at * of_keys,
                decays + at * of_heads,
                strengths + at * of_heads,
                changes + at * of_values,
                mixed + at * of_values,
            )
    elif part == GATE_DELTA:
        for row in range(first, end):
            origins, at = origins_at(shape[ORIGINS], row // new, new), row * of_values
            delta_rule.gate_delta(layer, origins, row % new, gates + at, mixed + at)
    else:
        slot, path = _path_at(of_path)
        at, unread = slot * new, _part_buffers(shape, scratch, first, heads)
        for head in range(first, end):
            delta_rule.replay_delta(
                layer,
                slot,
                head,
                path,
                keys + at * of_keys,
                decays + at * of_heads,
                changes + at * of_values,
                unread,
            )


@compiled
def _compute_scan(
    shape: Numbers, layer: Numbers, part: int, scratch: int, kept: int, of_path: int, first: int, end: int
) -> None:
    new, heads = shape[NEW], layer[STATE_HEADS]
    rows, of_row = shape[SLOTS] * new, mamba2.projected_numbers(layer) * ITEM_SIZE
    channels, of_heads = layer[CHANNELS] * ITEM_SIZE, heads * ITEM_SIZE
    of_keys, of_values = layer[KEY_HEADS] * layer[KEY_WIDTH] * ITEM_SIZE, layer[VALUE_WIDTH] * of_heads
    values = kept + rows * of_row
    keys = values + rows * of_values
    decays = keys + rows * of_keys
    convolved = _work_at(shape, scratch)
    mixed = convolved + rows * channels
    if part == PREPARE_SCAN:
        for row in range(first, end):
            slot, place = row // new, row % new
            mamba2.prepare_scan(
                layer,
                origins_at(shape[ORIGINS], slot, new),
                place,
                kept + slot * new * of_row,
                scratch + slot * window_numbers(layer) * ITEM_SIZE,
                convolved + row * channels,
                values + row * of_values,
                keys + row * of_keys,
                decays + row * of_heads,
            )
    elif part == SCAN:
        buffers = _part_buffers(shape, scratch, first, shape[SLOTS] * heads)
        for unit in range(first, end):
            slot, at = unit // heads, unit // heads * new
            mamba2.scan_head(
                shape,
                layer,
                origins_at(shape[ORIGINS], slot, new),
                slot,
                unit % heads,
                buffers,
                convolved + at * channels,
                values + at * of_values,
                keys + at * of_keys,
                decays + at * of_heads,
                mixed + at * of_values,
            )
    elif part == GATE_SCAN:
        for row in range(first, end):
            origins = origins_at(shape[ORIGINS], row // new, new)
            mamba2.gate_scan(layer, origins, row % new, kept + row * of_row, mixed + row * of_values)
    else:
        slot, path = _path_at(of_path)
        at, unread = slot * new, _part_buffers(shape, scratch, first, heads)
        for head in range(first, end):
            mamba2.replay_scan(
                layer,
                slot,
                head,
                path,
                values + at * of_values,
                keys + at * of_keys,
                decays + at * of_heads,
                unread,
            )


@compiled
def _path_at(address: int) -> tuple[int, Numbers]:
    """Return a path's sequence and its listed rows."""
    head = array_at(address, (PATH,), types.int64)
    return head[OF_SLOT], array_at(address, (PATH + head[GIVEN],), types.int64)[PATH:]


@compiled
def _shift(shape: Numbers, layer: Numbers, kept: int, of_path: int, first: int, end: int) -> None:
    slot, path = _path_at(of_path)
    stride, inputs = layer[CHANNELS], kept
    if layer[MIXER] not in (SHORT_CONVOLUTION, DELTA_RULE):
        stride = mamba2.projected_numbers(layer)
        inputs += layer[STATE_HEADS] * layer[VALUE_WIDTH] * ITEM_SIZE
    count = array_at(of_path, (PATH,), types.int64)[COUNT]
    shift_window(layer, slot, inputs + slot * shape[NEW] * stride * ITEM_SIZE, stride, count, path, first, end)


@cache
def mixer_function() -> Any:
    """Return the C function that computes any step of a mixer between its matmuls.

    A call computes the units from ``first`` to ``end``: rows, heads or vectors of channels, depending on the step.
    """

    @cfunc(types.void(*[types.int64] * MATMUL_ARGUMENTS), cache=True)
    def compute_mixer(
        of_pass: int, of_layer: int, _: int, part: int, scratch: int, kept: int, of_path: int, first: int, end: int
    ) -> None:
        shape, layer = array_at(of_pass, (PASS_FIELDS,), types.int64), array_at(of_layer, (FIELDS,), types.int64)
        if part == WINDOWS:
            copy_windows(layer, scratch, first, end)
        elif part == SHIFT:
            _shift(shape, layer, kept, of_path, first, end)
        elif part <= CONVOLVE_GATED:
            _compute_convolution(shape, layer, part, scratch, kept, first, end)
        elif part <= REPLAY_DELTA or part >= JOIN:
            _compute_delta(shape, layer, part, scratch, kept, of_path, first, end)
        else:
            _compute_scan(shape, layer, part, scratch, kept, of_path, first, end)

    return compute_mixer


@compiled
def _kept_at(shape: Numbers, layer: Numbers) -> int:
    """Return the address of the values that a layer keeps of its rows.

    The layers of a prompt's pass share one address, because their values aren't needed after the layer.
    """
    earlier = 0 if shape[ADVANCES] else layer[JOURNAL_AT] * shape[SLOTS] * shape[NEW]
    return shape[JOURNAL] + earlier * ITEM_SIZE  # type: ignore[no-any-return]


@compiled
def mix(shape: Numbers, layer: Numbers, starts: Numbers, read: int, rows: int, scratch: int, written: int) -> None:
    """Compute a layer's mixer for all rows at ``read`` and write its output to ``written``.

    The layer's states are only updated if the pass ``ADVANCES``.
    """
    function, kept, work = shape[MIXER_PART], _kept_at(shape, layer), _work_at(shape, scratch)
    channels, heads, vectors = layer[CHANNELS], layer[STATE_HEADS], layer[CHANNELS] // LANES
    values, of_states = heads * layer[VALUE_WIDTH], rows * heads * layer[VALUE_WIDTH] * layer[KEY_WIDTH]
    addresses, slots, keys = (scratch, kept, 0), shape[SLOTS], layer[KEY_HEADS] * layer[KEY_WIDTH]
    in_channels, in_values = rows * channels, rows * values
    window = slots * vectors * LANES
    compute_part(shape, function, layer, starts, WINDOWS, *addresses, slots * vectors, window)
    if layer[MIXER] == SHORT_CONVOLUTION:
        multiply(shape, layer, TO_QUERIES, read, rows, work)
        compute_part(shape, function, layer, starts, GATE_INPUTS, *addresses, rows, in_channels)
        compute_part(shape, function, layer, starts, CONVOLVE_GATED, *addresses, rows, in_channels)
        mixed = work + 3 * rows * channels * ITEM_SIZE
    elif layer[MIXER] == DELTA_RULE:
        gates = work + rows * channels * ITEM_SIZE
        steps = gates + rows * values * ITEM_SIZE
        strengths = steps + rows * heads * ITEM_SIZE
        if not layer[FOURTH]:
            inputs = strengths + rows * (heads + values) * ITEM_SIZE
            multiply(shape, layer, TO_QUERIES, read, rows, inputs)
            multiply(shape, layer, TO_KEYS, read, rows, inputs + rows * (channels + values) * ITEM_SIZE)
            compute_part(shape, function, layer, starts, SPREAD, *addresses, rows, in_channels)
        elif layer[FIFTH]:
            separate = work + rows * keys * ITEM_SIZE
            multiply(shape, layer, TO_QUERIES, read, rows, work)
            multiply_by(shape, layer, FIFTH, read, rows, separate)
            multiply_by(shape, layer, SIXTH, read, rows, separate + rows * keys * ITEM_SIZE)
            compute_part(shape, function, layer, starts, JOIN, *addresses, rows, in_channels)
        else:
            multiply(shape, layer, TO_QUERIES, read, rows, kept)
        if layer[FOURTH]:
            multiply(shape, layer, TO_KEYS, read, rows, gates)
            multiply(shape, layer, TO_VALUES, read, rows, strengths)
            multiply_by(shape, layer, FOURTH, read, rows, steps)
        compute_part(shape, function, layer, starts, PREPARE_DELTA, *addresses, rows, in_channels)
        compute_part(shape, function, layer, starts, RECUR_DELTA, *addresses, slots * heads, of_states)
        compute_part(shape, function, layer, starts, GATE_DELTA, *addresses, rows, in_values)
        mixed = strengths + rows * heads * ITEM_SIZE
    else:
        multiply(shape, layer, TO_QUERIES, read, rows, kept)
        compute_part(shape, function, layer, starts, PREPARE_SCAN, *addresses, rows, in_channels)
        compute_part(shape, function, layer, starts, SCAN, *addresses, slots * heads, of_states)
        compute_part(shape, function, layer, starts, GATE_SCAN, *addresses, rows, in_values)
        mixed = work + rows * channels * ITEM_SIZE
    if shape[ADVANCES]:
        # The windows aren't needed anymore, so their memory holds the path: the last rows of the prompt.
        new, columns = shape[NEW], min(shape[NEW], layer[COLUMNS])
        path = array_at(scratch, (PATH + columns,), types.int64)
        path[OF_SLOT], path[COUNT], path[GIVEN] = 0, new, columns
        for column in range(columns):
            path[PATH + column] = new - columns + column
        compute_part(shape, function, layer, starts, SHIFT, scratch, kept, scratch, vectors, window)
    multiply(shape, layer, TO_OUTPUT, mixed, rows, written)


@compiled
def accept(shape: Numbers, layers: Numbers, starts: Numbers, path: Numbers, scratch: int) -> None:
    """Advance the states from before a pass along a path of its rows, by replaying what mixers kept of these rows."""
    function, count = shape[MIXER_PART], path[COUNT]
    for number in range(len(layers)):
        layer = layers[number]
        if not layer[MIXER]:
            continue
        addresses = scratch, _kept_at(shape, layer), path.ctypes.data
        vectors, heads = layer[CHANNELS] // LANES, layer[STATE_HEADS]
        compute_part(shape, function, layer, starts, SHIFT, *addresses, vectors, vectors * LANES)
        if layer[MIXER] != SHORT_CONVOLUTION:
            part = REPLAY_DELTA if layer[MIXER] == DELTA_RULE else REPLAY_SCAN
            work = count * heads * layer[VALUE_WIDTH] * layer[KEY_WIDTH]
            compute_part(shape, function, layer, starts, part, *addresses, heads, work)


class KeptRows:
    """A copy of what mixers kept of the rows of one pass over trees."""

    def __init__(self, mixers: MixerTable, shape: Numbers, layers: Numbers, journal: Array) -> None:
        self._mixers, self._shape, self._layers, self._journal = mixers, shape, layers, journal
        shape[JOURNAL], shape[THREAD_POOL] = journal.ctypes.data, 0

    def accept(self, path: Array, states: States) -> None:
        """Advance a slot's states along a path of its rows; ``states`` may have moved since the pass."""
        self._mixers.fill_states(self._layers, states, int(path[OF_SLOT]))
        scratch = torch.empty(mixer_numbers(self._shape), dtype=torch.float32)
        accept(self._shape, self._layers, np.zeros(1, np.int64), path, scratch.data_ptr())
