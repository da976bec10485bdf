"""Argmax and top-k over the vocabulary, for the logits of each node of a draft tree.

Floats sort like their bits, if these are read as integers with the magnitude bits of negatives inverted. One compiled
argmax therefore serves all dtypes, even bfloat16, which NumPy lacks, and is faster than torch's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hdtool.runtime.kernels.compiled import Array, array_at, compiled

ARGMAX_LANES = 64
"""Number of values compared in parallel: a few vectors, so that consecutive comparisons are independent."""
ARGMAX_BLOCK = 64 * ARGMAX_LANES
"""Numbers per block of a row; the row's maximum is updated after each block."""
INFINITY: dict[torch.dtype, npt.NDArray[Any]] = {
    torch.float32: np.array([0x7F800000], np.int32),
    torch.float64: np.array([0x7FF0000000000000], np.int64),
    torch.bfloat16: np.array([0x7F80], np.int16),
    torch.float16: np.array([0x7C00], np.int16),
}
"""Bits of infinity in each dtype, as an array of one integer of the dtype's size."""


class LogitBits(NamedTuple):
    """CPU logits in the form that compiled code reads."""

    address: int
    stride: int
    """Distance between rows in values."""
    vocabulary: int
    infinity: Array


def readable(logits: torch.Tensor) -> torch.Tensor:
    """Return the logits with contiguous rows, copied only if necessary."""
    return logits if logits.stride(1) == 1 else logits.contiguous()


def bits_of(logits: torch.Tensor) -> LogitBits:
    """Return a view of ``[rows, vocabulary]`` logits; rows must be contiguous, and the tensor must outlive the view."""
    return LogitBits(logits.data_ptr(), logits.stride(0), logits.shape[1], INFINITY[logits.dtype])


@compiled
def argmax_of_row(address: int, stride: int, vocabulary: int, infinity: Array, row: int) -> tuple[int, bool]:
    """Return ``(token, is_finite)``: the first argmax (NaN counts as the maximum), and whether its logit is finite."""
    return argmax_of(array_at(address + row * stride * infinity.itemsize, vocabulary, infinity.dtype), infinity[0])


@compiled
def is_finite(address: int, stride: int, infinity: Array, row: int, token: int) -> bool:
    """Return True if the logit of a token in a row is finite."""
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
    if highest == 0:  # 0.0 equals -0.0
        return _first_between(bits, -1, 0, outside=False), True
    return first + _first_between(bits[first:], highest, highest, outside=False), abs(highest) < infinite


@compiled
def _extremes(bits: Array, high: Array, low: Array) -> None:
    """Write each lane's maximum key in this block to ``high``, and lower ``low`` to its minimum if that is less."""
    high[:] = np.iinfo(high.dtype).min
    whole, magnitude = len(bits) // ARGMAX_LANES, np.iinfo(high.dtype).max
    # In this form the compiler vectorizes over the lanes, in integers of the dtype's size.
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
    """Map the bits of a float to an integer; these integers sort like the floats.

    -0.0 becomes -1, and minus infinity becomes the bitwise inverse of infinity.
    """
    return bits ^ ((bits >> 63) & magnitude)


@compiled
def _first_between(bits: Array, low: int, high: int, outside: bool) -> int:
    """Return the first index whose key lies in ``[low, high]`` (if ``outside`` is True, outside it); 0 if none does."""
    for index in range(len(bits)):
        if (low <= _key(bits[index], np.iinfo(bits.dtype).max) <= high) != outside:
            return index
    return 0


TOPK_LANES = 16
"""Number of columns per block, compared as vectors."""
FOLD = 8
"""Number of values that each maximum covers."""
TOPK_BLOCK = TOPK_LANES * FOLD
MAXIMA_PER_TOKEN = 4
"""Minimum number of maxima on the last level per token of the top k; with fewer, too many candidates remain."""
MAX_LEVELS = 8
MAX_RANKED = 64
"""Maximum number of tokens that a pass ranks in each row."""
COMPARABLE = torch.float32, torch.float64
"""Dtypes compared directly; others are converted to float32, as NumPy has no bfloat16."""
NO_TOKEN, NO_LOGIT = -1, -np.inf
NOT_FOLDED = np.empty((0, 0), np.float32)


