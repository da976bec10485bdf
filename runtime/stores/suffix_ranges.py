"""The suffix ranges of a corpus index that match the nodes of a draft tree.

For each node of a draft tree and each n-gram order, the matches of the node's last tokens are one range of suffixes per
shard. A child's range lies within its parent's range of the next lower order, so only order 1 reads the heads table.
Emitted tokens narrow the ranges of the root.

If only the longest order was looked up for a node, its children have no lower-order range to narrow. The children then
narrow the node's range of the longest order, provided that all followers of that range (the tokens after its matches)
were read. A verbatim quote is thus followed to its end.

Only a sample of a range's followers is read, at even distances. The sampled followers are in suffix order, so they
bound the range of each child exactly or to within a few suffixes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from hdtool.runtime.core.tree import LARGEST_TREE
from hdtool.runtime.kernels.compiled import Ints, array_at, compiled
from hdtool.runtime.stores.suffix_search import (
    PREFIX_TOKENS,
    Shards,
    head_range,
    narrow_range,
    read_followers,
    sample_index,
    sample_matches,
    sample_step,
    shards_at,
)

MAX_RANGE_ORDER = 6
MAX_SAMPLES = 64
"""Maximum number of followers to sample from a range."""
MIN_SAMPLES = 16
"""Minimum number of followers to sample from a range; if the range has fewer, all are read."""
RANGE_ROWS = LARGEST_TREE + 1
RANGE_LOW, RANGE_HIGH = range(2)

RANGES = np.dtype(
    [
        # Indexed by node (row 0 is the root) and order.
        ("samples", np.int32, (RANGE_ROWS, MAX_RANGE_ORDER + 1, MAX_SAMPLES)),  # by shard and suffix; with end tokens
        ("read", np.int64, (RANGE_ROWS, MAX_RANGE_ORDER + 1)),  # number of samples; 0 until the range is sampled
        ("beyond", np.int64, RANGE_ROWS),  # tokens that the longest range matches in addition to its order
        ("lowest", np.int64, RANGE_ROWS),  # the lowest order that was looked up
        ("matches", np.int64, (2, MAX_SAMPLES)),  # scratch space of ``read_samples``
        ("at", np.int64),  # address of the array of suffix ranges, indexed by node, order and shard
        ("shards", np.int64, (5, 3)),  # addresses and sizes of the index's arrays
    ],
    align=True,
)


@cache
def no_shards() -> Shards:
    """Return the shards of an empty corpus, shared by all drafters without an index."""
    tokens = np.empty(0, np.uint16)
    tokens.flags.writeable = False
    heads, sampled_prefixes = np.empty((0, 1), np.uint32), np.empty((0, PREFIX_TOKENS), np.uint16)
    return Shards(tokens, np.empty(0, np.uint32), heads, sampled_prefixes, np.empty((0, 5), np.int64))


def range_record(shards: Shards) -> tuple[Ints, Ints]:
    """Return a ``RANGES`` record for a draft tree, and the array of suffix ranges that the record points to.

    The record holds addresses, so the array and the shards must outlive it.
    """
    record = np.zeros(1, RANGES)
    bounds = np.zeros((RANGE_ROWS, MAX_RANGE_ORDER + 1, len(shards.extents), 2), np.int64)
    record["lowest"] = 1
    record["at"], record["shards"] = bounds.ctypes.data, shards.addresses()
    return record, bounds


@compiled
def bounds_of(ranges: Any) -> Ints:
    """Return the array of suffix ranges that a record points to, with shape ``[nodes, orders, shards, 2]``."""
    return array_at(ranges.at, (RANGE_ROWS, MAX_RANGE_ORDER + 1, ranges.shards[4, 1], 2), np.int64)


@compiled
def narrow(corpus: Ints, ranges: Any, tail: Ints, node: int, parent: int, order: int) -> None:
    """Write a node's ranges of one n-gram order by narrowing its parent's ranges of the next lower order.

    ``tail`` holds the node's last tokens. If the parent has ranges only of the longest order, a node's ranges of the
    longest order are narrowed from these instead; see ``only_longest``.
    """
    shards, bounds = shards_at(corpus, ranges.shards), bounds_of(ranges)
    token = tail[len(tail) - 1]
    follows = order == MAX_RANGE_ORDER and only_longest(ranges, parent)
    lower_order = order if follows else order - 1
    known = 0 <= token < shards.heads.shape[1] - 1 and (order == 1 or lower_order >= ranges.lowest[parent])
    num_matches = size_of(ranges, parent, lower_order) if known and order > 1 else 0
    sample, num_earlier = 0, 0
    for shard in range(len(shards.extents)):
        low: Any = np.int64(0)
        high: Any = np.int64(0)
        if known and order == 1:
            low, high = head_range(shards, shard, token)
        elif known:
            start = bounds[parent, lower_order, shard, RANGE_LOW]
            size = bounds[parent, lower_order, shard, RANGE_HIGH] - start
            low, first, last, high, sample = _bracket(
                ranges, parent, lower_order, num_matches, num_earlier, size, sample, token
            )
            if ranges.read[parent, lower_order] < num_matches:
                low, high = narrow_range(
                    shards, shard, tail, order, start + low, start + first, start + last, start + high
                )
            else:
                low, high = start + low, start + high
            num_earlier += size
        bounds[node, order, shard, RANGE_LOW], bounds[node, order, shard, RANGE_HIGH] = low, high
    ranges.read[node, order] = 0
    if order == MAX_RANGE_ORDER:
        ranges.beyond[node] = ranges.beyond[parent] + 1 if follows else 0


@compiled
def only_longest(ranges: Any, node: int) -> bool:
    """Return True if a node has non-empty ranges of the longest order only, and all tokens after these were read."""
    if ranges.lowest[node] > MAX_RANGE_ORDER:
        return False
    if ranges.lowest[node] < MAX_RANGE_ORDER and size_of(ranges, node, MAX_RANGE_ORDER - 1) > 0:
        return False
    num_matches = size_of(ranges, node, MAX_RANGE_ORDER)
    return bool(0 < num_matches == ranges.read[node, MAX_RANGE_ORDER])


@compiled
def size_of(ranges: Any, node: int, order: int) -> int:
    """Return the number of matches in a node's ranges of one order, summed over all shards."""
    bounds, size = bounds_of(ranges), 0
    for shard in range(bounds.shape[2]):
        size += bounds[node, order, shard, RANGE_HIGH] - bounds[node, order, shard, RANGE_LOW]
    return size


