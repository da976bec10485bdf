"""The likeliest tokens: what the target would say at each node of a tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

LANES = 16
"""Values that are compared with as many others at once."""
FOLDED = 8
"""Values that a maximum is taken of."""
PART = LANES * FOLDED
ENOUGH = 4
"""The last maxima are so many for each token that is wanted: of fewer, too many others stand below the best."""
MOST_LEVELS = 8
COMPARABLE = torch.float32, torch.float64
"""Logits of other kinds become float32: NumPy has no bfloat16."""
NO_TOKEN, NO_LOGIT = -1, -np.inf

Array = npt.NDArray[Any]


class Logits(torch.Tensor):
    """Logits of a step that has looked for the likeliest tokens already."""

    # What is computed from them is a plain tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    likeliest: npt.NDArray[np.int64]
    finite: npt.NDArray[np.int64]
    """Whether the highest logit of each row is finite."""

    @classmethod
    def of(
        cls, logits: torch.Tensor, likeliest: npt.NDArray[np.int64], finite: npt.NDArray[np.int64] | None = None
    ) -> Logits:
        """The same memory."""
        known = logits.as_subclass(cls)
        known.likeliest = likeliest
        known.finite = np.ones_like(likeliest) if finite is None else finite
        return known


def likeliest(logits: torch.Tensor) -> npt.NDArray[np.int64]:
    """The token of the highest logit of each row, the first of equals; what is not a number counts as the highest."""
    if isinstance(logits, Logits):
        return logits.likeliest
    if logits.device.type != "cpu":
        found: Any = logits.argmax(dim=-1).cpu().numpy()
    else:
        found = _comparable(logits).argmax(axis=-1)
    return np.asarray(found, np.int64)


def argmax_at(logits: torch.Tensor) -> Callable[[int], tuple[int, bool]]:
    """A function from a row to its arg-max and whether that logit is finite; on a CPU other rows take no time."""
    if isinstance(logits, Logits):
        tokens, finite = logits.likeliest, logits.finite
        return lambda row: (int(tokens[row]), bool(finite[row]))
    if logits.device.type != "cpu":
        best = logits.argmax(dim=-1)
        # Both in one transfer: each waits for the device.
        is_finite = logits.gather(-1, best[..., None])[..., 0].isfinite()
        both = torch.stack([best, is_finite.to(best.dtype)]).cpu().numpy()
        return lambda row: (int(both[0, row]), bool(both[1, row]))

    def at(row: int) -> tuple[int, bool]:
        values = rows[row] if rows is not None else _comparable(logits[row])
        token = int(values.argmax())
        return token, bool(np.isfinite(values[token]))

    rows = _comparable(logits) if logits.dtype in COMPARABLE else None
    return at


def _comparable(logits: torch.Tensor) -> Array:
    """On a CPU the same memory if it can be: NumPy looks through a vocabulary some ten times as fast as torch does.

    What need not be done is not asked for: of all the code that a step runs through, little is still in the
    processor's cache when the next one comes, and each call into torch takes microseconds.
    """
    if logits.requires_grad:
        logits = logits.detach()
    if logits.dtype not in COMPARABLE:
        logits = logits.float()
    return logits.numpy()


def at_hand(logits: torch.Tensor) -> torch.Tensor | Array:
    """What ``ranked`` takes and rows are best taken of, where several are: on a CPU NumPy's view, which costs less."""
    return _comparable(logits) if logits.device.type == "cpu" and logits.dtype == torch.float32 else logits


def ranked(logits: torch.Tensor | Array, most: int) -> tuple[Array, Array]:
    """The ``most`` likeliest tokens of each row, best first, and their logits; -1 and -inf where a row has no more."""
    tokens, scores = np.empty((len(logits), most), np.int64), np.empty((len(logits), most), np.float32)
    if isinstance(logits, np.ndarray):
        _rank(np.ascontiguousarray(logits), tokens, scores)
    elif logits.device.type == "cpu":
        # Torch takes ten times as long for this on a CPU.
        single = logits if logits.dtype == torch.float32 else logits.float()
        _rank(np.ascontiguousarray(_comparable(single)), tokens, scores)
    else:
        tokens[:], scores[:] = NO_TOKEN, NO_LOGIT
        best = logits.detach().float().topk(min(most, logits.shape[-1]))
        # Both in one transfer: each costs a wait for the device.
        both = torch.stack([best.values, best.indices.to(torch.int32).view(torch.float32)]).cpu().numpy()
        scores[:, : both.shape[2]] = both[0]
        tokens[:, : both.shape[2]] = both[1].view(np.int32)
    return tokens, scores


