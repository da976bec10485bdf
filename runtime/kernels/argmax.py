"""The arg-max of rows of logits on a CPU, which reads a row once, in any floating-point type, and copies nothing.

The bits of a floating-point number, read as an integer with the magnitude bits of negative numbers inverted, have the
order of the numbers. So one compiled function serves all types: NumPy has no bfloat16, and torch is slower.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hdtool.runtime.kernels.compiled import Array, compiled
from hdtool.runtime.kernels.memory.raw_memory import array_at

LANES = 64
"""Numbers that are compared at once: a few vectors, so that comparisons do not wait for each other."""
BLOCK = 64 * LANES
"""Numbers of a row between two comparisons with the highest one so far."""
INFINITY: dict[torch.dtype, npt.NDArray[Any]] = {
    torch.float32: np.array([0x7F800000], np.int32),
    torch.float64: np.array([0x7FF0000000000000], np.int64),
    torch.bfloat16: np.array([0x7F80], np.int16),
    torch.float16: np.array([0x7C00], np.int16),
}
"""The bits of infinity in each type, as an integer of its size."""


class LogitBits(NamedTuple):
    """Logits on a CPU as compiled code reads them."""

    address: int
    apart: int
    """Numbers from one row to the next."""
    vocabulary: int
    infinity: Array


def readable(logits: torch.Tensor) -> torch.Tensor:
    """The logits, copied only if the numbers of a row are apart."""
    return logits if logits.stride(1) == 1 else logits.contiguous()


def bits_of(logits: torch.Tensor) -> LogitBits:
    """Readable logits ``[rows, vocabulary]``, which must outlive the result."""
    return LogitBits(logits.data_ptr(), logits.stride(0), logits.shape[1], INFINITY[logits.dtype])


@compiled
def argmax_of_row(address: int, apart: int, vocabulary: int, infinity: Array, row: int) -> tuple[int, bool]:
    """The first of the highest numbers of a row, and whether it is finite; NaN counts as the highest."""
    return argmax_of(array_at(address + row * apart * infinity.itemsize, vocabulary, infinity.dtype), infinity[0])


@compiled
def is_finite(address: int, apart: int, infinity: Array, row: int, token: int) -> bool:
    """Whether one number of a row is finite."""
    bits = array_at(address + (row * apart + token) * infinity.itemsize, 1, infinity.dtype)
    return (bits[0] & infinity[0]) != infinity[0]  # type: ignore[no-any-return]


@compiled
def argmax_of(bits: Array, infinity: Any) -> tuple[int, bool]:
    high, low = np.empty(LANES, bits.dtype), np.empty(LANES, bits.dtype)
    low[:] = np.iinfo(bits.dtype).max
    highest: Any = np.int64(np.iinfo(bits.dtype).min)
    first = 0
    for start in range(0, len(bits), BLOCK):
        _extremes(bits[start : start + BLOCK], high, low)
        most = np.int64(high.max())
        if most > highest:
            highest, first = most, start
    infinite: Any = np.int64(infinity)
    if highest > infinite or np.int64(low.min()) < ~infinite:
        return _first_between(bits, ~infinite, infinite, outside=True), False
    if highest == 0:  # 0.0, which -0.0 equals
        return _first_between(bits, -1, 0, outside=False), True
    return first + _first_between(bits[first:], highest, highest, outside=False), abs(highest) < infinite


@compiled
def _extremes(bits: Array, high: Array, low: Array) -> None:
    """The highest keys of a part, and the lowest ones of it and the parts before, by lane."""
    high[:] = np.iinfo(high.dtype).min
    whole, magnitude = len(bits) // LANES, np.iinfo(high.dtype).max
    # Written so that the compiler vectorizes over the lanes, in integers of this size.
    for line in range(whole):
        part = bits[line * LANES : (line + 1) * LANES]
        for lane in range(LANES):
            key = high.dtype.type(_key(part[lane], magnitude))
            high[lane] = key if key > high[lane] else high[lane]
            low[lane] = key if key < low[lane] else low[lane]
    for place in range(whole * LANES, len(bits)):
        key = high.dtype.type(_key(bits[place], magnitude))
        high[0], low[0] = max(high[0], key), min(low[0], key)


@compiled
def _key(bits: Any, magnitude: Any) -> Any:
    """An integer in the order of the numbers: that of -0.0 is -1, that of minus infinity the inverse of infinity's."""
    return bits ^ ((bits >> 63) & magnitude)


@compiled
def _first_between(bits: Array, least: int, most: int, outside: bool) -> int:
    """The index of the first number with a key in this range, or outside of it."""
    for place in range(len(bits)):
        if (least <= _key(bits[place], np.iinfo(bits.dtype).max) <= most) != outside:
            return place
    return 0
