"""What the corpus index knows at a node of a growing tree.

For each node and order, all places of the corpus that end with the node's last so many tokens are a
range of suffixes in each shard. The range of a child is a part of its parent's of the order below,
so no search ever starts from scratch; the root's ranges are moved on by the tokens that are emitted.

Of a range a few followers are read, evenly spread. As its suffixes are sorted, so are the followers,
and they also tell, exactly or within a few suffixes, where the range of each child lies.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from hdtool.runtime.kernels.raw_memory import array_at
from hdtool.runtime.stores.suffix_search import (
    SIGNPOST_TOKENS,
    SUFFIX,
    SUFFIXES,
    TOKEN,
    TOKENS,
    Shards,
    boundary,
    shards_at,
)
from hdtool.runtime.tree import LARGEST_TREE

LONGEST_RANGE = 6
SAMPLES = 64
FEWEST_SAMPLES = 16
"""Read of a range: the most, and the fewest where there are as many."""
ROWS = LARGEST_TREE + 1
LOW, HIGH = range(2)
FAR = 1024
"""In a wider stretch signposts show the way."""
FIRST_STRIDE = 8

RANGES = np.dtype(
    [
        # By node, row 0 being the root, and order.
        ("samples", np.int32, (ROWS, LONGEST_RANGE + 1, SAMPLES)),  # by shard and suffix; ends of documents, too
        ("read", np.int64, (ROWS, LONGEST_RANGE + 1)),  # how many samples there are; 0 before they are read
        ("lowest", np.int64, ROWS),  # the ranges of lower orders were not worth a look-up
        ("at", np.int64),  # address of the ranges of suffixes, by node, order and shard
        ("shards", np.int64, (5, 3)),  # addresses of the index
    ],
    align=True,
)

Ints = npt.NDArray[Any]


def no_shards() -> Shards:
    """A corpus of nothing."""
    tokens = np.empty(0, np.uint16)
    tokens.flags.writeable = False
    heads, signposts = np.empty((0, 1), np.uint32), np.empty((0, SIGNPOST_TOKENS), np.uint16)
    return Shards(tokens, np.empty(0, np.uint32), heads, signposts, np.empty((0, 5), np.int64))


def range_record(shards: Shards) -> tuple[Ints, Ints]:
    """Memory for the ranges of a tree and the places that it points to; these and the shards must outlive it."""
    record = np.zeros(1, RANGES)
    places = np.zeros((ROWS, LONGEST_RANGE + 1, len(shards.places), 2), np.int64)
    record["lowest"] = 1
    record["at"], record["shards"] = places.ctypes.data, shards.addresses()
    return record, places


@njit(cache=True, nogil=True)
def places_of(ranges: Any) -> Ints:
    """The ranges of suffixes by node, order and shard."""
    return array_at(ranges.at, (ROWS, LONGEST_RANGE + 1, ranges.shards[4, 1], 2), np.int64)


@njit(cache=True, nogil=True)
def narrow(corpus: Ints, ranges: Any, tail: Ints, node: int, above: int, order: int) -> None:
    """The ranges of ``node``, whose last tokens are in ``tail``, out of those of its parent of the order below."""
    shards, places = shards_at(corpus, ranges.shards), places_of(ranges)
    token = tail[len(tail) - 1]
    known = 0 <= token < shards.heads.shape[1] - 1 and (order == 1 or order - 1 >= ranges.lowest[above])
    found = size_of(ranges, above, order - 1) if known and order > 1 else 0
    turn, before = 0, 0
    for shard in range(len(shards.places)):
        low: Any = np.int64(0)
        high: Any = np.int64(0)
        if known and order == 1:
            low, high = _headed(shards, shard, token)
        elif known:
            start = places[above, order - 1, shard, LOW]
            size = places[above, order - 1, shard, HIGH] - start
            low, first, last, high, turn = _bracket(ranges, above, order - 1, found, before, size, turn, token)
            if ranges.read[above, order - 1] < found:
                low, high = _between(shards, shard, tail, order, start + low, start + first, start + last, start + high)
            else:
                low, high = start + low, start + high
            before += size
        places[node, order, shard, LOW], places[node, order, shard, HIGH] = low, high
    ranges.read[node, order] = 0


@njit(cache=True, nogil=True)
def size_of(ranges: Any, node: int, order: int) -> int:
    """How many places a range has in all shards."""
    places, size = places_of(ranges), 0
    for shard in range(places.shape[2]):
        size += places[node, order, shard, HIGH] - places[node, order, shard, LOW]
    return size


@njit(cache=True, nogil=True)
def _headed(shards: Shards, shard: int, token: int) -> tuple[int, int]:
    """The suffixes that start with a token; of a damaged file at worst none, never one behind the last."""
    low = min(np.int64(shards.heads[shard, token]), shards.places[shard, SUFFIXES])
    return low, max(low, min(np.int64(shards.heads[shard, token + 1]), shards.places[shard, SUFFIXES]))


@njit(cache=True, nogil=True)
def _bracket(
    ranges: Any, node: int, order: int, found: int, before: int, size: int, turn: int, token: int
) -> tuple[int, int, int, int, int]:
    """Where in a shard's part of a range the samples allow ``token``: it begins from ``low`` to ``first``, and
    ends from ``last`` to ``high``. And the first sample of the next shard.

    The part begins ``before`` places into the whole of ``found``. If all places were read, low and high are exact.
    """
    low, first, last, high = 0, size, 0, size
    read = ranges.read[node, order]
    step = (found << 16) // read if read else 0
    while turn < read and (turn * step >> 16) < before + size:
        at = (turn * step >> 16) - before
        sample = ranges.samples[node, order, turn]
        if sample < token:
            low = at + 1
        elif sample > token:
            high = min(high, at)
        else:
            first, last = min(first, at), at + 1
        turn += 1
    # In a damaged file nothing is in order, but no bracket may be turned round.
    high = max(low, high)
    return low, min(max(low, first), high), min(max(low, last), high), high, turn


@njit(cache=True, nogil=True)
def _between(
    shards: Shards, shard: int, tail: Ints, order: int, low: int, first: int, last: int, high: int
) -> tuple[int, int]:
    """The suffixes, of a parent's range, that go on with the last token, given its bracket."""
    token = tail[len(tail) - 1]
    if first - low > FAR:
        low = boundary(shards, shard, tail, order, low, first, False)
    else:
        low = _bisect(shards, shard, order - 1, low, first, token)
    if last <= low:
        # No sample has it, so it is rare if it is there at all: look for the end in growing strides.
        if low >= high or _follower(shards, shard, order - 1, low) != token:
            return low, low
        stride, last = FIRST_STRIDE, low + 1
        while last + stride < high and _follower(shards, shard, order - 1, last + stride - 1) == token:
            last += stride
            stride *= 4
        high = min(high, last + stride)
    return low, _bisect(shards, shard, order - 1, last, high, token + 1)


