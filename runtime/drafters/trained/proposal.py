"""Proposals of trained drafters, which rank the next tokens after the root and after draft paths below it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hdtool.runtime.core.acceptance_rates import AcceptanceRates
from hdtool.runtime.kernels.best_first import insert_best
from hdtool.runtime.kernels.compiled import Array, compiled

TOKENS_PER_RANKING = 10
"""Number of tokens in a ranking."""
MAX_RANKINGS = 64
NO_RANKING_AFTER = -1
"""Index of a ranking that does not exist: the tokens that may follow are unknown."""


class Proposal(NamedTuple):
    """Rankings of the next token after several paths; the first ranking follows the root."""

    tokens: Array
    """Tokens ``[rankings, best]``, most probable first."""
    probs: Array
    """Probability of each token, given that the path before it is accepted."""
    after: Array
    """Index of the ranking that follows each token, or ``NO_RANKING_AFTER``."""
    after_others: Array
    """For each ranking, the index of the ranking after a token that it does not contain, or ``NO_RANKING_AFTER``."""
    depths: Array
    """Number of tokens between the root and the token that each ranking predicts."""

    @classmethod
    def in_parallel(cls, tokens: Array, probs: Array) -> Proposal:
        """Return a proposal of rankings ``[positions, best]`` that do not depend on the tokens at earlier positions."""
        positions = np.arange(len(tokens))
        follows = np.where(positions + 1 < len(tokens), positions + 1, NO_RANKING_AFTER)
        return cls(tokens, probs, np.broadcast_to(follows[:, None], tokens.shape), follows, positions)

    @classmethod
    def in_turn(cls, tokens: Array, probs: Array) -> Proposal:
        """Return a proposal of rankings ``[positions, best]``, each after the best token at the position before."""
        number = len(tokens)
        after = np.full(tokens.shape, NO_RANKING_AFTER)
        after[:-1, 0] = np.arange(1, number)
        return cls(tokens, probs, after, np.full(number, NO_RANKING_AFTER), np.arange(number))

    @classmethod
    def in_tree(cls, tokens: Array, probs: Array) -> Proposal:
        """Return a proposal of rankings that follow tokens of earlier rankings.

        After its tokens, each row but the first holds the place of the token that it follows: the index of that
        token's ranking, times the number of tokens in a ranking, plus the token's rank.
        """
        places, tokens, probs = tokens[1:, -1], tokens[:, :-1], probs[:, :-1]
        after, depths = np.full(tokens.shape, NO_RANKING_AFTER), np.zeros(len(tokens), np.int64)
        after.flat[places] = np.arange(1, len(tokens))
        for ranking, place in enumerate(places, start=1):
            depths[ranking] = depths[place // tokens.shape[1]] + 1
        return cls(tokens, probs, after, np.full(len(tokens), NO_RANKING_AFTER), depths)

    def along(self, tokens: list[int]) -> list[int]:
        """Return the index of the ranking for each emitted token, up to the first token that has none."""
        rankings, at = list[int](), 0
        for token in tokens:
            if at == NO_RANKING_AFTER or at >= len(self.tokens):
                break
            rankings.append(at)
            named = np.flatnonzero(self.tokens[at] == token)
            at = int(self.after[at, named[0]] if len(named) else self.after_others[at])
        return rankings


@compiled
def best_paths(probs: Array, after: Array, max_nodes: int) -> tuple[Array, Array, Array, Array]:
    """Return ``(parents, ranks, rankings, path_probs)`` of the most probable nodes of a proposal, best first.

    Each node is a token of the ranking that follows its parent: ``rankings`` holds the index of this ranking, ``ranks``
    the token's rank in it.
    """
    keys, path_probs = np.empty(max_nodes, np.int64), np.empty(max_nodes)  # parent, ranking and rank, packed
    size = node = 0
    ranking, before = np.int64(0 if len(probs) else NO_RANKING_AFTER), 1.0
    while True:
        for rank in range(probs.shape[1] if ranking != NO_RANKING_AFTER else 0):
            if probs[ranking, rank] > 0:
                key = node << 32 | ranking << 16 | rank
                size = insert_best(path_probs, keys, before * probs[ranking, rank], key, node, size, max_nodes)
        if node == size or node + 1 == max_nodes:
            break
        ranking, before = np.int64(after[(keys[node] >> 16) & 0xFFFF, keys[node] & 0xFFFF]), path_probs[node]
        node += 1
    keys = keys[:size]
    return (keys >> 32) - 1, keys & 0xFFFF, (keys >> 16) & 0xFFFF, path_probs[:size]


PROB_BUCKETS = 28
BUCKETS_PER_HALVING = 2.0
"""Number of buckets per halving of the probability."""
BUCKET_PRIOR_WEIGHT = 30.0
"""Weight of the initial acceptance rates, in observations."""
MIN_BUCKET_PROB = 1e-4


class Calibration:
    """Learns how often a head's tokens are accepted after an accepted path, by bucket of the predicted probability."""

    def __init__(self, probs: list[list[float]] | None, heads: int) -> None:
        """``probs`` are initial acceptance rates by head and bucket; by default, the heads' own probabilities."""
        first = np.array(probs) if probs else np.tile(bucket_center(np.arange(PROB_BUCKETS)), (heads, 1))
        self._last_head = len(first) - 1
        self._rates = AcceptanceRates(np.clip(first, MIN_BUCKET_PROB, 1.0).ravel(), BUCKET_PRIOR_WEIGHT)

    def __call__(self, heads: int | npt.NDArray[np.int64], buckets: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return calibrated probabilities ``[rankings, best]`` of the best tokens, given their heads and buckets."""
        probs = self._rates[self._classes(heads, buckets)]
        # The probabilities of a ranking must not increase with the rank, and their sum must not exceed 1.
        probs = np.minimum.accumulate(probs, axis=1)
        return np.asarray(probs / np.maximum(1.0, probs.sum(axis=1, keepdims=True)))

    def _classes(self, heads: int | npt.NDArray[np.int64], buckets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the class of each token; heads beyond the last one share its calibration."""
        return np.minimum(heads, self._last_head) * PROB_BUCKETS + buckets

    def learn(self, proposal: Proposal, buckets: npt.NDArray[np.int64], tokens: list[int]) -> None:
        """Update the rates from the rankings along the emitted tokens; verification did not test the others."""
        for token, ranking in zip(tokens, proposal.along(tokens), strict=False):
            classes = self._classes(int(proposal.depths[ranking]), buckets[ranking])
            self._rates.learn(classes, proposal.tokens[ranking] == token)


def prob_bucket(probs: Array) -> npt.NDArray[np.int64]:
    """Return the bucket of each probability p, on a log scale of p up to 0.5 and of 1 - p above. NaN counts as 0."""
    probs = np.nan_to_num(probs)
    complement = np.clip(1.0 - probs, 2.0**-6, 1.0)
    high = np.floor(-BUCKETS_PER_HALVING * np.log2(complement))
    low = np.floor(-BUCKETS_PER_HALVING * np.log2(np.clip(probs, 2.0**-8, 1.0)))
    return np.where(probs > 0.5, 12 - np.clip(high, 2, 12), np.clip(low + 9, 11, PROB_BUCKETS - 1)).astype(np.int64)


def bucket_center(bucket: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the probability at the center of each bucket."""
    high = 1 - 2.0 ** (-(12 - bucket + 0.5) / BUCKETS_PER_HALVING)
    low = 2.0 ** (-(bucket - 9 + 0.5) / BUCKETS_PER_HALVING)
    return np.where(bucket <= 10, high, low)
