"""Arg-max and top-k over the vocabulary, for the logits of each node of a tree.

Read as an integer, with the magnitude bits of negatives inverted, a float's bits sort like the floats. So one compiled
function serves every dtype; NumPy has no bfloat16, and torch is slower.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hdtool.runtime.kernels.compiled import Array, array_at, compiled

ARGMAX_LANES = 64
"""Numbers compared at once: a few vectors, so that comparisons don't wait for each other."""
ARGMAX_BLOCK = 64 * ARGMAX_LANES
"""Numbers of a row between updates of its maximum."""
INFINITY: dict[torch.dtype, npt.NDArray[Any]] = {
    torch.float32: np.array([0x7F800000], np.int32),
    torch.float64: np.array([0x7FF0000000000000], np.int64),
    torch.bfloat16: np.array([0x7F80], np.int16),
    torch.float16: np.array([0x7C00], np.int16),
}
"""The bits of infinity in each dtype, as an integer of that size."""


class LogitBits(NamedTuple):
    """CPU logits as compiled code reads them."""

    address: int
    stride: int
    """Numbers from one row to the next."""
    vocabulary: int
    infinity: Array


def readable(logits: torch.Tensor) -> torch.Tensor:
    """The logits, copied only if a row isn't contiguous."""
    return logits if logits.stride(1) == 1 else logits.contiguous()


def bits_of(logits: torch.Tensor) -> LogitBits:
    """Address of readable logits ``[rows, vocabulary]``, which must outlive the result."""
    return LogitBits(logits.data_ptr(), logits.stride(0), logits.shape[1], INFINITY[logits.dtype])


@compiled
def argmax_of_row(address: int, stride: int, vocabulary: int, infinity: Array, row: int) -> tuple[int, bool]:
    """First arg-max of a row, and whether it is finite; NaN counts as the highest."""
    return argmax_of(array_at(address + row * stride * infinity.itemsize, vocabulary, infinity.dtype), infinity[0])


@compiled
def is_finite(address: int, stride: int, infinity: Array, row: int, token: int) -> bool:
    """True if one number of a row is finite."""
    bits = array_at(address + (row * stride + token) * infinity.itemsize, 1, infinity.dtype)
    return (bits[0] & infinity[0]) != infinity[0]  # type: ignore[no-any-return]


@compiled
def argmax_of(bits: Array, infinity: Any) -> tuple[int, bool]:
    high, low = np.empty(ARGMAX_LANES, bits.dtype), np.empty(ARGMAX_LANES, bits.dtype)
    low[:] = np.iinfo(bits.dtype).max
    highest: Any = np.int64(np.iinfo(bits.dtype).min)
    first = 0
    for start in range(0, len(bits), ARGMAX_BLOCK):
        _extremes(bits[start : start + ARGMAX_BLOCK], high, low)
        block_max = np.int64(high.max())
        if block_max > highest:
            highest, first = block_max, start
    infinite: Any = np.int64(infinity)
    if highest > infinite or np.int64(low.min()) < ~infinite:
        return _first_between(bits, ~infinite, infinite, outside=True), False
    if highest == 0:  # 0.0, which -0.0 equals
        return _first_between(bits, -1, 0, outside=False), True
    return first + _first_between(bits[first:], highest, highest, outside=False), abs(highest) < infinite


@compiled
def _extremes(bits: Array, high: Array, low: Array) -> None:
    """Per lane, the highest keys of a block and the lowest keys so far."""
    high[:] = np.iinfo(high.dtype).min
    whole, magnitude = len(bits) // ARGMAX_LANES, np.iinfo(high.dtype).max
    # Written so that the compiler vectorizes over the lanes, in integers of this size.
    for line in range(whole):
        part = bits[line * ARGMAX_LANES : (line + 1) * ARGMAX_LANES]
        for lane in range(ARGMAX_LANES):
            key = high.dtype.type(_key(part[lane], magnitude))
            high[lane] = key if key > high[lane] else high[lane]
            low[lane] = key if key < low[lane] else low[lane]
    for index in range(whole * ARGMAX_LANES, len(bits)):
        key = high.dtype.type(_key(bits[index], magnitude))
        high[0], low[0] = max(high[0], key), min(low[0], key)


