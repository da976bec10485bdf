"""What nodes are worth that come without odds of their own: learned by their kind and depth while the target speaks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from hdtool.runtime.tree import LARGEST_TREE, ROOT

STRENGTH = 10.0
"""Observations that the prior is worth."""
MEMORY = 200.0
"""Observations that are remembered: what a model says changes with what it is asked."""

Ints = npt.NDArray[Any]
Odds = npt.NDArray[np.float64]


class NodeOdds:
    """How often the target takes a node whose parent it has taken."""

    def __init__(self, prior: Sequence[float]) -> None:
        """``prior`` is the rate of each kind, at any depth."""
        self._asked = np.full((len(prior), LARGEST_TREE), STRENGTH)
        self._taken = self._asked * np.array(prior)[:, None]
        # Compiled, or loaded, before a step waits for it.
        none = np.empty(0, np.int32)
        self.likeliest_first(none, none)
        self.learn(none, none, ())

    def likeliest_first(self, kinds: Ints, parents: Ints) -> tuple[Ints, Odds]:
        """The order of nodes by the odds that the target takes the whole path to them, and these odds."""
        return _likeliest_first(kinds, parents, self._taken, self._asked)

    def learn(self, kinds: Ints, parents: Ints, path: Sequence[int]) -> None:
        """The target was asked about these nodes and took those of ``path``."""
        taken = np.zeros(len(kinds), np.bool_)
        taken[list(path)] = True
        _learn(kinds, parents, taken, self._taken, self._asked)


@njit(cache=True, nogil=True)
def _likeliest_first(kinds: Ints, parents: Ints, taken: Odds, asked: Odds) -> tuple[Ints, Odds]:
    depths, odds = np.zeros(len(kinds), np.int64), np.ones(len(kinds))
    for node in range(len(kinds)):
        above = parents[node]
        if above != ROOT:
            depths[node], odds[node] = depths[above] + 1, odds[above]
        odds[node] *= taken[kinds[node], depths[node]] / asked[kinds[node], depths[node]]
    # Stable, so that of equals the parent stays before its child.
    order = np.argsort(-odds, kind="mergesort")
    return order, odds[order]


@njit(cache=True, nogil=True)
def _learn(kinds: Ints, parents: Ints, path: Ints, taken: Odds, asked: Odds) -> None:
    depths = np.zeros(len(kinds), np.int64)
    for node in range(len(kinds)):
        above = parents[node]
        depths[node] = 0 if above == ROOT else depths[above] + 1
        if above == ROOT or path[above]:
            kind, depth = kinds[node], depths[node]
            fading = min(1.0, MEMORY / asked[kind, depth])
            asked[kind, depth] = asked[kind, depth] * fading + 1.0
            taken[kind, depth] = taken[kind, depth] * fading + path[node]
