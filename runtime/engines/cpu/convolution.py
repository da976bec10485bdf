"""Short convolutions over draft trees: each row reads its own input, its ancestors' inputs and the state's columns.

This module also assigns state buffers to the rows of a tree. A row reuses its parent's buffer if no later row starts
from the parent, so a chain needs one buffer and a tree of ``n`` rows at most ``n // 2 + 1``.

Products are always added from the row itself backwards to its ancestors and the state, so sums don't depend on where an
earlier input is stored.

The in-projection of a gated convolution gives three values per channel: the input's gate, the output's gate and the
input. The gated input of each row is kept for replay.
"""

from __future__ import annotations

import numpy as np
from numba import types

from hdtool.runtime.kernels.compiled import Ints, Record, array_at, clear_floats, compiled, copy_floats
from hdtool.runtime.kernels.row_operations import elementwise
from hdtool.runtime.kernels.vector_code import ITEM_SIZE, LANES

ORIGIN = np.dtype(
    [
        ("parent", np.int64),  # parent row, ``BEFORE`` or ``PADDING``
        ("source", np.int64),  # buffer of the state that the row starts from, or ``BEFORE``
        ("target", np.int64),  # buffer for the state after the row
        ("last_child", np.int64),  # last row that starts from this row, ``BEFORE`` for none
        ("free", np.int64),  # an entry in the stack of free buffers; the stack consists of all rows' entries
    ],
    align=True,
)
"""Where a row of a tree reads the state that it starts from, and writes the state after it."""
ORIGIN_SIZE = ORIGIN.itemsize
BEFORE, PADDING = -1, -2
"""Marks of rows that start from the state before the tree, and of rows that aren't part of it and aren't computed."""


@compiled
def origins_at(address: int, slot: int, rows: int) -> Record:
    """Return the origins of one sequence's rows."""
    return array_at(address + slot * rows * ORIGIN_SIZE, rows, ORIGIN)


@compiled
def buffers_of(rows: int) -> int:
    """Return the number of state buffers that suffice for any tree of this many rows.

    Besides the last computed row, only rows with a child still to come use a buffer.
    """
    return rows // 2 + 1


@compiled
def fill_origins(origins: Record, parents: Ints) -> None:
    """Fill in a sequence's origins from its tree's parents; rows beyond the tree become padding."""
    rows, buffers, free = len(origins), 0, 0
    for row in range(rows):
        origins[row].last_child = BEFORE
        origins[row].parent = BEFORE if row == 0 else PADDING if row > len(parents) else parents[row - 1] + 1
        if origins[row].parent >= 0:
            origins[origins[row].parent].last_child = row
    for row in range(rows):
        parent = origins[row].parent
        if parent == PADDING:
            continue
        origins[row].source = origins[parent].target if parent >= 0 else BEFORE
        if parent >= 0 and origins[parent].last_child == row:
            target = origins[parent].target
        elif free:
            free -= 1
            target = origins[free].free
        else:
            target = buffers
            buffers += 1
        origins[row].target = target
        if origins[row].last_child == BEFORE and row < rows - 1:
            origins[free].free = target
            free += 1


_add_product = elementwise(lambda code, sum_, number, weight: code.multiply_add(number, weight, sum_), 3)
"""Computes ``sums += numbers * weights``."""
_multiply = elementwise(lambda code, first, second: code.builder.fmul(first, second), 2, in_place=False)
"""Writes ``first * second``."""


@compiled
def window_size(convolution: Record) -> int:
    """Return how many float32 values ``copy_windows`` writes for one sequence."""
    return convolution.taps * convolution.channels  # type: ignore[no-any-return]