@compiled
def _bracket(
    ranges: Any, node: int, order: int, num_matches: int, num_earlier: int, size: int, sample: int, token: int
) -> tuple[int, int, int, int, int]:
    """Bound the range of a shard's matches that are followed by ``token``.

    Return ``(low, first, last, high, sample)``. The range starts between ``low`` and ``first`` and ends between
    ``last`` and ``high``, counted from the shard's first match. The shard has ``size`` matches, after ``num_earlier``
    matches in earlier shards. The argument ``sample`` is the index of its first sample, and the returned ``sample``
    that of the next shard's first. If the tokens after all ``num_matches`` matches were read, ``low`` and ``high`` are
    exact.
    """
    low, first, last, high = 0, size, 0, size
    read = ranges.read[node, order]
    step = sample_step(num_matches, read)
    while sample < read and sample_index(sample, step) < num_earlier + size:
        at, follower = sample_index(sample, step) - num_earlier, ranges.samples[node, order, sample]
        if follower < token:
            low = at + 1
        elif follower > token:
            high = min(high, at)
        else:
            first, last = min(first, at), at + 1
        sample += 1
    # Samples from a damaged file may be unsorted; still, the end must not precede the start.
    high = max(low, high)
    return low, min(max(low, first), high), min(max(low, last), high), high, sample


@compiled
def read_samples(corpus: Ints, ranges: Any, node: int, order: int, num_matches: int, max_samples: int) -> None:
    """Read the tokens after a node's ``num_matches`` matches of one order; sample ``max_samples`` if there are more."""
    shards = shards_at(corpus, ranges.shards)
    read = min(num_matches, max_samples)
    matches = ranges.matches[:, :read]
    length = order + ranges.beyond[node] if order == MAX_RANGE_ORDER else order
    sample_matches(shards, bounds_of(ranges)[node, order], length, num_matches, matches)
    read_followers(shards, matches, 0, ranges.samples[node, order])
    ranges.read[node, order] = read


@compiled
def count_followers(ranges: Any, node: int, order: int, tokens: Ints, counts: Ints) -> int:
    """Write the distinct tokens among a range's samples to ``tokens`` and their counts to ``counts``.

    End tokens are skipped. Return the number of distinct tokens.
    """
    end, distinct, at = ranges.shards[2, 2] - 1, 0, 0
    for sample in range(ranges.read[node, order]):
        token = np.int64(ranges.samples[node, order, sample])
        if token == end:
            continue
        if distinct == 0 or tokens[at] != token:
            # Within a shard, equal tokens are adjacent; an earlier shard may also have the token.
            at = 0 if ranges.shards[4, 1] > 1 else distinct
            while at < distinct and tokens[at] != token:
                at += 1
            if at == distinct:
                tokens[at], counts[at] = token, 0
                distinct += 1
        counts[at] += 1
    return distinct
