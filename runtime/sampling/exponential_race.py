"""Sampling by exponential race (Gumbel-max), with random numbers that are a function of seed, position and token."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hdtool.runtime.kernels.compiled import compiled

U64 = np.uint64
BLOCK = 64
"""Tokens that are compared with the earliest one so far at once."""
U64_MAX = 2**64 - 1
STRIDE = U64(0x9E3779B97F4A7C15)
"""The increment of SplitMix64 (Steele et al., 2014): its n-th number is a hash of start + n strides."""


class ExponentialRace:
    """A uniform number in [0, 1) for each position and token, and the token that they choose at a position.

    The token is numbers by an exponential race, which is the Gumbel-max trick: each token gets an exponential time
    with its probability as the rate, and the smallest time wins, so each token wins with its probability. Rounding
    changes the result only where two times are nearly equal. Inverse-CDF sampling with one number per position is
    less robust: rounding matters next to any border of the cumulative probabilities.
    """

    def __init__(self, seed: int) -> None:
        self.seed = U64(seed & U64_MAX)

    def sample(self, position: int, probabilities: npt.NDArray[np.float32]) -> int:
        """The token that wins the race, never one with probability 0; -1 if there is none or they are NaN."""
        return int(sample(self.seed, position, probabilities))

    def uniforms(self, position: int, tokens: int) -> npt.NDArray[np.float64]:
        """The uniform numbers of the first ``tokens`` tokens at a position."""
        numbers: npt.NDArray[np.float64] = _uniforms(self.seed, position, tokens)
        return numbers


@compiled
def _hashed(number: Any) -> Any:
    number = (number ^ (number >> U64(30))) * U64(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> U64(27))) * U64(0x94D049BB133111EB)
    return number ^ (number >> U64(31))


@compiled
def start_of(seed: Any, position: Any) -> Any:
    """The start of a position's stream, hashed so that streams of neighbouring positions are independent."""
    return _hashed(_hashed(seed + STRIDE) + U64(position) * STRIDE)


@compiled
def _uniform(number: Any) -> Any:
    return (_hashed(number) >> U64(11)) * 2.0**-53


@compiled
def _uniforms(seed: Any, position: Any, tokens: Any) -> Any:
    numbers = np.empty(tokens)
    number = start_of(seed, position)
    for token in range(tokens):
        number += STRIDE
        numbers[token] = _uniform(number)
    return numbers


@compiled
def time_of(start: Any, token: Any) -> Any:
    """The exponential time of a token in the stream of a position, for a probability of 1."""
    return -np.log1p(-_uniform(start + U64(token + 1) * STRIDE))


@compiled
def sample(seed: Any, position: Any, probabilities: Any) -> Any:
    winner, earliest = -1, np.inf
    for first in range(0, probabilities.shape[0], BLOCK):
        weights = probabilities[first : first + BLOCK]
        winner, earliest = race_block(start_of(seed, position), first, weights, winner, earliest)
    return winner


@compiled
def race_block(start: Any, first: Any, weights: Any, winner: Any, earliest: Any) -> Any:
    """The winner of a race with the tokens from the ``first`` one on, and its time; ``start`` is that of the stream."""
    number = start + U64(first) * STRIDE
    early = 0
    # Branch-free, so that the compiler uses vectors: hardly any block has a token that may win.
    for place in range(weights.shape[0]):
        early += _uniform(number + U64(place + 1) * STRIDE) < weights[place] * earliest
    if early > 0:
        for place in range(weights.shape[0]):
            time = _time_before(earliest, number + U64(place + 1) * STRIDE, weights[place])
            if time < earliest:
                winner, earliest = first + place, time
    return winner, earliest


@compiled
def _time_before(earliest: Any, number: Any, weight: Any) -> Any:
    """The exponential time of a token if it is before the earliest one so far, or else this one."""
    draw = _uniform(number)
    # -log1p(-u) >= u, so most tokens are ruled out without a logarithm.
    return min(earliest, -np.log1p(-draw) / weight) if draw < weight * earliest else earliest


@compiled
def sample_among(seed: Any, position: Any, tokens: Any, weights: Any, nucleus: Any) -> Any:
    """The token that wins among those in the nucleus, which is full once it holds this weight, the most probable first.

    Of tokens with equal weights, the last one comes first, as in a stable sort. -1 if no weight is a number.
    """
    start, winner = start_of(seed, position), -1
    while True:
        winner = _winner_before(start, tokens, weights, winner)
        if winner < 0:
            return -1
        before = 0.0
        for place in range(weights.shape[0]):
            if _is_before(tokens, weights, place, winner):
                before += weights[place]
        if before < nucleus or before == 0:  # the most probable token is always kept
            return tokens[winner]


@compiled
def _winner_before(start: Any, tokens: Any, weights: Any, border: Any) -> Any:
    """The place that wins among those before the border; among all without a border."""
    winner, earliest = -1, np.inf
    for place in range(tokens.shape[0]):
        if border < 0 or _is_before(tokens, weights, place, border):
            time = _time_before(earliest, start + U64(tokens[place] + 1) * STRIDE, weights[place])
            if time < earliest:
                winner, earliest = place, time
    return winner


@compiled
def _is_before(tokens: Any, weights: Any, place: Any, other: Any) -> Any:
    return weights[place] > weights[other] or (weights[place] == weights[other] and tokens[place] > tokens[other])