@compiled
def copy_windows(convolution: Record, windows: int, first: int, end: int) -> None:
    """Transpose states into windows ``[columns, channels]``, for channel vectors ``first`` to ``end - 1``.

    A vector has ``LANES`` channels; vectors are numbered consecutively over all sequences.
    """
    channels, columns = convolution.channels, convolution.taps
    vectors = channels // LANES
    for vector in range(first, end):
        slot, channel = vector // vectors, vector % vectors * LANES
        slot_state = convolution.state + (slot * convolution.state_stride + channel * columns) * ITEM_SIZE
        state = array_at(slot_state, (LANES, columns), types.float32)
        window = array_at(windows + slot * columns * channels * ITEM_SIZE, (columns, channels), types.float32)
        for column in range(columns):
            for lane in range(LANES):
                window[column, channel + lane] = state[lane, column]


@compiled
def is_padding(pass_record: Record, row: int) -> bool:
    """Return True if a row of the pass isn't part of a tree."""
    new = pass_record.new
    return origins_at(pass_record.origins, row // new, new)[row % new].parent == PADDING  # type: ignore[no-any-return]


@compiled
def convolve(
    pass_record: Record, convolution: Record, row: int, inputs: int, stride: int, windows: int, written: int
) -> None:
    """Write the convolution of a row of the pass to ``written``.

    ``inputs`` is the address of the pass's input rows, which are ``stride`` float32 values apart, and ``windows`` the
    address of all sequences' transposed states.
    """
    new, channels, column = pass_record.new, convolution.channels, convolution.taps
    slot, source_row = row // new, row % new
    origins, window = origins_at(pass_record.origins, slot, new), windows + slot * window_size(convolution) * ITEM_SIZE
    if convolution.bias:
        copy_floats(convolution.bias, channels, written)
    else:
        clear_floats(written, channels)
    for tap in range(convolution.taps - 1, -1, -1):
        if source_row >= 0:
            read = inputs + (slot * new + source_row) * stride * ITEM_SIZE
            source_row = origins[source_row].parent
        else:
            column -= 1
            read = window + column * channels * ITEM_SIZE
        _add_product(written, read, convolution.weight + tap * channels * ITEM_SIZE, channels)


@compiled
def shift_window(
    convolution: Record, slot: int, inputs: int, stride: int, count: int, path: Ints, first: int, end: int
) -> None:
    """Advance channel vectors ``first`` to ``end - 1`` of a sequence's state by ``count`` rows.

    A vector has ``LANES`` channels. ``path`` lists all ``count`` rows, or at least as many of the last ones as the
    state has columns.
    """
    channels, columns = convolution.channels, convolution.taps
    slot_state = convolution.state + slot * convolution.state_stride * ITEM_SIZE
    state = array_at(slot_state, (channels, columns), types.float32)
    for column in range(columns):
        later = column + count
        if later < columns:
            for channel in range(first * LANES, end * LANES):
                state[channel, column] = state[channel, later]
        else:
            row = path[later - columns - (count - len(path))]
            read = array_at(inputs + row * stride * ITEM_SIZE, (channels,), types.float32)
            for channel in range(first * LANES, end * LANES):
                state[channel, column] = read[channel]


@compiled
def gate_input(convolution: Record, row: int, projected: int, kept: int) -> None:
    """Write a row's gated input to its place in ``kept``, from the row's in-projection in ``projected``."""
    channels = convolution.channels
    size = channels * ITEM_SIZE
    at = projected + 3 * row * size
    _multiply(at, at + 2 * size, channels, kept + row * size)


@compiled
def convolve_gated(
    pass_record: Record, convolution: Record, row: int, kept: int, windows: int, projected: int, mixed: int
) -> None:
    """Convolve a row and multiply the result by the row's output gate.

    ``kept``, ``projected`` and ``mixed`` are the addresses of all rows' gated inputs, in-projections and outputs.
    """
    channels = convolution.channels
    size = channels * ITEM_SIZE
    written = mixed + row * size
    if is_padding(pass_record, row):
        clear_floats(written, channels)
        return
    convolve(pass_record, convolution, row, kept, channels, windows, written)
    _multiply(projected + (3 * row + 1) * size, written, channels, written)
