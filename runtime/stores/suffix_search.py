"""Search in suffix-array shards: the range of suffixes that start with given tokens, and what follows them.

Every look-up in the corpus index uses these functions. ``find_longest`` starts from the heads table with a context
alone; ``narrow_range`` starts from the range of the tokens without the last one, which a node has from its parent.
``sample_matches`` and ``read_followers`` read what follows a range.

Memory latency is most of the cost: every bisection step reads a suffix and then the text at its position, far apart.
So ``find_boundary`` has three rounds. The first bisects the sampled prefixes, a copy of the text after every 256th
suffix's first token that is small enough to stay in the cache; the other two prefetch all that they may read, so that
they wait once and not at every step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hdtool.runtime.kernels.compiled import Ints, array_at, compiled, prefetch

PREFIX_EVERY = 256
PREFIX_TOKENS = 4
"""Tokens of a sampled prefix. They follow the suffix's first token, which the heads table gives."""
BISECTION_STRIDES = (16, 1)
"""Distance between the suffixes that the second and the third round bisect."""
FIRST_LENGTH = 3
"""The first length that is searched: matches of text that is new to a corpus are mostly about as long."""
MIN_WIDE_BRACKET = 1024
"""``narrow_range`` uses the sampled prefixes in brackets wider than this."""
FIRST_LENGTH_STRIDE = 8

Int = Any
"""A number of numpy's or Python's: compiled code takes either."""


class ShardPlace(NamedTuple):
    """Where a shard lies in the files of tokens, suffixes and sampled prefixes."""

    token: int
    tokens: int
    suffix: int
    suffixes: int
    prefix: int


TOKEN, TOKENS, SUFFIX, SUFFIXES, PREFIX = range(5)


class Shards(NamedTuple):
    """The arrays of an index."""

    tokens: Ints
    """The documents, an end token after each."""
    suffixes: Ints
    """For each shard, positions in it in the order of the text from there on."""
    heads: Ints
    """For each shard and token, the first suffix that starts with it."""
    sampled_prefixes: Ints
    places: Ints
    """A row for each shard: the fields of ``ShardPlace``."""

    def addresses(self) -> Ints:
        """Where the arrays are and their sizes, for ``shards_at``; they must outlive it."""
        return np.array([(array.ctypes.data, array.shape[0], array.shape[-1]) for array in self], np.int64)


