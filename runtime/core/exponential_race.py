"""An exponential race between tokens, with random numbers that depend only on seed, position and token."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hdtool.runtime.kernels.compiled import compiled

U64 = np.uint64
RACE_BLOCK = 64
"""Number of tokens whose times are compared at once with the earliest time so far."""
U64_MAX = 2**64 - 1
SPLITMIX_STRIDE = U64(0x9E3779B97F4A7C15)
"""Increment of SplitMix64 (Steele et al., 2014), whose n-th number is a hash of start + n * stride."""


class ExponentialRace:
    """The random numbers of an exponential race between tokens, which depend only on seed, position and token.

    The race is the Gumbel-max trick: each token gets an exponential time with its probability as the rate, and the
    smallest time wins, so each token wins with its probability. Rounding changes the result only if two times are
    nearly equal. Inverse-CDF sampling with one number per position is less robust: rounding matters near every boundary
    in the cumulative distribution.
    """

    def __init__(self, seed: int) -> None:
        self.seed = U64(seed & U64_MAX)

    def uniforms(self, position: int, tokens: int) -> npt.NDArray[np.float64]:
        """Return the uniform random numbers in [0, 1) of the first ``tokens`` token ids at a position."""
        uniforms: npt.NDArray[np.float64] = _uniforms(self.seed, position, tokens)
        return uniforms


@compiled
def _hashed(number: Any) -> Any:
    number = (number ^ (number >> U64(30))) * U64(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> U64(27))) * U64(0x94D049BB133111EB)
    return number ^ (number >> U64(31))


@compiled
def hashed_seed(seed: Any) -> Any:
    return _hashed(seed + SPLITMIX_STRIDE)


@compiled
def stream_start(seed: Any, position: Any) -> Any:
    """Return the start of a position's random stream, hashed so that neighbouring positions are independent."""
    return _hashed(hashed_seed(seed) + U64(position) * SPLITMIX_STRIDE)


@compiled
def _uniform(number: Any) -> Any:
    return (_hashed(number) >> U64(11)) * 2.0**-53


@compiled
def _uniforms(seed: Any, position: Any, tokens: Any) -> Any:
    uniforms = np.empty(tokens)
    number = stream_start(seed, position)
    for token in range(tokens):
        number += SPLITMIX_STRIDE
        uniforms[token] = _uniform(number)
    return uniforms


@compiled
def time_of(start: Any, token: Any) -> Any:
    """Return a token's exponential time with rate 1, from the random stream that begins at ``start``."""
    return -np.log1p(-_uniform(start + U64(token + 1) * SPLITMIX_STRIDE))


@compiled
def race_block(start: Any, first: Any, weights: Any, winner: Any, earliest: Any) -> Any:
    """Let the ``len(weights)`` tokens from ``first`` on join a race; return the winner so far and its time.

    ``start`` is the start of the position's random stream.
    """
    number = start + U64(first) * SPLITMIX_STRIDE
    early = 0
    # Branch-free, so that the compiler vectorizes it. Hardly any block has a token that can win.
    for index in range(weights.shape[0]):
        early += _uniform(number + U64(index + 1) * SPLITMIX_STRIDE) < weights[index] * earliest
    if early > 0:
        for index in range(weights.shape[0]):
            time = time_before(earliest, number + U64(index + 1) * SPLITMIX_STRIDE, weights[index])
            if time < earliest:
                winner, earliest = first + index, time
    return winner, earliest


@compiled
def time_before(earliest: Any, number: Any, weight: Any) -> Any:
    """Return the smaller of ``earliest`` and the exponential time with rate ``weight`` derived from ``number``."""
    draw = _uniform(number)
    # -log1p(-u) >= u, so most tokens are ruled out without a logarithm.
    return min(earliest, -np.log1p(-draw) / weight) if draw < weight * earliest else earliest
