"""LFM2's short convolution: the input is gated before it, and the output after it.

The in-projection gives three times the channels: the gate of the input, that of the output, and the input. Kept of a
row: its gated input.
"""

from __future__ import annotations

from hdtool.runtime.engines.cpu.layer_record import CHANNELS, Numbers
from hdtool.runtime.engines.cpu.mixers.convolution import convolve, multiply_numbers
from hdtool.runtime.engines.cpu.mixers.row_origins import PADDING, PARENT
from hdtool.runtime.kernels.compiled import compiled
from hdtool.runtime.kernels.memory.raw_memory import clear_numbers
from hdtool.runtime.kernels.vector_code import ITEM_SIZE


@compiled
def gate_inputs(layer: Numbers, projected: int, kept: int, first: int, end: int) -> None:
    channels = layer[CHANNELS]
    size = channels * ITEM_SIZE
    for row in range(first, end):
        at = projected + 3 * row * size
        multiply_numbers(at, at + 2 * size, channels, kept + row * size)


@compiled
def convolve_gated(
    layer: Numbers, origins: Numbers, row: int, kept: int, window: int, projected: int, written: int
) -> None:
    """Write what the out-projection reads of a row; ``kept`` and ``projected`` are of its whole sequence."""
    channels = layer[CHANNELS]
    size = channels * ITEM_SIZE
    if origins[row, PARENT] == PADDING:
        clear_numbers(written, channels)
        return
    convolve(layer, origins, row, kept, channels, window, written)
    multiply_numbers(projected + (3 * row + 1) * size, written, channels, written)