def argmax(logits: torch.Tensor) -> npt.NDArray[np.int64]:
    """Return the argmax of each row, the first in case of ties; NaN counts as the maximum."""
    if logits.device.type != "cpu":
        tokens: Any = logits.argmax(dim=-1).cpu().numpy()
    else:
        tokens = _comparable(logits).argmax(axis=-1)
    return np.asarray(tokens, np.int64)


def _comparable(logits: torch.Tensor) -> Array:
    """Return CPU logits as a NumPy view, or as a float32 copy if their dtype isn't ``COMPARABLE``.

    NumPy's argmax over a vocabulary is about ten times as fast as torch's. Torch calls without effect are skipped,
    since each takes microseconds.
    """
    if logits.requires_grad:
        logits = logits.detach()
    if logits.dtype not in COMPARABLE:
        logits = logits.float()
    return logits.numpy()


class FoldedLogits:
    """Logits with block maxima that the forward pass computed while the logits were still in the CPU cache."""

    def __init__(self, values: Array, maxima: Array) -> None:
        """``maxima`` holds the output of ``fold`` for each row."""
        self.values, self.maxima = values, maxima

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: slice) -> FoldedLogits:
        return FoldedLogits(self.values[rows], self.maxima[rows])


Rankable = torch.Tensor | Array | FoldedLogits


def for_topk(logits: torch.Tensor, maxima: Array | None = None) -> Rankable:
    """Return the logits in the form that is fastest to slice and pass to ``topk``: for float32 on a CPU, a NumPy view.

    ``maxima`` holds the output of ``fold`` for each row; None if the pass didn't compute it.
    """
    if maxima is not None:
        return FoldedLogits(logits.numpy(), maxima)
    return _comparable(logits) if logits.device.type == "cpu" and logits.dtype == torch.float32 else logits


def topk(logits: Rankable, k: int) -> tuple[Array, Array]:
    """Return ``(tokens, logits)``, both ``[rows, k]``: each row's top ``k``, best first, padded with -1 and -inf."""
    tokens, scores = np.empty((len(logits), k), np.int64), np.empty((len(logits), k), np.float32)
    if isinstance(logits, FoldedLogits):
        write_topk(logits.values, tokens, scores, logits.maxima)
    elif isinstance(logits, np.ndarray):
        write_topk(np.ascontiguousarray(logits), tokens, scores, NOT_FOLDED)
    elif logits.device.type == "cpu":
        # Ten times as fast as torch's topk on a CPU.
        single = logits if logits.dtype == torch.float32 else logits.float()
        write_topk(np.ascontiguousarray(_comparable(single)), tokens, scores, NOT_FOLDED)
    else:
        tokens[:], scores[:] = NO_TOKEN, NO_LOGIT
        best = logits.detach().float().topk(min(k, logits.shape[-1]))
        # A single transfer of both, since each transfer waits for the device.
        packed = torch.stack([best.values, best.indices.to(torch.int32).view(torch.float32)]).cpu().numpy()
        scores[:, : packed.shape[2]] = packed[0]
        tokens[:, : packed.shape[2]] = packed[1].view(np.int32)
    return tokens, scores


