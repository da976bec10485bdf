"""A short convolution over the rows of a tree: each row reads itself, its ancestors and the columns of the state.

Products are added from the row itself backwards, wherever an earlier number stands.
"""

from __future__ import annotations

from typing import Any

from numba import types

from hdtool.runtime.engines.cpu.layer_record import (
    CHANNELS,
    COLUMNS,
    CONV_BIAS,
    CONV_STATE,
    CONV_STRIDE,
    CONV_WEIGHT,
    TAPS,
    Numbers,
)
from hdtool.runtime.engines.cpu.mixers.row_origins import PARENT
from hdtool.runtime.kernels.compiled import compiled, generated
from hdtool.runtime.kernels.memory.raw_memory import array_at, clear_numbers, copy_numbers
from hdtool.runtime.kernels.vector_code import ITEM_SIZE, LANES
from hdtool.runtime.kernels.vectors import FloatCode


@generated(*[types.int64] * 4)
def _add_product(builder: Any, sums: Any, numbers: Any, weights: Any, size: Any) -> None:
    """``sums += numbers * weights``"""
    code = FloatCode(builder)

    def apply(index: Any, _: list[Any]) -> list[Any]:
        place = code.at(sums, index)
        factors = code.read(code.at(numbers, index)), code.read(code.at(weights, index))
        code.store(code.multiply_add(*factors, code.read(place)), place)
        return []

    code.loop(size, [], apply)


@generated(*[types.int64] * 2)
def silu_of(builder: Any, numbers: Any, size: Any) -> None:
    """``numbers = silu(numbers)``"""
    code = FloatCode(builder)

    def apply(index: Any, _: list[Any]) -> list[Any]:
        place = code.at(numbers, index)
        number = code.read(place)
        divisor = builder.fadd(code.exp(builder.fneg(number)), code.number(1.0))
        code.store(builder.fdiv(number, divisor), place)
        return []

    code.loop(size, [], apply)


@generated(*[types.int64] * 4)
def multiply_numbers(builder: Any, one: Any, two: Any, size: Any, written: Any) -> None:
    """``written = one * two``"""
    code = FloatCode(builder)

    def apply(index: Any, _: list[Any]) -> list[Any]:
        found = builder.fmul(code.read(code.at(one, index)), code.read(code.at(two, index)))
        code.store(found, code.at(written, index))
        return []

    code.loop(size, [], apply)


@compiled
def window_numbers(layer: Numbers) -> int:
    """Those of ``copy_windows`` for one sequence."""
    return layer[COLUMNS] * layer[CHANNELS]  # type: ignore[no-any-return]


@compiled
def copy_windows(layer: Numbers, windows: int, first: int, end: int) -> None:
    """Copy the columns of states one after another, of some vectors of channels; those of all sequences are counted."""
    channels, columns = layer[CHANNELS], layer[COLUMNS]
    vectors = channels // LANES
    for vector in range(first, end):
        slot, channel = vector // vectors, vector % vectors * LANES
        of_slot = layer[CONV_STATE] + (slot * layer[CONV_STRIDE] + channel * columns) * ITEM_SIZE
        state = array_at(of_slot, (LANES, columns), types.float32)
        window = array_at(windows + slot * columns * channels * ITEM_SIZE, (columns, channels), types.float32)
        for column in range(columns):
            for lane in range(LANES):
                window[column, channel + lane] = state[lane, column]


@compiled
def convolve(layer: Numbers, origins: Numbers, row: int, inputs: int, stride: int, window: int, written: int) -> None:
    """The sums of one row; ``inputs`` are those of all rows of its sequence, ``stride`` numbers apart."""
    channels, place, column = layer[CHANNELS], row, layer[COLUMNS]
    if layer[CONV_BIAS]:
        copy_numbers(layer[CONV_BIAS], channels, written)
    else:
        clear_numbers(written, channels)
    for tap in range(layer[TAPS] - 1, -1, -1):
        if place >= 0:
            read = inputs + place * stride * ITEM_SIZE
            place = origins[place, PARENT]
        else:
            column -= 1
            read = window + column * channels * ITEM_SIZE
        _add_product(written, read, layer[CONV_WEIGHT] + tap * channels * ITEM_SIZE, channels)


@compiled
def shift_window(
    layer: Numbers, slot: int, inputs: int, stride: int, count: int, path: Numbers, first: int, end: int
) -> None:
    """Turn the state of a sequence into the one after ``count`` of its rows, for some vectors of channels.

    ``path`` are the rows, or the last ones of them, at least as many as a state has columns.
    """
    channels, columns = layer[CHANNELS], layer[COLUMNS]
    of_slot = layer[CONV_STATE] + slot * layer[CONV_STRIDE] * ITEM_SIZE
    state = array_at(of_slot, (channels, columns), types.float32)
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
