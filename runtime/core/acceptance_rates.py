"""Learned acceptance: the rates at which classes of drafted tokens were accepted, as moving averages with a prior."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hdtool.runtime.core.tree import ROOT, DraftTree
from hdtool.runtime.kernels.compiled import Array, Ints, compiled

PRIOR_WEIGHT = 10.0
"""Default weight of the prior rates, in observations."""
WINDOW = 200.0
"""Maximum number of observations that an average spans: acceptance changes with the topic."""

Probs = npt.NDArray[np.floating[Any]]


@compiled
def learn_rate(accepted: Array, observed: Array, index: Any, hit: float, seen: float, window: float) -> None:
    """Scale down the observations at ``index`` to at most ``window``; add ``seen``, of which ``hit`` were accepted."""
    fading = min(1.0, window / observed[index])
    accepted[index] = accepted[index] * fading + hit
    observed[index] = observed[index] * fading + seen


class AcceptanceRates:
    """The acceptance rate of each class of drafted tokens, given that the path before the token is accepted.

    What a class is depends on the drafter: a kind of node at a depth, say, or a length of the match before the token.
    """

    def __init__(self, prior: Sequence[float] | Array, weight: float = PRIOR_WEIGHT) -> None:
        """``prior`` has the initial rate of each class, which counts as much as ``weight`` observations."""
        self._observed = np.full(len(prior), weight)
        self._accepted = self._observed * np.array(prior)
        self.learn(np.empty(0, np.int64), np.empty(0, np.bool_))  # compile it, or load it from the cache

    def __getitem__(self, classes: Ints | slice) -> Probs:
        """Return the rates of these classes."""
        return np.asarray(self._accepted[classes] / self._observed[classes])

    def learn(self, classes: Ints, accepted: Array) -> None:
        """Update the rates with tokens of these classes, each ``accepted`` or not."""
        _learn(self._accepted, self._observed, classes, accepted)

    def learn_chain(self, classes: Ints, num_accepted: int) -> None:
        """Update the rates with the first tokens of a chain, up to the first one that was not accepted."""
        compared = classes[: num_accepted + 1]
        self.learn(compared, np.arange(len(compared)) < num_accepted)

    def learn_tree(self, classes: Ints, tree: DraftTree, path: Sequence[int]) -> None:
        """Update the rates with those nodes of a verified tree whose parent is the root or on the accepted ``path``."""
        accepted = np.zeros(len(tree) + 1, np.bool_)
        accepted[[*path, ROOT]] = True
        tested = accepted[tree.parents]
        self.learn(classes[tested], accepted[:-1][tested])


@compiled
def _learn(accepted: Array, observed: Array, classes: Ints, hits: Array) -> None:
    for index in range(len(classes)):
        learn_rate(accepted, observed, classes[index], 1.0 if hits[index] else 0.0, 1.0, WINDOW)


@compiled
def path_probs(rates: Probs, parents: Ints) -> Probs:
    """Return the probability that the whole path to each node is accepted, given each node's own rate."""
    probs = rates.copy()
    for node in range(len(probs)):
        if parents[node] != ROOT:
            probs[node] *= probs[parents[node]]
    return probs
