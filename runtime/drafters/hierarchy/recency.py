"""Recency of candidates: how long ago the conversation had the same token.

Texts tend to reuse their own words: a token that occurred lately is more probable than n-gram counts predict, and one
that never occurred is less probable (cache language models; Kuhn and De Mori, 1990). Sources contribute parts of a
probability, which add up; recency multiplies the sum, and small probabilities most, as few counts stand against it.
"""

from __future__ import annotations

from typing import Any

from hdtool.runtime.drafters.hierarchy.backoff_weights import RECENCY
from hdtool.runtime.drafters.hierarchy.candidates import find, rescale, whole
from hdtool.runtime.drafters.hierarchy.sources.context_table import latest_place
from hdtool.runtime.kernels.compiled import compiled
from hdtool.runtime.stores.history.log_search import LONGEST_MATCH

NEVER = 0
DISTANCES = len(RECENCY)
"""Classes of distances: never, 1 token ago, 2 or 3, 4 to 7, and so on by doubling; the last one has no end."""
NEAREST = 7
"""This many tokens before a candidate are compared themselves, as the conversation has no drafted tokens."""
PROBS = (0.1, 0.01, 0.001)
"""Bounds of the classes of probabilities."""


@compiled
def weigh_recency(work: Any, gains: Any, table: Any, node: int) -> None:
    """Multiply the probability of each candidate after a node by the gain of its recency, and keep the sum."""
    next_place = table.end + work.depths[node]
    for at in range(work.size):
        place = latest_place(table, work.candidates[at])
        work.recency[at] = NEVER if place < 0 else distance_class(next_place - place)
    for back in range(NEAREST, 0, -1):
        at = find(work, work.tails[node, LONGEST_MATCH - back])
        if at >= 0:
            work.recency[at] = distance_class(back)
    before = whole(work)
    for at in range(work.size):
        work.chances[at] *= gains[work.recency[at], prob_class(work.chances[at])]
    rescale(work, before)


@compiled
def distance_class(distance: int) -> int:
    """Its number of binary digits, as far as there are classes."""
    digits = 0
    while distance > 0 and digits < DISTANCES - 1:
        distance >>= 1
        digits += 1
    return digits


@compiled
def prob_class(prob: float) -> int:
    at = 0
    while at < len(PROBS) and prob < PROBS[at]:
        at += 1
    return at
