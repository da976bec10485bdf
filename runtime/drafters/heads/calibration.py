"""What the heads guess: their best tokens, how likely each is really, and the trees made of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

BUCKETS = 28
FINENESS = 2.0
"""Buckets by which the odds halve."""
MEMORY = 200.0
"""Offers of a bucket that what is known of it remembers."""
PRIOR = 30.0
"""Offers that what was found in training is worth."""
LEAST = 1e-4

Array = npt.NDArray[Any]


class Calibration:
    """How often a head's token comes that it thinks so likely, behind a path that was right; learned as it goes."""

    def __init__(self, probs: list[list[float]] | None, heads: int) -> None:
        """``odds`` are what was found when the heads were trained; without any they are believed at first."""
        first = np.array(probs) if probs else np.tile(centre_of(np.arange(BUCKETS)), (heads, 1))
        self._offered = np.full(first.shape, PRIOR)
        self._came = PRIOR * np.clip(first, LEAST, 1.0)

    def __call__(self, buckets: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """The odds of each head's best tokens ``[heads, best]``, in the order of the heads' own."""
        heads = np.arange(len(buckets))[:, None]
        probs = self._came[heads, buckets] / self._offered[heads, buckets]
        # A head's second best may not be thought likelier than its best, nor all together more than certain.
        probs = np.minimum.accumulate(probs, axis=1)
        return np.asarray(probs / np.maximum(1.0, probs.sum(axis=1, keepdims=True)))

    def learn(self, head: int, buckets: npt.NDArray[np.int64], came: npt.NDArray[np.bool_]) -> None:
        """One head's best tokens at a place, and which of them, if any, has come."""
        offered, hits = self._offered[head], self._came[head]
        fading = np.minimum(1.0, MEMORY / offered[buckets])
        offered[buckets] *= fading
        hits[buckets] *= fading
        np.add.at(offered, buckets, 1.0)
        np.add.at(hits, buckets, came)


@njit(cache=True, nogil=True)
def best_paths(probs: Array, most: int, parents: Array, ranks: Array, depths: Array, chances: Array) -> int:
    """The ``most`` likeliest nodes of the tree that all combinations make, best first; says how many there are.

    ``odds`` are those of each head's best tokens, falling; a node's children are the best of the next head.
    """
    heads, best = probs.shape
    below = np.zeros(most + 1, np.int64)  # of the root and each node, how many children it has
    size = 0
    while size < most:
        highest, chosen = 0.0, -1
        for node in range(size + 1):
            depth = depths[node - 1] if node > 0 else 0
            if depth < heads and below[node] < best:
                chance = probs[depth, below[node]] * (chances[node - 1] if node > 0 else 1.0)
                if chance > highest:
                    highest, chosen = chance, node
        if chosen < 0:
            break
        parents[size], ranks[size] = chosen - 1, below[chosen]
        depths[size] = (depths[chosen - 1] if chosen > 0 else 0) + 1
        chances[size] = highest
        below[chosen] += 1
        size += 1
    return size


def bucket_of(likely: Array) -> npt.NDArray[np.int64]:
    """By how likely a head thinks a token; near certainty, the doubt is what counts."""
    doubt = np.clip(1.0 - likely, 2.0**-6, 1.0)
    high = np.floor(-FINENESS * np.log2(doubt))
    low = np.floor(-FINENESS * np.log2(np.clip(likely, 2.0**-8, 1.0)))
    return np.where(likely > 0.5, 12 - np.clip(high, 2, 12), np.clip(low + 9, 11, BUCKETS - 1)).astype(np.int64)


def centre_of(bucket: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """About how likely the tokens of a bucket are thought."""
    high = 1 - 2.0 ** (-(12 - bucket + 0.5) / FINENESS)
    low = 2.0 ** (-(bucket - 9 + 0.5) / FINENESS)
    return np.where(bucket <= 10, high, low)
