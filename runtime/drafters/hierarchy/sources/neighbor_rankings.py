"""Neighbouring rankings: what the target thought would stand at a place, had other tokens come before it.

The nodes of a tree that lie as deep as its path is long, or deeper, were all turned down. But a wrong word seldom
changes all that comes behind it: what the target ranks high there is often what it says at the same place in the end.
This is worth most in the very next tree. It names no tokens of its own: those that others name count more where
it agrees.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

PLACES = 8
"""Behind the root."""
NAMED = 32
"""Tokens at a place at most; those of likely nodes come first."""
SHARPNESS = 0.7
"""Shares are of chances raised to this power."""
KINDS = 8
"""Tokens are told apart by their share of a place: a half or more, a quarter or more, and so on."""
UNNAMED = KINDS
"""The kind of all others."""

NEIGHBOURS = np.dtype(
    [
        ("count", np.int64),  # of places; 0 where nothing is known
        ("ahead", np.int64),  # tokens that were emitted since
        ("named", np.int64, PLACES),  # how many tokens are
        ("whole", np.float64, PLACES),  # the odds of all nodes there
        ("tokens", np.int64, (PLACES, NAMED)),
        ("shares", np.float64, (PLACES, NAMED)),
        ("kinds", np.int64, (PLACES, NAMED)),
    ],
    align=True,
)

Array = npt.NDArray[Any]


@njit(cache=True, nogil=True)
def look_round(memory: Array, depths: Array, probs: Array, tokens: Array, scores: Array, passed: int) -> None:
    """Take the rankings of nodes of such depths and odds, the root first, of which so many were passed by."""
    near = memory[0]
    near.count = near.ahead = 0
    near.named[:], near.whole[:] = 0, 0.0
    chances = np.empty(tokens.shape[1])
    for node in range(1, len(tokens)):
        place = depths[node] - passed - 1
        if not 0 <= place < PLACES or not np.isfinite(scores[node, 0]):
            continue
        chances[:] = np.exp(SHARPNESS * (scores[node] - scores[node, 0]))
        chances *= probs[node] / chances.sum()
        near.whole[place] += probs[node]
        near.count = max(near.count, place + 1)
        for rank in range(len(chances)):
            _name(near, place, tokens[node, rank], chances[rank])
    for place in range(near.count):
        for at in range(near.named[place]):
            share = near.shares[place, at] / near.whole[place]
            near.kinds[place, at] = min(KINDS - 1, int(-np.log2(share)))


@njit(cache=True, nogil=True)
def _name(near: Any, place: int, token: int, part: float) -> None:
    """Add to the share of a token."""
    if part <= 0:
        return
    for at in range(near.named[place]):
        if near.tokens[place, at] == token:
            near.shares[place, at] += part
            return
    if near.named[place] < NAMED:
        at = near.named[place]
        near.tokens[place, at], near.shares[place, at] = token, part
        near.named[place] += 1