def sampled_prefixes_in(suffixes: Any) -> Any:
    """The number of sampled prefixes of a shard, or of each of some shards, from its number of suffixes."""
    return -(-suffixes // PREFIX_EVERY)


@compiled
def shards_at(tokens: Ints, at: Ints) -> Shards:
    """The shards of these addresses: every array that Python hands to compiled code costs a tenth of a microsecond."""
    return Shards(
        tokens,
        array_at(at[1, 0], at[1, 1], np.uint32),
        array_at(at[2, 0], (at[2, 1], at[2, 2]), np.uint32),
        array_at(at[3, 0], (at[3, 1], at[3, 2]), tokens.dtype),
        array_at(at[4, 0], (at[4, 1], at[4, 2]), np.int64),
    )


@compiled
def find_longest(shards: Shards, tail: Ints) -> tuple[int, Ints]:
    """The longest suffix of ``tail`` that occurs anywhere, and its range of suffixes in each shard.

    If a suffix occurs, so does every shorter one: lengths are tried in growing strides until one
    does not occur, then those between.
    """
    ranges = np.zeros((2, len(shards.places), 2), np.int64)  # of the longest so far, and of the one that is tried
    matched, missing = 0, _usable(tail, shards.heads.shape[1] - 1) + 1
    stride = FIRST_LENGTH
    while matched + 1 < missing:
        length = min(matched + stride, (matched + missing + 1) // 2)
        if _find(shards, tail, length, ranges[1]):
            stride = 2 * stride if matched else 1
            matched = length
            ranges[0] = ranges[1]
        else:
            missing = length
    if matched > 1:
        _narrow_ends(shards, tail, matched, ranges[0])
    return matched, ranges[0]


@compiled
def _usable(tail: Ints, vocabulary: int) -> int:
    """The number of last tokens that are in the vocabulary; no document holds an end or any other token."""
    usable = 0
    while usable < len(tail) and 0 <= tail[len(tail) - usable - 1] < vocabulary:
        usable += 1
    return usable


@compiled
def _find(shards: Shards, tail: Ints, length: int, ranges: Ints) -> bool:
    """Return True if the last ``length`` tokens occur; the ranges begin where they do, and end too late."""
    occurs = False
    for shard in range(len(shards.places)):
        low, high = head_range(shards, shard, tail[len(tail) - length])
        if length > 1 and low < high:
            low = find_boundary(shards, shard, tail, length, low, high, False)
            if low < high and _order(shards, shard, low, tail, length) != 0:
                high = low
        ranges[shard, 0], ranges[shard, 1] = low, high
        occurs |= low < high
    return occurs


@compiled
def _narrow_ends(shards: Shards, tail: Ints, length: int, ranges: Ints) -> None:
    """Narrow the ranges from ``_find`` to end where their tokens do."""
    for shard in range(len(ranges)):
        low, high = ranges[shard]
        if low < high:
            ranges[shard, 1] = find_boundary(shards, shard, tail, length, low + 1, high, True)


@compiled
def head_range(shards: Shards, shard: int, token: Int) -> tuple[Int, Int]:
    """The range of suffixes that start with a token; in a damaged file it still ends within the suffixes."""
    low = min(np.int64(shards.heads[shard, token]), shards.places[shard, SUFFIXES])
    return low, max(low, min(np.int64(shards.heads[shard, token + 1]), shards.places[shard, SUFFIXES]))


@compiled
def find_boundary(shards: Shards, shard: int, tail: Ints, length: int, low: Int, high: Int, past: bool) -> Int:
    """The first suffix of a head's range that sorts at or after the tokens or, with ``past``, after them."""
    low, high = _between_sampled(shards, shard, tail, length, low, high, past)
    for stride in BISECTION_STRIDES:
        probes = (high - low + stride - 1) // stride
        if probes > 2:
            _prefetch_texts(shards, shard, low, high, stride)
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


@compiled
def _between_sampled(
    shards: Shards, shard: int, tail: Ints, length: int, low: Int, high: Int, past: bool
) -> tuple[Int, Int]:
    """A range between two sampled prefixes that holds the boundary."""
    first = (low + PREFIX_EVERY - 1) // PREFIX_EVERY
    last = (high + PREFIX_EVERY - 1) // PREFIX_EVERY
    left, right = first, last
    while left < right:
        middle = (left + right) >> 1
        order = 0
        for offset in range(1, min(length, PREFIX_TOKENS + 1)):
            token = np.int64(shards.sampled_prefixes[shards.places[shard, PREFIX] + middle, offset - 1])
            wanted = tail[len(tail) - length + offset]
            if token != wanted:
                order = -1 if token < wanted else 1
                break
        if order == 0 and length > PREFIX_TOKENS + 1:
            order = _order(shards, shard, middle * PREFIX_EVERY, tail, length)
        if order < 0 or (past and order == 0):
            left = middle + 1
        else:
            right = middle
    if left < last:
        high = left * PREFIX_EVERY
    if left > first:
        low = (left - 1) * PREFIX_EVERY + 1
    return low, high


@compiled
def _prefetch_texts(shards: Shards, shard: int, low: Int, high: Int, stride: int) -> None:
    """Prefetch the texts of every ``stride``-th suffix."""
    for at in range(low, high, stride):
        place = np.int64(shards.suffixes[shards.places[shard, SUFFIX] + at])
        prefetch(shards.tokens, shards.places[shard, TOKEN] + place + 1)


@compiled
def _order(shards: Shards, shard: int, suffix: Int, tail: Ints, length: int) -> int:
    """A suffix compared with tokens of the same head: -1 before them, 0 if it starts with them, 1 after."""
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


@compiled
def narrow_range(
    shards: Shards, shard: int, tail: Ints, length: int, low: Int, first: Int, last: Int, high: Int
) -> tuple[Int, Int]:
    """The part of a range of ``length - 1`` tokens that continues with the last token of ``tail``.

    It begins between ``low`` and ``first`` and ends between ``last`` and ``high``.
    """
    token = tail[len(tail) - 1]
    if first - low > MIN_WIDE_BRACKET:
        low = find_boundary(shards, shard, tail, length, low, first, False)
    else:
        low = _bisect(shards, shard, length - 1, low, first, token)
    if last <= low:
        # The bracket's samples do not hold the token, so it is rare if it occurs: gallop to its end.
        if low >= high or _follower_of(shards, shard, low, length - 1) != token:
            return low, low
        stride, last = FIRST_LENGTH_STRIDE, low + 1
        while last + stride < high and _follower_of(shards, shard, last + stride - 1, length - 1) == token:
            last += stride
            stride *= 4
        high = min(high, last + stride)
    return low, _bisect(shards, shard, length - 1, last, high, token + 1)


@compiled
def _bisect(shards: Shards, shard: int, length: int, low: Int, high: Int, token: Int) -> Int:
    """The first suffix of a range whose first ``length`` tokens ``token`` or a larger one follows."""
    while low < high:
        middle = (low + high) >> 1
        if _follower_of(shards, shard, middle, length) < token:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _follower_of(shards: Shards, shard: int, suffix: Int, length: int) -> Int:
    """The token after the first ``length`` of a suffix; in a damaged file at worst the last of the shard."""
    place = np.int64(shards.suffixes[shards.places[shard, SUFFIX] + suffix]) + length
    return np.int64(shards.tokens[shards.places[shard, TOKEN] + min(place, shards.places[shard, TOKENS] - 1)])


@compiled
def sample_step(num_matches: int, samples: int) -> int:
    """The distance between samples that are spread evenly over a range, in 65536ths; see ``sample_index``."""
    return (num_matches << 16) // samples if samples else 0


@compiled
def sample_index(sample: int, step: int) -> int:
    """Which match of a range a sample is. The first samples of a sorted range would all have small token ids."""
    return sample * step >> 16


@compiled
def sample_matches(shards: Shards, ranges: Ints, length: int, num_matches: int, matches: Ints) -> None:
    """Where the text goes on after matches of ``length`` tokens, evenly spread over all ``num_matches``.

    A column of ``matches`` for each: the place of the next token, and the end of the shard.
    """
    samples = matches.shape[1]
    step, sample, before = sample_step(num_matches, samples), 0, 0
    for shard in range(len(ranges)):
        low, high = ranges[shard, 0], ranges[shard, 1]
        first, start = shards.places[shard, SUFFIX] + low - before, shards.places[shard, TOKEN]
        before += high - low
        # Only loads, which all miss the caches: without branches they wait together.
        while sample < samples and sample_index(sample, step) < before:
            matches[0, sample] = start + length + np.int64(shards.suffixes[first + sample_index(sample, step)])
            matches[1, sample] = start + shards.places[shard, TOKENS]
            sample += 1


@compiled
def read_followers(shards: Shards, matches: Ints, depth: int, followers: Ints) -> None:
    """The token ``depth`` places after each match's next one, or an end token where the shard has ended."""
    end = shards.heads.shape[1] - 1
    for sample in range(matches.shape[1]):
        at = matches[0, sample] + depth
        # A damaged file must not lead out of the shard or to a token that no model has.
        token = np.int64(shards.tokens[at] if at < matches[1, sample] else end)
        followers[sample] = token if token < end else end