@compiled
def _key(bits: Any, magnitude: Any) -> Any:
    """Map float bits to an integer that sorts like the floats: -0.0 becomes -1, minus infinity the inverse of
    infinity."""
    return bits ^ ((bits >> 63) & magnitude)


@compiled
def _first_between(bits: Array, low: int, high: int, outside: bool) -> int:
    """Index of the first number with a key in this range, or outside of it."""
    for index in range(len(bits)):
        if (low <= _key(bits[index], np.iinfo(bits.dtype).max) <= high) != outside:
            return index
    return 0


TOPK_LANES = 16
"""Lanes of a vector comparison."""
FOLD = 8
"""Values covered by each maximum."""
TOPK_BLOCK = TOPK_LANES * FOLD
MAXIMA_PER_TOKEN = 4
"""The last level has at least this many maxima for each of the k tokens: with fewer, too many values stay
candidates."""
MAX_LEVELS = 8
MAX_RANKED = 64
"""Maximum tokens in a ranking that comes with a pass."""
COMPARABLE = torch.float32, torch.float64
"""Other dtypes are converted to float32: NumPy has no bfloat16."""
NO_TOKEN, NO_LOGIT = -1, -np.inf
NOT_FOLDED = np.empty((0, 0), np.float32)


def argmax(logits: torch.Tensor) -> npt.NDArray[np.int64]:
    """Arg-max of each row, the first of equals; NaN counts as the highest."""
    if logits.device.type != "cpu":
        tokens: Any = logits.argmax(dim=-1).cpu().numpy()
    else:
        tokens = _comparable(logits).argmax(axis=-1)
    return np.asarray(tokens, np.int64)


def _comparable(logits: torch.Tensor) -> Array:
    """A NumPy view of CPU logits, or a float32 copy. NumPy's arg-max over a vocabulary is about ten times faster.

    Calls into torch are skipped where they change nothing: each takes microseconds.
    """
    if logits.requires_grad:
        logits = logits.detach()
    if logits.dtype not in COMPARABLE:
        logits = logits.float()
    return logits.numpy()


class FoldedLogits:
    """Logits with block maxima that the pass computed while they were in the cache."""

    def __init__(self, numbers: Array, maxima: Array) -> None:
        """``maxima`` has what ``fold`` writes for each row."""
        self.numbers, self.maxima = numbers, maxima

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, rows: slice) -> FoldedLogits:
        return FoldedLogits(self.numbers[rows], self.maxima[rows])


Rankable = torch.Tensor | Array | FoldedLogits


def for_topk(logits: torch.Tensor, maxima: Array | None = None) -> Rankable:
    """The form of the logits whose rows are selected fastest before ``topk``: on a CPU, a NumPy view.

    ``maxima`` has what ``fold`` writes for each row, if the pass computed it.
    """
    if maxima is not None:
        return FoldedLogits(logits.numpy(), maxima)
    return _comparable(logits) if logits.device.type == "cpu" and logits.dtype == torch.float32 else logits


def topk(logits: Rankable, k: int) -> tuple[Array, Array]:
    """The top ``k`` tokens of each row, best first, and their logits; padded with -1 and -inf."""
    tokens, scores = np.empty((len(logits), k), np.int64), np.empty((len(logits), k), np.float32)
    if isinstance(logits, FoldedLogits):
        write_topk(logits.numbers, tokens, scores, logits.maxima)
    elif isinstance(logits, np.ndarray):
        write_topk(np.ascontiguousarray(logits), tokens, scores, NOT_FOLDED)
    elif logits.device.type == "cpu":
        # Torch takes ten times as long on a CPU.
        single = logits if logits.dtype == torch.float32 else logits.float()
        write_topk(np.ascontiguousarray(_comparable(single)), tokens, scores, NOT_FOLDED)
    else:
        tokens[:], scores[:] = NO_TOKEN, NO_LOGIT
        best = logits.detach().float().topk(min(k, logits.shape[-1]))
        # One transfer: each costs a wait for the device.
        packed = torch.stack([best.values, best.indices.to(torch.int32).view(torch.float32)]).cpu().numpy()
        scores[:, : packed.shape[2]] = packed[0]
        tokens[:, : packed.shape[2]] = packed[1].view(np.int32)
    return tokens, scores