@njit(cache=True, nogil=True)
def _bisect(shards: Shards, shard: int, order: int, low: Any, high: Any, token: Any) -> Any:
    """The first suffix of a range of an order that goes on with ``token`` or a larger one."""
    while low < high:
        middle = (low + high) >> 1
        if _follower(shards, shard, order, middle) < token:
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True, nogil=True)
def _follower(shards: Shards, shard: int, order: int, suffix: Any) -> Any:
    """What follows the first ``order`` tokens of a suffix; of a damaged file at worst the last token of the shard."""
    place = np.int64(shards.suffixes[shards.places[shard, SUFFIX] + suffix]) + order
    return np.int64(shards.tokens[shards.places[shard, TOKEN] + min(place, shards.places[shard, TOKENS] - 1)])


@njit(cache=True, nogil=True)
def read_samples(corpus: Ints, ranges: Any, node: int, order: int, found: int, most: int) -> None:
    """Read up to ``most`` followers of a range of ``found`` places."""
    shards, places = shards_at(corpus, ranges.shards), places_of(ranges)
    read = min(found, most)
    step = (found << 16) // read
    samples = ranges.samples[node, order]
    turn, before = 0, 0
    for shard in range(len(shards.places)):
        low, high = places[node, order, shard, LOW], places[node, order, shard, HIGH]
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
def tally(ranges: Any, node: int, order: int, tokens: Ints, counts: Ints) -> int:
    """The different tokens among the samples and how often each is there; how many they are."""
    end, distinct, at = ranges.shards[2, 2] - 1, 0, 0
    for turn in range(ranges.read[node, order]):
        token = np.int64(ranges.samples[node, order, turn])
        if token == end:
            continue
        if distinct == 0 or tokens[at] != token:
            # Within a shard equals stand together; another shard may have had the token before.
            at = 0 if ranges.shards[4, 1] > 1 else distinct
            while at < distinct and tokens[at] != token:
                at += 1
            if at == distinct:
                tokens[at], counts[at] = token, 0
                distinct += 1
        counts[at] += 1
    return distinct
