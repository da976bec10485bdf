"""Neighboring rankings: the target's rankings for the same position after other tokens.

All nodes at the depth of the bonus token or deeper were rejected. But a wrong token seldom changes everything after
it: tokens that the target ranks high at such a node are often right at the same position of the output. The next tree
uses them most. They add no candidates: the probability of a candidate of other sources rises where they hold it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hdtool.runtime.kernels.compiled import Array, compiled

PLACES = 8
"""Positions after the root."""
NAMED = 32
"""The most tokens of a position; those of probable nodes come first."""
SHARPNESS = 0.7
"""Shares are of probabilities raised to this power."""
KINDS = 8
"""The kind of a token is its share of a position: a half or more, a quarter or more, and so on."""
UNNAMED = KINDS
"""The kind of all others."""

NEIGHBOURS = np.dtype(
    [
        ("count", np.int64),  # of positions; 0 where there are none
        ("ahead", np.int64),  # tokens that were emitted since
        ("named", np.int64, PLACES),  # the number of tokens
        ("whole", np.float64, PLACES),  # the sum of the probabilities of all nodes there
        ("tokens", np.int64, (PLACES, NAMED)),
        ("shares", np.float64, (PLACES, NAMED)),
        ("kinds", np.int64, (PLACES, NAMED)),
    ],
    align=True,
)


@compiled
def look_round(memory: Array, depths: Array, probs: Array, tokens: Array, scores: Array, passed: int) -> None:
    """Store the rankings of nodes with these depths and probabilities, the root first; ``passed`` were accepted."""
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


@compiled
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
