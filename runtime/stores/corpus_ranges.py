"""The search of the corpus index that the hierarchy drafts with, and that ``inspect`` shows and times.

For each node and n-gram order, the matches of the node's last so many tokens are a range of suffixes in
each shard. The range of a child lies within its parent's of the order below, so no search starts from the
heads table but that of order 1; the root's ranges are narrowed by the tokens that are emitted.

Where a node needed no lower order than the longest, its children have no range of a lower order to lie within. They
lie within its longest one, if all followers of that were read: then text that the corpus holds word for word is
followed as far as it goes.

A few followers of a range are sampled, evenly spread. As its suffixes are sorted, so are the followers,
and they give the range of each child, exactly or within a few suffixes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from hdtool.runtime.kernels.compiled import Ints, compiled
from hdtool.runtime.kernels.memory.no_copy import Pinned
from hdtool.runtime.kernels.memory.raw_memory import array_at
from hdtool.runtime.stores.suffix_search import (
    PREFIX_TOKENS,
    Shards,
    headed,
    narrowed,
    read_followers,
    sample_matches,
    sample_step,
    sampled,
    shards_at,
)
from hdtool.runtime.tree import LARGEST_TREE

LONGEST_RANGE = 6
SAMPLES = 64
FEWEST_SAMPLES = 16
"""The most followers that are sampled of a range, and the fewest of one that has as many."""
ROWS = LARGEST_TREE + 1
LOW, HIGH = range(2)

RANGES = np.dtype(
    [
        # By node, row 0 being the root, and order.
        ("samples", np.int32, (ROWS, LONGEST_RANGE + 1, SAMPLES)),  # by shard and suffix; end tokens, too
        ("read", np.int64, (ROWS, LONGEST_RANGE + 1)),  # the number of samples; 0 before they are read
        ("beyond", np.int64, ROWS),  # tokens that the range of the longest order matches besides its order
        ("lowest", np.int64, ROWS),  # the ranges of lower orders were not worth a lookup
        ("matches", np.int64, (2, SAMPLES)),  # of the range that is sampled
        ("at", np.int64),  # address of the ranges of suffixes, by node, order and shard
        ("shards", np.int64, (5, 3)),  # addresses of the index
    ],
    align=True,
)


@cache
def no_shards() -> Shards:
    """The shards of an empty corpus, which all drafters without an index share."""
    tokens = np.empty(0, np.uint16)
    tokens.flags.writeable = False
    heads, sampled_prefixes = np.empty((0, 1), np.uint32), np.empty((0, PREFIX_TOKENS), np.uint16)
    return Shards(tokens, np.empty(0, np.uint32), heads, sampled_prefixes, np.empty((0, 5), np.int64))


def range_record(shards: Shards) -> tuple[Ints, Ints]:
    """Memory for the ranges of a tree and the places that it points to; these and the shards must outlive it."""
    record = np.zeros(1, RANGES)
    places = np.zeros((ROWS, LONGEST_RANGE + 1, len(shards.places), 2), np.int64)
    record["lowest"] = 1
    record["at"], record["shards"] = places.ctypes.data, shards.addresses()
    return record, places


@compiled
def places_of(ranges: Any) -> Ints:
    """The ranges of suffixes by node, order and shard."""
    return array_at(ranges.at, (ROWS, LONGEST_RANGE + 1, ranges.shards[4, 1], 2), np.int64)


@compiled
def narrow(corpus: Ints, ranges: Any, tail: Ints, node: int, above: int, order: int) -> None:
    """The ranges of ``node``, whose last tokens are ``tail``, within those of its parent of the order below.

    If there is none, that of the longest order lies within its parent's longest.
    """
    shards, places = shards_at(corpus, ranges.shards), places_of(ranges)
    token = tail[len(tail) - 1]
    follows = order == LONGEST_RANGE and only_longest(ranges, above)
    below = order if follows else order - 1
    known = 0 <= token < shards.heads.shape[1] - 1 and (order == 1 or below >= ranges.lowest[above])
    found = size_of(ranges, above, below) if known and order > 1 else 0
    sample, before = 0, 0
    for shard in range(len(shards.places)):
        low: Any = np.int64(0)
        high: Any = np.int64(0)
        if known and order == 1:
            low, high = headed(shards, shard, token)
        elif known:
            start = places[above, below, shard, LOW]
            size = places[above, below, shard, HIGH] - start
            low, first, last, high, sample = _bracket(ranges, above, below, found, before, size, sample, token)
            if ranges.read[above, below] < found:
                low, high = narrowed(shards, shard, tail, order, start + low, start + first, start + last, start + high)
            else:
                low, high = start + low, start + high
            before += size
        places[node, order, shard, LOW], places[node, order, shard, HIGH] = low, high
    ranges.read[node, order] = 0
    if order == LONGEST_RANGE:
        ranges.beyond[node] = ranges.beyond[above] + 1 if follows else 0


@compiled
def only_longest(ranges: Any, node: int) -> bool:
    """Whether a node has no range but that of the longest order, of which all followers were read."""
    if ranges.lowest[node] > LONGEST_RANGE:
        return False
    if ranges.lowest[node] < LONGEST_RANGE and size_of(ranges, node, LONGEST_RANGE - 1) > 0:
        return False
    found = size_of(ranges, node, LONGEST_RANGE)
    return bool(0 < found == ranges.read[node, LONGEST_RANGE])


@compiled
def size_of(ranges: Any, node: int, order: int) -> int:
    """The number of matches in a range, over all shards."""
    places, size = places_of(ranges), 0
    for shard in range(places.shape[2]):
        size += places[node, order, shard, HIGH] - places[node, order, shard, LOW]
    return size


@compiled
def _bracket(
    ranges: Any, node: int, order: int, found: int, before: int, size: int, sample: int, token: int
) -> tuple[int, int, int, int, int]:
    """Where in a shard's part of a range the samples allow ``token``: it begins from ``low`` to ``first``, and
    ends from ``last`` to ``high``. The last value is the first sample of the next shard.

    The part begins ``before`` matches into the whole of ``found``. If all matches were read, low and high are exact.
    """
    low, first, last, high = 0, size, 0, size
    read = ranges.read[node, order]
    step = sample_step(found, read)
    while sample < read and sampled(sample, step) < before + size:
        at, follower = sampled(sample, step) - before, ranges.samples[node, order, sample]
        if follower < token:
            low = at + 1
        elif follower > token:
            high = min(high, at)
        else:
            first, last = min(first, at), at + 1
        sample += 1
    # The samples of a damaged file are in no order, but a bracket never ends before it begins.
    high = max(low, high)
    return low, min(max(low, first), high), min(max(low, last), high), high, sample


@compiled
def read_samples(corpus: Ints, ranges: Any, node: int, order: int, found: int, most: int) -> None:
    """Read up to ``most`` followers of a range of ``found`` matches."""
    shards = shards_at(corpus, ranges.shards)
    read = min(found, most)
    matches = ranges.matches[:, :read]
    length = order + ranges.beyond[node] if order == LONGEST_RANGE else order
    sample_matches(shards, places_of(ranges)[node, order], length, found, matches)
    read_followers(shards, matches, 0, ranges.samples[node, order])
    ranges.read[node, order] = read


@compiled
def tally(ranges: Any, node: int, order: int, tokens: Ints, counts: Ints) -> int:
    """Count the samples of each token; the number of different tokens."""
    end, distinct, at = ranges.shards[2, 2] - 1, 0, 0
    for sample in range(ranges.read[node, order]):
        token = np.int64(ranges.samples[node, order, sample])
        if token == end:
            continue
        if distinct == 0 or tokens[at] != token:
            # Within a shard equals stand together; an earlier shard may have had the token.
            at = 0 if ranges.shards[4, 1] > 1 else distinct
            while at < distinct and tokens[at] != token:
                at += 1
            if at == distinct:
                tokens[at], counts[at] = token, 0
                distinct += 1
        counts[at] += 1
    return distinct


class CorpusSearch(Pinned):
    """The ranges at the end of one context, as the hierarchy has them at the root of its trees."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._record, self._places = range_record(shards)
        self._tokens, self._counts = np.empty(SAMPLES, np.int64), np.empty(SAMPLES, np.int64)

    def read(self, context: Sequence[int] | Ints) -> None:
        """Move to the end of a context."""
        self._places[0], self._record["read"][0] = 0, 0
        for stop in range(max(1, len(context) - LONGEST_RANGE + 1), len(context) + 1):
            self.look_up(np.array(context[max(0, stop - LONGEST_RANGE) : stop], np.int64))

    def look_up(self, tail: Ints) -> None:
        """Move on by the last token of ``tail``, and read the followers of all orders."""
        look_up(self._shards.tokens, self._record, tail)

    def followers(self, order: int) -> tuple[int, dict[int, int]]:
        """How often the last ``order`` tokens occur, and how often each token follows; estimated if many do."""
        ranges = self._record[0]
        found, distinct = size_of(ranges, 0, order), tally(ranges, 0, order, self._tokens, self._counts)
        read = max(1, int(ranges["read"][0, order]))
        counts = (self._counts[:distinct] * found // read).tolist()
        return found, dict(zip(self._tokens[:distinct].tolist(), counts, strict=True))


@compiled
def look_up(corpus: Ints, record: Ints, tail: Ints) -> None:
    """Narrow the ranges of the root by the last token of ``tail``, in place, and read their followers."""
    ranges = record[0]
    for order in range(LONGEST_RANGE, 0, -1):
        narrow(corpus, ranges, tail, 0, 0, order)
    for order in range(LONGEST_RANGE, 0, -1):
        found = size_of(ranges, 0, order)
        if found > 0:
            read_samples(corpus, ranges, 0, order, found, SAMPLES)
