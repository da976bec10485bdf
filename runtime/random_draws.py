"""Random numbers for drawing tokens: a function of seed, position and token, on every machine the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

U64 = np.uint64
WORD = 2**64 - 1
STRIDE = U64(0x9E3779B97F4A7C15)
"""Of SplitMix64, a generator whose n-th number is a hash of start + n strides: any may be had without the others."""


class Draws:
    """A uniform number in [0, 1) for each position and token, and the token that they choose there.

    The choice is a race: each token arrives after an exponential time of the rate of its probability, so
    the first to arrive is each of them as often as it is probable. Rounding can only change who wins where
    two arrive at nearly the same time. With one number for each position, compared with cumulative
    probabilities, it could wherever the number falls next to any border of thousands.
    """

    def __init__(self, seed: int) -> None:
        self._seed = U64(seed & WORD)

    def first(self, position: int, probabilities: npt.NDArray[np.float32]) -> int:
        """The token that arrives first, never one of no probability; -1 if none does or they are not numbers."""
        return int(_first(self._seed, position, probabilities))

    def at(self, position: int, tokens: int) -> npt.NDArray[np.float64]:
        """The numbers of so many tokens at a position."""
        drawn: npt.NDArray[np.float64] = _drawn(self._seed, position, tokens)
        return drawn


@njit(cache=True, nogil=True)
def _hashed(number: Any) -> Any:
    number = (number ^ (number >> U64(30))) * U64(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> U64(27))) * U64(0x94D049BB133111EB)
    return number ^ (number >> U64(31))


@njit(cache=True, nogil=True)
def _start(seed: Any, position: Any) -> Any:
    """Where a position's stream starts; hashed, so that neighbours have nothing in common."""
    return _hashed(_hashed(seed + STRIDE) + U64(position) * STRIDE)


@njit(cache=True, nogil=True)
def _uniform(number: Any) -> Any:
    return (_hashed(number) >> U64(11)) * 2.0**-53


@njit(cache=True, nogil=True)
def _drawn(seed: Any, position: Any, tokens: Any) -> Any:
    drawn = np.empty(tokens)
    number = _start(seed, position)
    for token in range(tokens):
        number += STRIDE
        drawn[token] = _uniform(number)
    return drawn


@njit(cache=True, nogil=True)
def _first(seed: Any, position: Any, probabilities: Any) -> Any:
    winner, earliest = -1, np.inf
    number = _start(seed, position)
    for token in range(probabilities.shape[0]):
        number += STRIDE
        draw = _uniform(number)
        # A time is never below its number, which spares all but a few tokens the logarithm.
        if draw < probabilities[token] * earliest:
            time = -np.log1p(-draw) / probabilities[token]
            if time < earliest:
                winner, earliest = token, time
    return winner