@compiled
def write_topk(logits: Array, tokens: Array, scores: Array, folded: Array) -> None:
    """Top-k by a tree of maxima: the top k values lie below the k highest maxima of the last level.

    ``folded`` has the first level's maxima of each row, if they are known.
    """
    vocabulary, k = logits.shape[1], scores.shape[1]
    begins, last = _levels(vocabulary, k)
    maxima, best = np.empty(begins[last + 1], np.float32), np.empty(k, np.float32)
    above, below = np.empty(vocabulary + TOPK_BLOCK, np.int32), np.empty(vocabulary + TOPK_BLOCK, np.int32)
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
        threshold = _kth_highest(values, best)
        count = _indices_of(values, threshold, above)
        for level in range(last - 1, -1, -1):
            values = maxima[begins[level] : begins[level + 1]] if level > 1 else first if level else logits[row]
            count = _indices_below(above[:count], values, threshold, below)
            above, below = below, above
        for token in above[:count]:
            _insert(tokens[row], scores[row], token, logits[row, token])


@compiled
def _levels(vocabulary: int, k: int) -> tuple[Array, int]:
    """Offset of each level in the array of maxima, with the end of the last one, and the number of levels."""
    begins = np.zeros(MAX_LEVELS + 2, np.int64)
    size, level = folded_size(vocabulary), 1
    begins[2] = size
    while level < MAX_LEVELS and folded_size(size) >= MAXIMA_PER_TOKEN * k and folded_size(size) < size:
        size, level = folded_size(size), level + 1
        begins[level + 1] = begins[level] + size
    return begins, level


@compiled
def folded_size(size: int) -> int:
    """Number of maxima of ``size`` values."""
    return -(-size // TOPK_BLOCK) * TOPK_LANES


@compiled
def fold(values: Array, highest: Array) -> None:
    """Write the column maxima of each block, read as a matrix of ``FOLD`` rows and ``TOPK_LANES`` columns."""
    whole = len(values) // TOPK_BLOCK
    for number in range(whole):
        part = values[number * TOPK_BLOCK : (number + 1) * TOPK_BLOCK]
        maxima_of_block = highest[number * TOPK_LANES : (number + 1) * TOPK_LANES]
        # Written so that the compiler vectorizes over the lanes; NaN never compares as higher.
        for lane in range(TOPK_LANES):
            maximum = np.float32(NO_LOGIT)
            for line in range(FOLD):
                value = part[line * TOPK_LANES + lane]
                maximum = value if value > maximum else maximum
            maxima_of_block[lane] = maximum
    highest[whole * TOPK_LANES :] = NO_LOGIT
    for index in range(whole * TOPK_BLOCK, len(values)):
        lane = whole * TOPK_LANES + index % TOPK_LANES
        highest[lane] = values[index] if values[index] > highest[lane] else highest[lane]


@compiled
def _indices_of(values: Array, threshold: float, places: Array) -> int:
    """Write the indices of all values >= ``threshold`` to ``places``; return their number."""
    count = 0
    for index in range(len(values)):
        # Branch-free: always written, counted only if it qualifies. This takes half as long.
        places[count] = index
        count += values[index] >= threshold
    return count


@compiled
def _indices_below(above: Array, values: Array, threshold: float, places: Array) -> int:
    """Write the indices of the values >= ``threshold`` that the maxima ``above`` cover, one level down."""
    count = 0
    for maximum in above:
        first = maximum // TOPK_LANES * TOPK_BLOCK + maximum % TOPK_LANES
        for index in range(first, min(first + TOPK_BLOCK, len(values)), TOPK_LANES):
            places[count] = index
            count += values[index] >= threshold
    return count


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
