"""The tokens that followed earlier places, counted by n-gram order: the evidence of sources that match text."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from hdtool.runtime.drafters.hierarchy.sources.context_table import PLACES

FOLLOWERS = np.dtype(
    [
        ("places", np.int64),  # how many there are
        ("followers", np.int64, PLACES),  # the token after each,
        ("orders", np.int64, PLACES),  # and the n-gram order of its match
        ("total", np.int64),  # places that match the order in use, or a higher one
        ("distinct", np.int64),
        ("tokens", np.int64, PLACES),  # different ones among them
        ("counts", np.int64, PLACES),
    ],
    align=True,
)


@njit(cache=True, nogil=True)
def clear(found: Any) -> None:
    found.places = found.total = found.distinct = 0


@njit(cache=True, nogil=True)
def count_order(found: Any, order: int) -> None:
    """Count the followers of the places that match exactly ``order``."""
    for place in range(found.places):
        if found.orders[place] == order:
            token = found.followers[place]
            at = 0
            while at < found.distinct and found.tokens[at] != token:
                at += 1
            if at == found.distinct:
                found.tokens[at], found.counts[at] = token, 0
                found.distinct += 1
            found.counts[at] += 1
            found.total += 1
