"""What multiplies the probabilities of candidates once all sources have contributed.

Recency: texts tend to reuse their own words, so a token that occurred lately is more probable than n-gram counts
predict, and one that never occurred is less probable (cache language models; Kuhn and De Mori, 1990). Agreement: a
candidate is more probable where a ranking of the same position after other tokens holds it. Known draws: with a seed,
a token's time in the exponential race does not depend on the model.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hdtool.runtime.drafters.hierarchy.candidates import UNNAMED, index_of, rescale, whole
from hdtool.runtime.drafters.hierarchy.memory import work_at
from hdtool.runtime.drafters.hierarchy.weights import KINDS, RECENCY, weights_at
from hdtool.runtime.kernels.compiled import Array, compiled
from hdtool.runtime.sampling.exponential_race import start_of, time_of
from hdtool.runtime.stores.context_table import latest_place
from hdtool.runtime.stores.corpus_ranges import ROWS

NEVER = 0
DISTANCES = len(RECENCY)
"""Classes of distances: never, 1 token ago, 2 or 3, 4 to 7, and so on by doubling; the last one has no end."""
PROBS = (0.1, 0.01, 0.001)
"""Bounds of the classes of probabilities."""
LEARNING_RATE = 0.03
"""Step of the logarithm of a gain by agreement, for each node too many or too few."""
LEAST_GAIN, MOST_GAIN = 1 / 16, 64.0
EARLIEST = 1e-12
"""Least time of a token in the race: drawn times may be 0."""


@compiled
def weigh_recency(work: Any, gains: Any, table: Any, node: int) -> None:
    """Multiply the probability of each candidate after a node by the gain of its recency, and keep the sum.

    Small probabilities gain most, as few counts stand against it.
    """
    next_place = table.end + work.depths[node]
    for at in range(work.size):
        place = latest_place(table, work.candidates[at])
        work.recency[at] = NEVER if place < 0 else distance_class(next_place - place)
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


@compiled
def agree(work: Any, gains: Any, near: Any, place: int) -> None:
    """Multiply the probabilities of candidates that a ranking of their position holds, and keep the sum."""
    before = whole(work)
    for named in range(near.named[place]):
        at = index_of(work, near.tokens[place, named])
        if at >= 0:
            work.agreed[at] = near.kinds[place, named]
            work.chances[at] *= gains[work.agreed[at]]
    rescale(work, before)


@compiled
def learn_gains(at: int, path: Array, size: int) -> None:
    """Learn the gain of each kind from the nodes after an accepted ``path``, in a tree of this size.

    It grows where more of them were accepted than their probabilities predict.
    """
    work, gains = work_at(at), weights_at(at).gains
    reached, surprise = np.zeros(ROWS, np.bool_), np.zeros(UNNAMED + 1)
    reached[0] = True
    for node in path:
        reached[node + 1] = True
    for node in range(1, size + 1):
        if reached[work.parents[node]]:
            surprise[work.agreements[node]] += reached[node] - work.probs[node] / work.probs[work.parents[node]]
    for kind in range(KINDS):
        gains[kind] = min(MOST_GAIN, max(LEAST_GAIN, gains[kind] * np.exp(LEARNING_RATE * surprise[kind])))


@compiled
def weigh_draws(work: Any, node: int) -> None:
    """Divide the probability of each candidate after a node by the root of its time, and rescale.

    With exact probabilities the token with the shortest time would be known. Estimates are not exact: the inverse root
    fits best. All other tokens together have no time that is known: they keep the root of what is left to them.
    """
    start = start_of(work.seed, work.position + work.depths[node])
    sum_of_all = np.sqrt(max(0.0, 1.0 - whole(work)))
    for at in range(work.size):
        work.chances[at] /= np.sqrt(max(EARLIEST, time_of(start, work.candidates[at])))
        sum_of_all += work.chances[at]
    for at in range(work.size):
        work.chances[at] /= sum_of_all
