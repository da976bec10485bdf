"""What nodes are worth that come without odds of their own: learned by their kind and depth while the target speaks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from hdtool.runtime.tree import LARGEST_TREE, ROOT, DraftTree

STRENGTH = 10.0
"""Observations that the prior is worth."""
MEMORY = 200.0
"""Observations that are remembered: what a model says changes with what it is asked."""

Ints = npt.NDArray[Any]
Probs = npt.NDArray[np.float64]


class NodeOdds:
    """How often the target takes a node whose parent it has taken."""

    def __init__(self, prior: Sequence[float]) -> None:
        """``prior`` is the rate of each kind, at any depth."""
        self._asked = np.full((len(prior), LARGEST_TREE), STRENGTH)
        self._taken = self._asked * np.array(prior)[:, None]
        # Compiled, or loaded, before a step waits for it.
        none, bare = np.empty(0, np.int64), DraftTree.bare(0)
        self.likeliest_first(none, bare)
        self.learn(none, bare, ())

    def likeliest_first(self, kinds: Ints, tree: DraftTree) -> tuple[Ints, Probs]:
        """The order of nodes by the odds that the target takes the whole path to them, and these odds."""
        return _likeliest_first(kinds, tree.parents, tree.depths, self._taken, self._asked)

    def learn(self, kinds: Ints, tree: DraftTree, path: Sequence[int]) -> None:
        """The target was asked about the tree and took the nodes of ``path``."""
        taken = np.zeros(len(kinds), np.bool_)
        taken[list(path)] = True
        _learn(kinds, tree.parents, tree.depths, taken, self._taken, self._asked)


@njit(cache=True, nogil=True)
def _likeliest_first(kinds: Ints, parents: Ints, depths: Ints, taken: Probs, asked: Probs) -> tuple[Ints, Probs]:
    probs = np.ones(len(kinds))
    for node in range(len(kinds)):
        kind, depth = kinds[node], depths[node + 1] - 1
        above = parents[node]
        probs[node] = taken[kind, depth] / asked[kind, depth]
        if above != ROOT:
            probs[node] *= probs[above]
    # Stable, so that of equals the parent stays before its child.
    order = np.argsort(-probs, kind="mergesort")
    return order, probs[order]


@njit(cache=True, nogil=True)
def _learn(kinds: Ints, parents: Ints, depths: Ints, path: Ints, taken: Probs, asked: Probs) -> None:
    for node in range(len(kinds)):
        above = parents[node]
        if above == ROOT or path[above]:
            kind, depth = kinds[node], depths[node + 1] - 1
            fading = min(1.0, MEMORY / asked[kind, depth])
            asked[kind, depth] = asked[kind, depth] * fading + 1.0
            taken[kind, depth] = taken[kind, depth] * fading + path[node]
