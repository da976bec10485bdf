"""The tokens that followed earlier places, counted by n-gram order: the evidence of sources that match text."""

from __future__ import annotations

from typing import Any

import numpy as np

from hdtool.runtime.drafters.hierarchy.sources.context_table import LEVELS, PLACES
from hdtool.runtime.kernels.compiled import compiled

FOLLOWERS = np.dtype(
    [
        ("places", np.int64),  # how many there are
        ("followers", np.int64, PLACES),  # the token after each,
        ("orders", np.int64, PLACES),  # and the n-gram order of its match
        ("sorted", np.int64, PLACES),  # the followers by order, those of the highest first
        ("stops", np.int64, LEVELS + 2),  # how many of them have this order or a higher one
        ("total", np.int64),  # followers that were counted
        ("distinct", np.int64),
        ("tokens", np.int64, PLACES),  # different ones among them
        ("counts", np.int64, PLACES),
    ],
    align=True,
)


@compiled
def clear(found: Any) -> None:
    found.places = found.total = found.distinct = 0


@compiled
def sort(found: Any) -> None:
    """Put followers of the same order together, in the order in which they were found."""
    found.stops[:] = 0
    for place in range(found.places):
        found.stops[found.orders[place]] += 1
    for order in range(LEVELS, 0, -1):
        found.stops[order] += found.stops[order + 1]
    for place in range(found.places):
        # Filled from the start of its order, which moves to its stop meanwhile.
        start = found.stops[found.orders[place] + 1]
        found.sorted[start] = found.followers[place]
        found.stops[found.orders[place] + 1] += 1
    for order in range(LEVELS + 1):
        found.stops[order] = found.stops[order + 1]
    found.stops[LEVELS + 1] = 0


@compiled
def count_order(found: Any, order: int) -> None:
    """Count the followers of the places that match exactly ``order``."""
    for place in range(found.stops[order + 1], found.stops[order]):
        token = found.sorted[place]
        at = 0
        while at < found.distinct and found.tokens[at] != token:
            at += 1
        if at == found.distinct:
            found.tokens[at], found.counts[at] = token, 0
            found.distinct += 1
        found.counts[at] += 1
        found.total += 1
