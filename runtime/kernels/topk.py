"""Arg-max and top-k over the vocabulary, for the logits of each node of a tree.

The bits of a floating-point number, read as an integer with the magnitude bits of negative numbers inverted, have the
order of the numbers. So one compiled function serves all types: NumPy has no bfloat16, and torch is slower.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hdtool.runtime.kernels.compiled import Array, array_at, compiled

ARGMAX_LANES = 64
"""Numbers that are compared at once: a few vectors, so that comparisons do not wait for each other."""
ARGMAX_BLOCK = 64 * ARGMAX_LANES
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
    high, low = np.empty(ARGMAX_LANES, bits.dtype), np.empty(ARGMAX_LANES, bits.dtype)
    low[:] = np.iinfo(bits.dtype).max
    highest: Any = np.int64(np.iinfo(bits.dtype).min)
    first = 0
    for start in range(0, len(bits), ARGMAX_BLOCK):
        _extremes(bits[start : start + ARGMAX_BLOCK], high, low)
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
    whole, magnitude = len(bits) // ARGMAX_LANES, np.iinfo(high.dtype).max
    # Written so that the compiler vectorizes over the lanes, in integers of this size.
    for line in range(whole):
        part = bits[line * ARGMAX_LANES : (line + 1) * ARGMAX_LANES]
        for lane in range(ARGMAX_LANES):
            key = high.dtype.type(_key(part[lane], magnitude))
            high[lane] = key if key > high[lane] else high[lane]
            low[lane] = key if key < low[lane] else low[lane]
    for place in range(whole * ARGMAX_LANES, len(bits)):
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


LANES = 16
"""Width of a vector comparison."""
FOLD = 8
"""Number of values that each maximum covers."""
BLOCK = LANES * FOLD
MAXIMA_PER_TOKEN = 4
"""The last level has at least this many maxima for each of the k tokens; with fewer, too many values are candidates."""
MOST_LEVELS = 8
MOST_RANKED = 64
"""The most tokens of a ranking that comes with a pass."""
COMPARABLE = torch.float32, torch.float64
"""Logits of other dtypes are converted to float32: NumPy has no bfloat16."""
NO_TOKEN, NO_LOGIT = -1, -np.inf
NOT_FOLDED = np.empty((0, 0), np.float32)


def argmax(logits: torch.Tensor) -> npt.NDArray[np.int64]:
    """The arg-max of each row, the first one of equals; NaN counts as the highest."""
    if logits.device.type != "cpu":
        found: Any = logits.argmax(dim=-1).cpu().numpy()
    else:
        found = _comparable(logits).argmax(axis=-1)
    return np.asarray(found, np.int64)


def _comparable(logits: torch.Tensor) -> Array:
    """A NumPy view of CPU logits, or a copy in float32. NumPy's arg-max over a vocabulary is about ten times faster.

    Calls into torch are avoided where they change nothing: each takes microseconds.
    """
    if logits.requires_grad:
        logits = logits.detach()
    if logits.dtype not in COMPARABLE:
        logits = logits.float()
    return logits.numpy()


class FoldedLogits:
    """Logits with the maxima of their parts, which a pass has computed while it had them in the cache."""

    def __init__(self, numbers: Array, maxima: Array) -> None:
        """``maxima`` are those that ``fold`` writes for each row."""
        self.numbers, self.maxima = numbers, maxima

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, rows: slice) -> FoldedLogits:
        return FoldedLogits(self.numbers[rows], self.maxima[rows])


Rankable = torch.Tensor | Array | FoldedLogits


def for_topk(logits: torch.Tensor, maxima: Array | None = None) -> Rankable:
    """The form of the logits from which rows are selected fastest before ``topk``: on a CPU, a NumPy view.

    ``maxima`` are those that ``fold`` writes for each row, if a pass has computed them.
    """
    if maxima is not None:
        return FoldedLogits(logits.numpy(), maxima)
    return _comparable(logits) if logits.device.type == "cpu" and logits.dtype == torch.float32 else logits


def topk(logits: Rankable, most: int) -> tuple[Array, Array]:
    """The top ``most`` tokens of each row, best first, and their logits; padded with -1 and -inf."""
    tokens, scores = np.empty((len(logits), most), np.int64), np.empty((len(logits), most), np.float32)
    if isinstance(logits, FoldedLogits):
        write_topk(logits.numbers, tokens, scores, logits.maxima)
    elif isinstance(logits, np.ndarray):
        write_topk(np.ascontiguousarray(logits), tokens, scores, NOT_FOLDED)
    elif logits.device.type == "cpu":
        # Torch takes ten times as long for this on a CPU.
        single = logits if logits.dtype == torch.float32 else logits.float()
        write_topk(np.ascontiguousarray(_comparable(single)), tokens, scores, NOT_FOLDED)
    else:
        tokens[:], scores[:] = NO_TOKEN, NO_LOGIT
        best = logits.detach().float().topk(min(most, logits.shape[-1]))
        # Both in one transfer: each costs a wait for the device.
        both = torch.stack([best.values, best.indices.to(torch.int32).view(torch.float32)]).cpu().numpy()
        scores[:, : both.shape[2]] = both[0]
        tokens[:, : both.shape[2]] = both[1].view(np.int32)
    return tokens, scores


@compiled
def write_topk(logits: Array, tokens: Array, scores: Array, folded: Array) -> None:
    """Top-k by a tree of maxima: the top k values lie below the k highest maxima of the last level.

    ``folded`` are the maxima of the first level of each row, if they are known.
    """
    vocabulary, most = logits.shape[1], scores.shape[1]
    begins, last = _levels(vocabulary, most)
    maxima, best = np.empty(begins[last + 1], np.float32), np.empty(most, np.float32)
    above, below = np.empty(vocabulary + BLOCK, np.int32), np.empty(vocabulary + BLOCK, np.int32)
    tokens[:], scores[:] = NO_TOKEN, NO_LOGIT
    for row in range(len(logits)):
        first = folded[row] if len(folded) > 0 else maxima[: begins[2]]
        if len(folded) == 0:
            fold(logits[row], first)
        values = first
        for level in range(2, last + 1):
            highest = maxima[begins[level] : begins[level + 1]]
            fold(values, highest)
            values = highest
        least = _kth_highest(values, best)
        found = _indices_of(values, least, above)
        for level in range(last - 1, -1, -1):
            values = maxima[begins[level] : begins[level + 1]] if level > 1 else first if level else logits[row]
            found = _indices_below(above[:found], values, least, below)
            above, below = below, above
        for token in above[:found]:
            _insert(tokens[row], scores[row], token, logits[row, token])


@compiled
def _levels(vocabulary: int, most: int) -> tuple[Array, int]:
    """The offset of each level in the array of maxima, with the end of the last one, and the number of levels."""
    begins = np.zeros(MOST_LEVELS + 2, np.int64)
    size, level = folded_size(vocabulary), 1
    begins[2] = size
    while level < MOST_LEVELS and folded_size(size) >= MAXIMA_PER_TOKEN * most and folded_size(size) < size:
        size, level = folded_size(size), level + 1
        begins[level + 1] = begins[level] + size
    return begins, level


@compiled
def folded_size(size: int) -> int:
    """The number of maxima of ``size`` values."""
    return -(-size // BLOCK) * LANES


@compiled
def fold(values: Array, highest: Array) -> None:
    """The maxima of the columns of each part, read as a matrix of ``FOLD`` rows and ``LANES`` columns."""
    whole = len(values) // BLOCK
    for number in range(whole):
        part = values[number * BLOCK : (number + 1) * BLOCK]
        maxima_of_block = highest[number * LANES : (number + 1) * LANES]
        # Written so that the compiler vectorizes over the lanes; NaN never compares as higher.
        for lane in range(LANES):
            most = np.float32(NO_LOGIT)
            for line in range(FOLD):
                value = part[line * LANES + lane]
                most = value if value > most else most
            maxima_of_block[lane] = most
    highest[whole * LANES :] = NO_LOGIT
    for place in range(whole * BLOCK, len(values)):
        lane = whole * LANES + place % LANES
        highest[lane] = values[place] if values[place] > highest[lane] else highest[lane]


@compiled
def _indices_of(values: Array, least: float, places: Array) -> int:
    """Write the indices of all values >= ``least`` to ``places``; return their number."""
    found = 0
    for place in range(len(values)):
        # Branch-free: always written, counted only if it qualifies. This takes half as long.
        places[found] = place
        found += values[place] >= least
    return found


@compiled
def _indices_below(above: Array, values: Array, least: float, places: Array) -> int:
    """The same for the values below these maxima, one level down."""
    found = 0
    for maximum in above:
        first = maximum // LANES * BLOCK + maximum % LANES
        for place in range(first, min(first + BLOCK, len(values)), LANES):
            places[found] = place
            found += values[place] >= least
    return found


@compiled
def _kth_highest(values: Array, best: Array) -> Any:
    """The k-th highest value, with k = ``len(best)``."""
    best[:] = NO_LOGIT
    for highest in values:
        if highest > best[-1]:
            place = len(best) - 1
            while place > 0 and best[place - 1] < highest:
                best[place] = best[place - 1]
                place -= 1
            best[place] = highest
    return best[-1]


@compiled
def _insert(tokens: Array, scores: Array, token: int, score: float) -> None:
    """Insert a token into the sorted top k; of equal scores the smaller id comes first."""
    place = len(scores)
    while place > 0 and (scores[place - 1] < score or (scores[place - 1] == score and tokens[place - 1] > token)):
        place -= 1
        if place + 1 < len(scores):
            tokens[place + 1], scores[place + 1] = tokens[place], scores[place]
    if place < len(scores):
        tokens[place], scores[place] = token, score