@njit(cache=True, nogil=True)
def _rank(logits: Array, tokens: Array, scores: Array) -> None:
    """The vocabulary is folded level by level: whatever is among the best stands below the best of the last level."""
    vocabulary, most = logits.shape[1], scores.shape[1]
    begins, last = _levels(vocabulary, most)
    maxima, best = np.empty(begins[last + 1], np.float32), np.empty(most, np.float32)
    above, below = np.empty(vocabulary + PART, np.int32), np.empty(vocabulary + PART, np.int32)
    tokens[:], scores[:] = NO_TOKEN, NO_LOGIT
    for row in range(len(logits)):
        values = logits[row]
        for level in range(1, last + 1):
            highest = maxima[begins[level] : begins[level + 1]]
            _fold(values, highest)
            values = highest
        least = _least_of_best(values, best)
        found = _all_from(values, least, above)
        for level in range(last - 1, -1, -1):
            values = maxima[begins[level] : begins[level + 1]] if level else logits[row]
            found = _all_below(above[:found], values, least, below)
            above, below = below, above
        for token in above[:found]:
            _insert(tokens[row], scores[row], token, logits[row, token])


@njit(cache=True, nogil=True)
def _levels(vocabulary: int, most: int) -> tuple[Array, int]:
    """Where each level begins among all maxima, where the last one ends, and which it is; the first is 1."""
    begins = np.zeros(MOST_LEVELS + 2, np.int64)
    size, level = _folded(vocabulary), 1
    begins[2] = size
    while level < MOST_LEVELS and _folded(size) >= ENOUGH * most and _folded(size) < size:
        size, level = _folded(size), level + 1
        begins[level + 1] = begins[level] + size
    return begins, level


@njit(cache=True, nogil=True)
def _folded(size: int) -> int:
    """How many maxima so many values have."""
    return -(-size // PART) * LANES


@njit(cache=True, nogil=True)
def _fold(values: Array, highest: Array) -> None:
    """The maxima of columns, each part of the values being written as eight lines of ``LANES``."""
    whole = len(values) // PART
    for number in range(whole):
        part, kept = values[number * PART : (number + 1) * PART], highest[number * LANES : (number + 1) * LANES]
        # Written so that the compiler takes all lanes at once; what is not a number is never higher.
        for lane in range(LANES):
            most = np.float32(NO_LOGIT)
            for line in range(FOLDED):
                value = part[line * LANES + lane]
                most = value if value > most else most
            kept[lane] = most
    highest[whole * LANES :] = NO_LOGIT
    for place in range(whole * PART, len(values)):
        lane = whole * LANES + place % LANES
        highest[lane] = values[place] if values[place] > highest[lane] else highest[lane]


@njit(cache=True, nogil=True)
def _all_from(values: Array, least: float, places: Array) -> int:
    """Write down the places of all values that are no less; says how many there are."""
    found = 0
    for place in range(len(values)):
        # Always written and seldom counted: a processor that need not guess takes half as long.
        places[found] = place
        found += values[place] >= least
    return found


@njit(cache=True, nogil=True)
def _all_below(above: Array, values: Array, least: float, places: Array) -> int:
    """The same, of the values that these maxima were taken of."""
    found = 0
    for maximum in above:
        first = maximum // LANES * PART + maximum % LANES
        for place in range(first, min(first + PART, len(values)), LANES):
            places[found] = place
            found += values[place] >= least
    return found


@njit(cache=True, nogil=True)
def _least_of_best(values: Array, best: Array) -> Any:
    """The highest but so many: there are as many tokens that are no less."""
    best[:] = NO_LOGIT
    for highest in values:
        if highest > best[-1]:
            place = len(best) - 1
            while place > 0 and best[place - 1] < highest:
                best[place] = best[place - 1]
                place -= 1
            best[place] = highest
    return best[-1]


@njit(cache=True, nogil=True)
def _insert(tokens: Array, scores: Array, token: int, score: float) -> None:
    """Put a token among the best, of equals the first one first."""
    place = len(scores)
    while place > 0 and (scores[place - 1] < score or (scores[place - 1] == score and tokens[place - 1] > token)):
        place -= 1
        if place + 1 < len(scores):
            tokens[place + 1], scores[place + 1] = tokens[place], scores[place]
    if place < len(scores):
        tokens[place], scores[place] = token, score
