"""Calibration of the heads' probabilities by observed acceptance."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hdtool.runtime.drafters.trained.proposal import Proposal
from hdtool.runtime.kernels.compiled import Array

BUCKETS = 28
BUCKETS_PER_HALVING = 2.0
"""Buckets per halving of the probability."""
EMA_WINDOW = 200.0
"""Window of the moving averages, in observations of a bucket."""
PRIOR_WEIGHT = 30.0
"""Weight of the acceptance rates found in training, in observations."""
LOWEST = 1e-4


class Calibration:
    """Calibrated probabilities of a head's tokens after an accepted path, by bucket of the head's probability."""

    def __init__(self, probs: list[list[float]] | None, heads: int) -> None:
        """``probs`` are the acceptance rates found in training; by default the prior is the heads' own probability."""
        first = np.array(probs) if probs else np.tile(centre_of(np.arange(BUCKETS)), (heads, 1))
        self._observed = np.full(first.shape, PRIOR_WEIGHT)
        self._accepted = PRIOR_WEIGHT * np.clip(first, LOWEST, 1.0)

    def __call__(self, buckets: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """The probabilities of each head's best tokens ``[heads, best]``, best first."""
        return self._probs(np.arange(len(buckets))[:, None], buckets)

    def at(self, head: int, buckets: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """The probabilities of the best tokens of several rankings of one head ``[rankings, best]``, best first.

        Heads beyond the last one are calibrated like it.
        """
        return self._probs(min(head, len(self._observed) - 1), buckets)

    def _probs(self, heads: int | npt.NDArray[np.int64], buckets: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        probs = self._accepted[heads, buckets] / self._observed[heads, buckets]
        # Probabilities of a head must not increase with the rank, and their sum must not exceed 1.
        probs = np.minimum.accumulate(probs, axis=1)
        return np.asarray(probs / np.maximum(1.0, probs.sum(axis=1, keepdims=True)))

    def update(self, head: int, buckets: npt.NDArray[np.int64], accepted: npt.NDArray[np.bool_]) -> None:
        """Update the rates of a head: the buckets of its best tokens, and which of them was the next token."""
        observed, hits = self._observed[head], self._accepted[head]
        decay = np.minimum(1.0, EMA_WINDOW / observed[buckets])
        observed[buckets] *= decay
        hits[buckets] *= decay
        np.add.at(observed, buckets, 1.0)
        np.add.at(hits, buckets, accepted)

    def learn(self, proposal: Proposal, buckets: npt.NDArray[np.int64], tokens: list[int]) -> None:
        """Update the rates by the rankings along emitted tokens; those after another path have no observation."""
        for token, ranking in zip(tokens, proposal.along(tokens), strict=False):
            head = min(int(proposal.depths[ranking]), len(self._observed) - 1)
            self.update(head, buckets[ranking], proposal.tokens[ranking] == token)


def bucket_of(probs: Array) -> npt.NDArray[np.int64]:
    """The bucket of each probability: logarithmic in p below 0.5, in 1 - p above. NaN is 0."""
    probs = np.nan_to_num(probs)
    complement = np.clip(1.0 - probs, 2.0**-6, 1.0)
    high = np.floor(-BUCKETS_PER_HALVING * np.log2(complement))
    low = np.floor(-BUCKETS_PER_HALVING * np.log2(np.clip(probs, 2.0**-8, 1.0)))
    return np.where(probs > 0.5, 12 - np.clip(high, 2, 12), np.clip(low + 9, 11, BUCKETS - 1)).astype(np.int64)


def centre_of(bucket: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """The probability at the centre of a bucket."""
    high = 1 - 2.0 ** (-(12 - bucket + 0.5) / BUCKETS_PER_HALVING)
    low = 2.0 ** (-(bucket - 9 + 0.5) / BUCKETS_PER_HALVING)
    return np.where(bucket <= 10, high, low)
