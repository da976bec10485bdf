"""The likeliest tokens: what the target would say at each node of a tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

COLUMNS = 512
"""More are slower for small vocabularies, fewer for large ones."""
COMPARABLE = torch.float32, torch.float64
"""Logits of other kinds become float32: NumPy has no bfloat16."""
NO_TOKEN, NO_LOGIT = -1, -np.inf

Array = npt.NDArray[Any]


class Logits(torch.Tensor):
    """Logits of a step that has looked for the likeliest tokens already."""

    # What is computed from them is a plain tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    likeliest: npt.NDArray[np.int64]

    @classmethod
    def of(cls, logits: torch.Tensor, likeliest: npt.NDArray[np.int64]) -> Logits:
        """The same memory."""
        known = logits.as_subclass(cls)
        known.likeliest = likeliest
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


def likeliest_at(logits: torch.Tensor) -> Callable[[int], int]:
    """A function from a row to its likeliest token; rows that nobody asks for take no time on a CPU."""
    if isinstance(logits, Logits) or logits.device.type != "cpu":
        known = likeliest(logits)  # of all in one transfer: each costs a wait for the device
        return lambda row: int(known[row])
    if logits.dtype not in COMPARABLE:
        return lambda row: int(likeliest(logits[row]))
    rows = _comparable(logits)
    return lambda row: int(rows[row].argmax())


def _comparable(logits: torch.Tensor) -> Array:
    """On a CPU the same memory if it can be: NumPy looks through a vocabulary some ten times as fast as torch does.

    What need not be done is not asked for: of all the code that a step runs through, little is still in the
    processor's cache when the next one comes, and each call into torch takes microseconds.
    """
    if logits.requires_grad:
        logits = logits.detach()
    if logits.dtype not in COMPARABLE:
        logits = logits.float()
    return logits.numpy()  # type: ignore[no-any-return]


def ranked(logits: torch.Tensor, most: int) -> tuple[Array, Array]:
    """The ``most`` likeliest tokens of each row, best first, and their logits; -1 and -inf where a row has no more."""
    tokens, scores = np.empty((len(logits), most), np.int64), np.empty((len(logits), most), np.float32)
    if logits.device.type == "cpu":
        # Torch takes ten times as long for this on a CPU.
        _rank(logits.detach().float().numpy(), tokens, scores)
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
    """The vocabulary is folded into columns: whatever is among the best stands in one of the best columns."""
    columns, best = np.empty(COLUMNS, np.float32), np.empty(scores.shape[1], np.float32)
    tokens[:], scores[:] = NO_TOKEN, NO_LOGIT
    for row in range(len(logits)):
        line = logits[row]
        _fold(line, columns)
        least = _least_of_best(columns, best)
        for column in range(COLUMNS):
            if columns[column] >= least:
                for token in range(column, len(line), COLUMNS):
                    if line[token] >= least:
                        _insert(tokens[row], scores[row], token, line[token])


@njit(cache=True, nogil=True)
def _fold(line: Array, columns: Array) -> None:
    """The highest of each column."""
    columns[:] = NO_LOGIT
    for start in range(0, len(line), COLUMNS):
        part = line[start : start + COLUMNS]
        for column in range(len(part)):
            # Written so that the compiler takes many at once; what is not a number is never higher.
            columns[column] = part[column] if part[column] > columns[column] else columns[column]


@njit(cache=True, nogil=True)
def _least_of_best(columns: Array, best: Array) -> Any:
    """The highest but so many: there are as many tokens that are no less."""
    best[:] = NO_LOGIT
    for highest in columns:
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
