"""Search in suffix-array shards: where the longest known suffix of a context stands.

What a search costs is not comparing but waiting for memory: every step of a bisection reads a suffix
and then the text that it points to, far apart. So it is done in three rounds. The first bisects
signposts, a copy of the text behind every 256th suffix that is small enough to stay in the cache;
the other two fetch all that they may read beforehand, so that they wait once and not at every step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from hdtool.runtime.kernels.raw_memory import array_at, prefetch

SIGNPOST_EVERY = 256
SIGNPOST_TOKENS = 4
"""Of the text behind the first token, which a search knows from the heads."""
STRIDES = (16, 1)
"""Of the rounds behind the signposts."""
FIRST_STRIDE = 3
"""The first length that is looked for: of text that is new to a corpus, what is known is mostly about as long."""

Ints = npt.NDArray[Any]
Int = Any
"""A number of numpy's or Python's: compiled code takes either."""


class ShardPlace(NamedTuple):
    """Where a shard lies in the files of tokens, suffixes and signposts."""

    token: int
    tokens: int
    suffix: int
    suffixes: int
    signpost: int


TOKEN, TOKENS, SUFFIX, SUFFIXES, SIGNPOST = range(5)


class Shards(NamedTuple):
    """The arrays of an index."""

    tokens: Ints
    """The documents, an end behind each."""
    suffixes: Ints
    """For each shard, positions in it in the order of the text from there on."""
    heads: Ints
    """For each shard and token, the first suffix that starts with it."""
    signposts: Ints
    places: Ints
    """A row for each shard: the fields of ``ShardPlace``."""

    def addresses(self) -> Ints:
        """Where the arrays are and their sizes, for ``shards_at``; they must outlive it."""
        return np.array([(array.ctypes.data, array.shape[0], array.shape[-1]) for array in self], np.int64)


def signposts_in(suffixes: Any) -> Any:
    """How many signposts a shard has, or each of some shards."""
    return -(-suffixes // SIGNPOST_EVERY)


@njit(cache=True, nogil=True)
def shards_at(tokens: Ints, at: Ints) -> Shards:
    """The shards of these addresses: every array that Python hands to compiled code costs a tenth of a microsecond."""
    return Shards(
        tokens,
        array_at(at[1, 0], at[1, 1], np.uint32),
        array_at(at[2, 0], (at[2, 1], at[2, 2]), np.uint32),
        array_at(at[3, 0], (at[3, 1], at[3, 2]), tokens.dtype),
        array_at(at[4, 0], (at[4, 1], at[4, 2]), np.int64),
    )


@njit(cache=True, nogil=True)
def find_longest(shards: Shards, tail: Ints) -> tuple[int, Ints]:
    """The longest suffix of ``tail`` that occurs anywhere, and its range of suffixes in each shard.

    If a suffix occurs, so does every shorter one: lengths are tried in growing strides until one
    does not occur, then those between.
    """
    ranges = np.zeros((2, len(shards.places), 2), np.int64)  # of the longest so far, and of the one that is tried
    known, beyond = 0, _usable(tail, shards.heads.shape[1] - 1) + 1
    stride = FIRST_STRIDE
    while known + 1 < beyond:
        length = min(known + stride, (known + beyond + 1) // 2)
        if _find(shards, tail, length, ranges[1]):
            stride = 2 * stride if known else 1
            known = length
            ranges[0] = ranges[1]
        else:
            beyond = length
    if known > 1:
        _close(shards, tail, known, ranges[0])
    return known, ranges[0]


@njit(cache=True, nogil=True)
def _usable(tail: Ints, vocabulary: int) -> int:
    """How many of the last tokens are words; an end or what no model has occurs in no document."""
    usable = 0
    while usable < len(tail) and 0 <= tail[len(tail) - usable - 1] < vocabulary:
        usable += 1
    return usable


@njit(cache=True, nogil=True)
def _find(shards: Shards, tail: Ints, length: int, ranges: Ints) -> bool:
    """Whether the last ``length`` tokens occur; the ranges begin where they do, and end too late."""
    occurs = False
    for shard in range(len(shards.places)):
        head = tail[len(tail) - length]
        low = np.int64(shards.heads[shard, head])
        # Of a damaged file: at worst an empty range, never one behind the suffixes.
        high = max(low, min(np.int64(shards.heads[shard, head + 1]), shards.places[shard, SUFFIXES]))
        if length > 1 and low < high:
            low = boundary(shards, shard, tail, length, low, high, False)
            if low < high and _order(shards, shard, low, tail, length) != 0:
                high = low
        ranges[shard, 0], ranges[shard, 1] = low, high
        occurs |= low < high
    return occurs


@njit(cache=True, nogil=True)
def _close(shards: Shards, tail: Ints, length: int, ranges: Ints) -> None:
    """Let the ranges that ``_find`` gave end where their tokens do."""
    for shard in range(len(ranges)):
        low, high = ranges[shard]
        if low < high:
            ranges[shard, 1] = boundary(shards, shard, tail, length, low + 1, high, True)


@njit(cache=True, nogil=True)
def boundary(shards: Shards, shard: int, tail: Ints, length: int, low: Int, high: Int, past: bool) -> Int:
    """Of suffixes with the right head, the first that is not before the tokens or, ``past``, behind them."""
    low, high = _between_signposts(shards, shard, tail, length, low, high, past)
    for stride in STRIDES:
        probes = (high - low + stride - 1) // stride
        if probes > 2:
            _fetch(shards, shard, low, high, stride)
        left, right = 0, probes
        while left < right:
            middle = (left + right) >> 1
            order = _order(shards, shard, low + middle * stride, tail, length)
            if order < 0 or (past and order == 0):
                left = middle + 1
            else:
                right = middle
        if left < probes:
            high = low + left * stride
        if left > 0:
            low += (left - 1) * stride + 1
    return low


@njit(cache=True, nogil=True)
def _between_signposts(
    shards: Shards, shard: int, tail: Ints, length: int, low: Int, high: Int, past: bool
) -> tuple[Int, Int]:
    """A stretch between two signposts that holds the boundary."""
    first = (low + SIGNPOST_EVERY - 1) // SIGNPOST_EVERY
    last = (high + SIGNPOST_EVERY - 1) // SIGNPOST_EVERY
    left, right = first, last
    while left < right:
        middle = (left + right) >> 1
        order = 0
        for offset in range(1, min(length, SIGNPOST_TOKENS + 1)):
            token = np.int64(shards.signposts[shards.places[shard, SIGNPOST] + middle, offset - 1])
            wanted = tail[len(tail) - length + offset]
            if token != wanted:
                order = -1 if token < wanted else 1
                break
        if order == 0 and length > SIGNPOST_TOKENS + 1:
            order = _order(shards, shard, middle * SIGNPOST_EVERY, tail, length)
        if order < 0 or (past and order == 0):
            left = middle + 1
        else:
            right = middle
    if left < last:
        high = left * SIGNPOST_EVERY
    if left > first:
        low = (left - 1) * SIGNPOST_EVERY + 1
    return low, high


@njit(cache=True, nogil=True)
def _fetch(shards: Shards, shard: int, low: Int, high: Int, stride: int) -> None:
    """Have the texts of every ``stride``-th suffix on their way."""
    for at in range(low, high, stride):
        place = np.int64(shards.suffixes[shards.places[shard, SUFFIX] + at])
        prefetch(shards.tokens, shards.places[shard, TOKEN] + place + 1)


@njit(cache=True, nogil=True)
def starts_with(shards: Shards, shard: int, suffix: Int, tail: Ints, length: int) -> bool:
    """Whether a suffix with the right head starts with the last ``length`` tokens."""
    return bool(_order(shards, shard, suffix, tail, length) == 0)


@njit(cache=True, nogil=True)
def _order(shards: Shards, shard: int, suffix: Int, tail: Ints, length: int) -> int:
    """Of a suffix against tokens with the same head: -1 before them, 0 if it starts with them, 1 behind."""
    place = np.int64(shards.suffixes[shards.places[shard, SUFFIX] + suffix])
    start, first = shards.places[shard, TOKEN] + place, len(tail) - length
    room = shards.places[shard, TOKENS] - place
    for offset in range(1, length):
        if offset >= room:
            return -1
        token = np.int64(shards.tokens[start + offset])
        if token != tail[first + offset]:
            return -1 if token < tail[first + offset] else 1
    return 0
