"""Search in suffix-array shards: finds the suffixes that start with given tokens, and reads the tokens after them.

``find_longest`` searches for a context, starting from the heads table. ``narrow_range`` extends a match by one token,
starting from the range of the match, which a draft node has from its parent. ``sample_matches`` and ``read_followers``
read the tokens after a range's matches.

Most of the time is memory latency: each bisection step reads a suffix and then the text at its position, which are far
apart. ``find_boundary`` therefore has three rounds. The first bisects the sampled prefixes, which hold a few tokens of
every 256th suffix and are small enough to stay in the cache. The other rounds prefetch everything that they may read,
so that each waits for memory only once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hdtool.runtime.kernels.compiled import Ints, array_at, compiled, prefetch

PREFIX_EVERY = 256
PREFIX_TOKENS = 4
"""Number of tokens in a sampled prefix, without the suffix's first token, which is known from the heads table."""
BISECTION_STRIDES = (16, 1)
"""Distances between the suffixes that the second and third round of ``find_boundary`` bisect."""
FIRST_LENGTH = 3
"""First match length to try, about the usual match length for text that isn't in the corpus."""
MIN_WIDE_BRACKET = 1024
"""Number of suffixes above which ``narrow_range`` uses the sampled prefixes."""
FIRST_LENGTH_STRIDE = 8

Int = Any
"""An integer of NumPy or Python; compiled code accepts both."""


class ShardExtent(NamedTuple):
    """The place of a shard in the files of the index.

    ``token``, ``suffix`` and ``prefix`` are the indices of its first token, suffix and sampled prefix; ``tokens`` and
    ``suffixes`` are its numbers of tokens and suffixes.
    """

    token: int
    tokens: int
    suffix: int
    suffixes: int
    prefix: int


TOKEN, TOKENS, SUFFIX, SUFFIXES, PREFIX = range(5)


class Shards(NamedTuple):
    """The arrays of a corpus index."""

    tokens: Ints
    """Documents, each followed by an end token."""
    suffixes: Ints
    """Suffix arrays of all shards: positions within the shard, sorted by the text that starts there."""
    heads: Ints
    """Index of the first suffix that starts with each token, ``[shards, vocabulary + 1]``."""
    sampled_prefixes: Ints
    extents: Ints
    """One row per shard with the fields of ``ShardExtent``, ``[shards, 5]``."""

    def addresses(self) -> Ints:
        """Return the arrays' addresses and sizes for ``shards_at``; the arrays must outlive the result."""
        return np.array([(array.ctypes.data, array.shape[0], array.shape[-1]) for array in self], np.int64)


