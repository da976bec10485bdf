"""Agreement of candidates with the neighboring rankings of the same position.

Sources contribute parts of a probability, which add up; agreement multiplies it. The gain of a candidate depends on
its share of the position and is learned from the nodes of each tree: it grows where more of them are accepted than
their probabilities predict.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hdtool.runtime.drafters.hierarchy.candidates import find, rescale, whole
from hdtool.runtime.drafters.hierarchy.sources.neighbor_rankings import KINDS
from hdtool.runtime.drafters.hierarchy.workspace import memory_at
from hdtool.runtime.kernels.compiled import Array, compiled
from hdtool.runtime.stores.corpus_ranges import ROWS

LEARNING_RATE = 0.03
"""Of the logarithm of a gain."""
LEAST_GAIN, MOST_GAIN = 1 / 16, 64.0


@compiled
def agree(work: Any, gains: Any, near: Any, place: int) -> None:
    """Multiply the probabilities of candidates that a ranking of their position holds, and keep the sum."""
    before = whole(work)
    for named in range(near.named[place]):
        at = find(work, near.tokens[place, named])
        if at >= 0:
            work.agreed[at] = near.kinds[place, named]
            work.chances[at] *= gains[work.agreed[at]]
    rescale(work, before)


@compiled
def learn_gains(at: Array, path: Array, size: int) -> None:
    """Compare the accepted ``path`` with the probabilities of all nodes after it, in a tree of this size."""
    memory = memory_at(at)
    work, gains = memory.work[0], memory.weights[0].gains
    reached, surprise = np.zeros(ROWS, np.bool_), np.zeros(KINDS + 1)
    reached[0] = True
    for node in path:
        reached[node + 1] = True
    for node in range(1, size + 1):
        if reached[work.parents[node]]:
            surprise[work.agreements[node]] += reached[node] - work.probs[node] / work.probs[work.parents[node]]
    for kind in range(KINDS):
        gains[kind] = min(MOST_GAIN, max(LEAST_GAIN, gains[kind] * np.exp(LEARNING_RATE * surprise[kind])))
