"""Calibration of nodes without a probability: acceptance rates by kind and depth, learned online."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hdtool.runtime.kernels.compiled import Ints, compiled
from hdtool.runtime.tree import LARGEST_TREE, ROOT, DraftTree

PRIOR_WEIGHT = 10.0
"""Weight of the prior, in observations."""
EMA_WINDOW = 200.0
"""Window of the moving averages, in observations: acceptance rates change with the topic."""

Probs = npt.NDArray[np.float64]


class NodeCalibration:
    """Acceptance rates of nodes with an accepted parent."""

    def __init__(self, prior: Sequence[float]) -> None:
        """``prior`` is the rate of each kind, at any depth."""
        self._verified = np.full((len(prior), LARGEST_TREE), PRIOR_WEIGHT)
        self._accepted = self._verified * np.array(prior)[:, None]
        # Compile or load it now, so that no step waits for it.
        none, bare = np.empty(0, np.int64), DraftTree.bare(0)
        self.by_probability(none, bare)
        self.update(none, bare, ())

    def by_probability(self, kinds: Ints, tree: DraftTree) -> tuple[Ints, Probs]:
        """Nodes sorted by the probability that the whole path to them is accepted, and these probabilities."""
        return _by_probability(kinds, tree.parents, tree.depths, self._accepted, self._verified)

    def update(self, kinds: Ints, tree: DraftTree, path: Sequence[int]) -> None:
        """Update the rates with a verified tree and its accepted ``path``."""
        accepted = np.zeros(len(kinds), np.bool_)
        accepted[list(path)] = True
        _update(kinds, tree.parents, tree.depths, accepted, self._accepted, self._verified)


@compiled
def _by_probability(kinds: Ints, parents: Ints, depths: Ints, accepted: Probs, verified: Probs) -> tuple[Ints, Probs]:
    probs = np.ones(len(kinds))
    for node in range(len(kinds)):
        kind, depth = kinds[node], depths[node + 1] - 1
        above = parents[node]
        probs[node] = accepted[kind, depth] / verified[kind, depth]
        if above != ROOT:
            probs[node] *= probs[above]
    # Stable, so that a parent stays before its child if they are equal.
    order = np.argsort(-probs, kind="mergesort")
    return order, probs[order]


@compiled
def _update(kinds: Ints, parents: Ints, depths: Ints, path: Ints, accepted: Probs, verified: Probs) -> None:
    for node in range(len(kinds)):
        above = parents[node]
        if above == ROOT or path[above]:
            kind, depth = kinds[node], depths[node + 1] - 1
            decay = min(1.0, EMA_WINDOW / verified[kind, depth])
            verified[kind, depth] = verified[kind, depth] * decay + 1.0
            accepted[kind, depth] = accepted[kind, depth] * decay + path[node]
