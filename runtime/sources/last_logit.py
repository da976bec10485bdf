"""The last logit: what else the target might have said instead of the root is what it may well say next."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from hdtool.runtime.sources.recycled import sureness

MOST_CANDIDATES = 60

LAST = np.dtype(
    [
        ("count", np.int64),  # 0 where nothing is known of the root
        ("sureness", np.int64),
        ("tokens", np.int64, MOST_CANDIDATES),  # best first
    ],
    align=True,
)

Array = npt.NDArray[Any]


@njit(cache=True, nogil=True)
def remember(memory: Array, root: int, tokens: Array, scores: Array) -> None:
    """Take the ranking that the root was chosen from; the root itself is left out."""
    last = memory[0]
    last.count = 0
    last.sureness = sureness(scores)
    for place in range(len(tokens)):
        if tokens[place] != root and np.isfinite(scores[place]) and last.count < MOST_CANDIDATES:
            last.tokens[last.count] = tokens[place]
            last.count += 1


@njit(cache=True, nogil=True)
def forget(memory: Array) -> None:
    memory[0].count = 0