def sampled_prefixes_in(suffixes: Any) -> Any:
    """Return how many prefixes are sampled from ``suffixes`` suffixes; ``suffixes`` may be an array."""
    return -(-suffixes // PREFIX_EVERY)


@compiled
def shards_at(tokens: Ints, at: Ints) -> Shards:
    """Rebuild ``Shards`` from its ``addresses``; passing the arrays from Python would cost 0.1 microseconds each."""
    return Shards(
        tokens,
        array_at(at[1, 0], at[1, 1], np.uint32),
        array_at(at[2, 0], (at[2, 1], at[2, 2]), np.uint32),
        array_at(at[3, 0], (at[3, 1], at[3, 2]), tokens.dtype),
        array_at(at[4, 0], (at[4, 1], at[4, 2]), np.int64),
    )


@compiled
def find_longest(shards: Shards, tail: Ints) -> tuple[int, Ints]:
    """Return the length of the longest suffix of ``tail`` that occurs in the corpus, and its range in each shard.

    If a suffix occurs, so do all shorter ones. Lengths are therefore tried in growing strides until one doesn't occur,
    and then by bisection.
    """
    ranges = np.zeros((2, len(shards.extents), 2), np.int64)  # of the longest match so far, and of the current attempt
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
    """Return the length of the longest suffix of ``tail`` whose tokens are all in the vocabulary.

    Longer suffixes can't match.
    """
    usable = 0
    while usable < len(tail) and 0 <= tail[len(tail) - usable - 1] < vocabulary:
        usable += 1
    return usable


@compiled
def _find(shards: Shards, tail: Ints, length: int, ranges: Ints) -> bool:
    """Write the ranges of suffixes that start with the last ``length`` tokens; return True if there are any.

    The ends of the ranges may be too high; see ``_narrow_ends``.
    """
    occurs = False
    for shard in range(len(shards.extents)):
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
    """Correct the ends of the ranges that ``_find`` wrote, which may be too high."""
    for shard in range(len(ranges)):
        low, high = ranges[shard]
        if low < high:
            ranges[shard, 1] = find_boundary(shards, shard, tail, length, low + 1, high, True)


@compiled
def head_range(shards: Shards, shard: int, token: Int) -> tuple[Int, Int]:
    """Return the range of suffixes that start with a token, clamped to the shard in case the file is damaged."""
    low = min(np.int64(shards.heads[shard, token]), shards.extents[shard, SUFFIXES])
    return low, max(low, min(np.int64(shards.heads[shard, token + 1]), shards.extents[shard, SUFFIXES]))


@compiled
def find_boundary(shards: Shards, shard: int, tail: Ints, length: int, low: Int, high: Int, past: bool) -> Int:
    """Return the first suffix between ``low`` and ``high`` that starts with or sorts after the last ``length`` tokens.

    With ``past``, return the first that sorts after these tokens. Return ``high`` if there is none. All suffixes in
    between must start with the first of the tokens.
    """
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
    """Narrow a search for a boundary to the suffixes between two sampled prefixes; return the new bounds."""
    first = (low + PREFIX_EVERY - 1) // PREFIX_EVERY
    last = (high + PREFIX_EVERY - 1) // PREFIX_EVERY
    left, right = first, last
    while left < right:
        middle = (left + right) >> 1
        order = 0
        for offset in range(1, min(length, PREFIX_TOKENS + 1)):
            token = np.int64(shards.sampled_prefixes[shards.extents[shard, PREFIX] + middle, offset - 1])
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
    """Prefetch the text of every ``stride``-th suffix between ``low`` and ``high``."""
    for at in range(low, high, stride):
        position = np.int64(shards.suffixes[shards.extents[shard, SUFFIX] + at])
        prefetch(shards.tokens, shards.extents[shard, TOKEN] + position + 1)


@compiled
def _order(shards: Shards, shard: int, suffix: Int, tail: Ints, length: int) -> int:
    """Compare a suffix with the last ``length`` tokens, assuming that both start with the same token.

    Return -1 if the suffix sorts before them, 0 if it starts with them, and 1 if it sorts after them.
    """
    position = np.int64(shards.suffixes[shards.extents[shard, SUFFIX] + suffix])
    start, first = shards.extents[shard, TOKEN] + position, len(tail) - length
    room = shards.extents[shard, TOKENS] - position
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
    """Return the start and end of the part of a range that also matches the last token of ``tail``.

    The suffixes of the range share the ``length - 1`` tokens before this token. The part must be known to start between
    ``low`` and ``first`` and to end between ``last`` and ``high``.
    """
    token = tail[len(tail) - 1]
    if first - low > MIN_WIDE_BRACKET:
        low = find_boundary(shards, shard, tail, length, low, first, False)
    else:
        low = _bisect(shards, shard, length - 1, low, first, token)
    if last <= low:
        # No sample has the token, so it is rare or missing: gallop to its end.
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
    """Return the first suffix, from ``low`` to ``high``, whose token at index ``length`` is ``token`` or larger."""
    while low < high:
        middle = (low + high) >> 1
        if _follower_of(shards, shard, middle, length) < token:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _follower_of(shards: Shards, shard: int, suffix: Int, length: int) -> Int:
    """Return the token after the first ``length`` tokens of a suffix, never reading beyond the end of the shard."""
    position = np.int64(shards.suffixes[shards.extents[shard, SUFFIX] + suffix]) + length
    return np.int64(shards.tokens[shards.extents[shard, TOKEN] + min(position, shards.extents[shard, TOKENS] - 1)])


@compiled
def sample_step(num_matches: int, samples: int) -> int:
    """Return the distance between evenly spread samples of a range, in units of 1/65536 of a match."""
    return (num_matches << 16) // samples if samples else 0


@compiled
def sample_index(sample: int, step: int) -> int:
    """Return the index, within a range, of the match from which a sample is taken.

    Samples are evenly spread, because the first matches of a sorted range all have followers with small ids.
    """
    return sample * step >> 16


@compiled
def sample_matches(shards: Shards, ranges: Ints, length: int, num_matches: int, matches: Ints) -> None:
    """Sample evenly spread matches of ``length`` tokens from ``ranges``, and write the positions of their next tokens.

    Each column of ``matches`` ``[2, samples]`` gets the position of the next token and the end of its shard.
    """
    samples = matches.shape[1]
    step, sample, num_earlier = sample_step(num_matches, samples), 0, 0
    for shard in range(len(ranges)):
        low, high = ranges[shard, 0], ranges[shard, 1]
        first, start = shards.extents[shard, SUFFIX] + low - num_earlier, shards.extents[shard, TOKEN]
        num_earlier += high - low
        # These loads all miss the cache; without branches in between, the misses overlap.
        while sample < samples and sample_index(sample, step) < num_earlier:
            matches[0, sample] = start + length + np.int64(shards.suffixes[first + sample_index(sample, step)])
            matches[1, sample] = start + shards.extents[shard, TOKENS]
            sample += 1


@compiled
def read_followers(shards: Shards, matches: Ints, depth: int, followers: Ints) -> None:
    """Write, for each match, the token ``depth`` positions after its next token.

    If that position is beyond the shard, an end token is written.
    """
    end = shards.heads.shape[1] - 1
    for sample in range(matches.shape[1]):
        at = matches[0, sample] + depth
        # A damaged file must not cause reads outside the shard, or ids outside the vocabulary.
        token = np.int64(shards.tokens[at] if at < matches[1, sample] else end)
        followers[sample] = token if token < end else end
