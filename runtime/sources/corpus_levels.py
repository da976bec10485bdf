"""What the corpus index knows at a node of a growing tree.

For each node and order, all places of the corpus that end with the node's last so many tokens are a
range of suffixes in each shard. The range of a child is a part of its parent's of the order below,
so no search ever starts from scratch; the root's ranges are moved on by the tokens that are emitted.

Of a range a few followers are read, evenly spread. As its suffixes are sorted, so are the followers,
and they also tell, exactly or within a few suffixes, where the range of each child lies.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from hdtool.runtime.suffixes import SIGNPOST_TOKENS, SUFFIX, SUFFIXES, TOKEN, TOKENS, Shards, boundary, starts_with

LONGEST_RANGE = 6
SAMPLES = 64
LOW, HIGH = range(2)

Ints = npt.NDArray[Any]


class Ranges(NamedTuple):
    """By node and order, where the corpus says what the node's last tokens say, and what follows there."""

    places: Ints
    """By shard, too: the range of suffixes."""
    samples: Ints
    """Followers, in the order of the shards and of their suffixes; an end where a document ends."""
    read: Ints
    """How many samples there are; 0 before they are read."""
    lowest: Ints
    """By node alone: the ranges of lower orders were not worth a look-up."""


def no_shards() -> Shards:
    """A corpus of nothing."""
    tokens = np.empty(0, np.uint16)
    tokens.flags.writeable = False
    heads, signposts = np.empty((0, 1), np.uint32), np.empty((0, SIGNPOST_TOKENS), np.uint16)
    return Shards(tokens, np.empty(0, np.uint32), heads, signposts, np.empty((0, 5), np.int64))


def new_ranges(nodes: int, shards: int) -> Ranges:
    return Ranges(
        places=np.zeros((nodes, LONGEST_RANGE + 1, shards, 2), np.int64),
        samples=np.zeros((nodes, LONGEST_RANGE + 1, SAMPLES), np.int32),
        read=np.zeros((nodes, LONGEST_RANGE + 1), np.int64),
        lowest=np.ones(nodes, np.int64),
    )


@njit(cache=True, nogil=True)
def narrow(shards: Shards, ranges: Ranges, tail: Ints, node: int, above: int, order: int) -> None:
    """The ranges of ``node``, whose last tokens are in ``tail``, out of those of its parent of the order below."""
    token = tail[len(tail) - 1]
    known = 0 <= token < shards.heads.shape[1] - 1 and (order == 1 or order - 1 >= ranges.lowest[above])
    found = size_of(ranges, above, order - 1) if known and order > 1 else 0
    turn, before = 0, 0
    for shard in range(len(shards.places)):
        low = high = np.int64(0)
        if known and order == 1:
            low, high = _headed(shards, shard, token)
        elif known:
            start, stop = ranges.places[above, order - 1, shard]
            low, high, turn = _bracket(ranges, above, order - 1, found, before, stop - start, turn, token)
            low, high, before = low + start, high + start, before + stop - start
            if ranges.read[above, order - 1] < found and low < high:
                low, high = _between(shards, shard, tail, order, low, high)
        ranges.places[node, order, shard, LOW], ranges.places[node, order, shard, HIGH] = low, high
    ranges.read[node, order] = 0


@njit(cache=True, nogil=True)
def size_of(ranges: Ranges, node: int, order: int) -> int:
    """How many places a range has in all shards."""
    size = 0
    for shard in range(ranges.places.shape[2]):
        size += ranges.places[node, order, shard, HIGH] - ranges.places[node, order, shard, LOW]
    return size


@njit(cache=True, nogil=True)
def _headed(shards: Shards, shard: int, token: int) -> tuple[int, int]:
    """The suffixes that start with a token; of a damaged file at worst none, never one behind the last."""
    low = min(np.int64(shards.heads[shard, token]), shards.places[shard, SUFFIXES])
    return low, max(low, min(np.int64(shards.heads[shard, token + 1]), shards.places[shard, SUFFIXES]))


@njit(cache=True, nogil=True)
def _bracket(
    ranges: Ranges, node: int, order: int, found: int, before: int, size: int, turn: int, token: int
) -> tuple[int, int, int]:
    """Where in a shard's part of a range the samples allow ``token``, and the first sample of the next shard.

    The part begins ``before`` places into the whole of ``found``. If all places were read, this is exact.
    """
    low, high = 0, size
    read = ranges.read[node, order]
    step = (found << 16) // read if read else 0
    while turn < read and (turn * step >> 16) < before + size:
        at = (turn * step >> 16) - before
        sample = ranges.samples[node, order, turn]
        if sample < token:
            low = at + 1
        elif sample > token:
            high = min(high, at)
        turn += 1
    return low, max(low, high), turn


@njit(cache=True, nogil=True)
def _between(shards: Shards, shard: int, tail: Ints, order: int, low: int, high: int) -> tuple[int, int]:
    """The suffixes from ``low`` to ``high`` that start with the last ``order`` tokens."""
    first = boundary(shards, shard, tail, order, low, high, False)
    if first >= high or not starts_with(shards, shard, first, tail, order):
        return first, first
    return first, boundary(shards, shard, tail, order, first + 1, high, True)


@njit(cache=True, nogil=True)
def read_samples(shards: Shards, ranges: Ranges, node: int, order: int, found: int) -> None:
    """Read up to ``SAMPLES`` followers of a range of ``found`` places."""
    read = min(found, SAMPLES)
    step = (found << 16) // read
    samples = ranges.samples[node, order]
    turn, before = 0, 0
    for shard in range(len(shards.places)):
        low, high = ranges.places[node, order, shard]
        first = shards.places[shard, SUFFIX] + low - before
        start, last = shards.places[shard, TOKEN], shards.places[shard, TOKENS] - 1
        before += high - low
        # Nothing but loads: they all miss the caches, and without branches they wait together.
        while turn < read and (turn * step >> 16) < before:
            place = np.int64(shards.suffixes[first + (turn * step >> 16)]) + order
            samples[turn] = shards.tokens[start + min(place, last)]
            turn += 1
    end = np.int32(shards.heads.shape[1] - 1)
    for sample in range(read):
        # Of a damaged file: never a token that no model has. A token too large for the type is below 0.
        if not 0 <= samples[sample] < end:
            samples[sample] = end
    ranges.read[node, order] = read


@njit(cache=True, nogil=True)
def tally(shards: Shards, ranges: Ranges, node: int, order: int, tokens: Ints, counts: Ints) -> int:
    """The different tokens among the samples and how often each is there; how many they are."""
    end, distinct, at = shards.heads.shape[1] - 1, 0, 0
    for turn in range(ranges.read[node, order]):
        token = np.int64(ranges.samples[node, order, turn])
        if token == end:
            continue
        if distinct == 0 or tokens[at] != token:
            # Within a shard equals stand together; another shard may have had the token before.
            at = 0 if len(shards.places) > 1 else distinct
            while at < distinct and tokens[at] != token:
                at += 1
            if at == distinct:
                tokens[at], counts[at] = token, 0
                distinct += 1
        counts[at] += 1
    return distinct