@compiled
def write_topk(logits: Array, tokens: Array, scores: Array, folded: Array) -> None:
    """Write the top-k tokens of each row and their scores, using a tree of maxima.

    The k-th highest maximum of the last level is a lower bound for the top k, so branches with lower maxima are
    skipped. ``folded`` holds each row's first-level maxima, or is empty to compute them here.
    """
    vocabulary, k = logits.shape[1], scores.shape[1]
    begins, last = _levels(vocabulary, k)
    maxima, best = np.empty(begins[last + 1], np.float32), np.empty(k, np.float32)
    candidates = np.empty(vocabulary + TOPK_BLOCK, np.int32)
    next_candidates = np.empty(vocabulary + TOPK_BLOCK, np.int32)
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
        count = _indices_of(values, threshold, candidates)
        for level in range(last - 1, -1, -1):
            values = maxima[begins[level] : begins[level + 1]] if level > 1 else first if level else logits[row]
            count = _indices_below(candidates[:count], values, threshold, next_candidates)
            candidates, next_candidates = next_candidates, candidates
        for token in candidates[:count]:
            _insert(tokens[row], scores[row], token, logits[row, token])


@compiled
def _levels(vocabulary: int, k: int) -> tuple[Array, int]:
    """Return ``(offsets, last)``: level ``i``, from 1 to ``last``, has its maxima at ``offsets[i]:offsets[i + 1]``."""
    begins = np.zeros(MAX_LEVELS + 2, np.int64)
    size, level = folded_size(vocabulary), 1
    begins[2] = size
    while level < MAX_LEVELS and folded_size(size) >= MAXIMA_PER_TOKEN * k and folded_size(size) < size:
        size, level = folded_size(size), level + 1
        begins[level + 1] = begins[level] + size
    return begins, level


@compiled
def folded_size(size: int) -> int:
    """Return the number of maxima that ``fold`` writes for ``size`` values."""
    return -(-size // TOPK_BLOCK) * TOPK_LANES


@compiled
def fold(values: Array, highest: Array) -> None:
    """Write the maxima of each block's columns; a block is a matrix of ``FOLD`` rows and ``TOPK_LANES`` columns."""
    whole = len(values) // TOPK_BLOCK
    for number in range(whole):
        part = values[number * TOPK_BLOCK : (number + 1) * TOPK_BLOCK]
        maxima_of_block = highest[number * TOPK_LANES : (number + 1) * TOPK_LANES]
        # In this form the compiler vectorizes over the lanes; NaN never compares as higher.
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
def _indices_of(values: Array, threshold: float, indices: Array) -> int:
    """Write the indices of all values >= ``threshold`` to ``indices``; return how many there are."""
    count = 0
    for index in range(len(values)):
        # Always write, but count only qualifying indices: without a branch this takes half the time.
        indices[count] = index
        count += values[index] >= threshold
    return count


@compiled
def _indices_below(candidates: Array, values: Array, threshold: float, indices: Array) -> int:
    """Write and count indices like ``_indices_of``, but only of values covered by the maxima at ``candidates``."""
    count = 0
    for maximum in candidates:
        first = maximum // TOPK_LANES * TOPK_BLOCK + maximum % TOPK_LANES
        for index in range(first, min(first + TOPK_BLOCK, len(values)), TOPK_LANES):
            indices[count] = index
            count += values[index] >= threshold
    return count


@compiled
def _kth_highest(values: Array, best: Array) -> Any:
    """Return the k-th highest value, with k = ``len(best)``; overwrites ``best``."""
    best[:] = NO_LOGIT
    for highest in values:
        if highest > best[-1]:
            rank = len(best) - 1
            while rank > 0 and best[rank - 1] < highest:
                best[rank] = best[rank - 1]
                rank -= 1
            best[rank] = highest
    return best[-1]


@compiled
def _insert(tokens: Array, scores: Array, token: int, score: float) -> None:
    """Insert a token into the sorted top k; ties are ordered by token id."""
    rank = len(scores)
    while rank > 0 and (scores[rank - 1] < score or (scores[rank - 1] == score and tokens[rank - 1] > token)):
        rank -= 1
        if rank + 1 < len(scores):
            tokens[rank + 1], scores[rank + 1] = tokens[rank], scores[rank]
    if rank < len(scores):
        tokens[rank], scores[rank] = token, score
