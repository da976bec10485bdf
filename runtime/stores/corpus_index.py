"""The corpus index: sharded suffix arrays of a tokenized corpus, and the suffix ranges tracked for draft-tree nodes.

A suffix array holds the positions of all tokens, sorted by the text that starts there. All matches of a context are
adjacent and sorted by continuation, so a single pass over them builds the tree of continuations with counts.

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

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hdtool.data.documents import token_type
from hdtool.data.errors import StoreError
from hdtool.data.stores.kinds import CORPUS_KIND
from hdtool.runtime.core.tree import LARGEST_TREE
from hdtool.runtime.kernels.compiled import Ints, Uncopyable, array_at, compiled
from hdtool.runtime.stores.built_store import BuiltStore
from hdtool.runtime.stores.mapped_files import documents_of, mapped_part
from hdtool.runtime.stores.suffix_search import (
    PREFIX,
    PREFIX_TOKENS,
    SUFFIX,
    SUFFIXES,
    TOKEN,
    TOKENS,
    ShardExtent,
    Shards,
    find_longest,
    head_range,
    narrow_range,
    read_followers,
    sample_index,
    sample_matches,
    sample_step,
    sampled_prefixes_in,
    shards_at,
)

MAX_RANGE_ORDER = 6
MAX_SAMPLES = 64
MIN_SAMPLES = 16
"""Maximum and minimum number of followers to sample from a range; if a range has fewer, all are read."""
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


class CorpusSearch(Uncopyable):
    """Finds the suffix ranges that match the end of a context, as the default drafter does at a draft tree's root."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._record, self._bounds = range_record(shards)
        self._tokens, self._counts = np.empty(MAX_SAMPLES, np.int64), np.empty(MAX_SAMPLES, np.int64)

    def read(self, context: Sequence[int] | Ints) -> None:
        """Find the suffix ranges that match the end of a context, for every n-gram order."""
        self._bounds[0], self._record["read"][0] = 0, 0
        for stop in range(max(1, len(context) - MAX_RANGE_ORDER + 1), len(context) + 1):
            self.look_up(np.array(context[max(0, stop - MAX_RANGE_ORDER) : stop], np.int64))

    def look_up(self, tail: Ints) -> None:
        """Extend the context by the last token of ``tail``, and read the tokens after the matches of every order."""
        look_up(self._shards.tokens, self._record, tail)

    def followers(self, order: int) -> tuple[int, dict[int, int]]:
        """Return how often the last ``order`` tokens occur, and the count of each token that follows them.

        The counts are estimates if only a sample of the followers was read.
        """
        ranges = self._record[0]
        num_matches, distinct = size_of(ranges, 0, order), count_followers(ranges, 0, order, self._tokens, self._counts)
        read = max(1, int(ranges["read"][0, order]))
        counts = (self._counts[:distinct] * num_matches // read).tolist()
        return num_matches, dict(zip(self._tokens[:distinct].tolist(), counts, strict=True))


@compiled
def look_up(corpus: Ints, record: Ints, tail: Ints) -> None:
    """Extend the root's matches by the last token of ``tail``, in place, and read the tokens after the new matches."""
    ranges = record[0]
    for order in range(MAX_RANGE_ORDER, 0, -1):
        narrow(corpus, ranges, tail, 0, 0, order)
    for order in range(MAX_RANGE_ORDER, 0, -1):
        found = size_of(ranges, 0, order)
        if found > 0:
            read_samples(corpus, ranges, 0, order, found, MAX_SAMPLES)


MAX_CONTEXT_TOKENS = 16
CONTINUATION_DEPTH = 10
MATCH_SAMPLES = 128
NODE_TOKEN, NODE_PARENT, NODE_COUNT = range(3)
INT64 = np.dtype(np.int64)  # NumPy handles a dtype four times as fast as a class


class Continuations(NamedTuple):
    """Tree of the tokens that follow a context's longest suffix found in the corpus, most frequent first."""

    matched: int
    """Length of the suffix in tokens."""
    num_matches: int
    """Number of occurrences of the suffix."""
    nodes: Ints
    """Array ``[3, nodes]`` of tokens, parents (-1 at the top level) and counts; parents precede their children."""

    @property
    def tokens(self) -> Any:
        return self.nodes[NODE_TOKEN]

    @property
    def parents(self) -> Any:
        return self.nodes[NODE_PARENT]

    @property
    def counts(self) -> Any:
        """Number of matches that continue with the path to each node; estimated if the matches were sampled."""
        return self.nodes[NODE_COUNT]


class CorpusIndex(BuiltStore):
    """A corpus index opened for lookups."""

    kind = CORPUS_KIND

    def _map_files(self) -> None:
        self.end = self.manifest.tokenizer.vocab_size
        """Id of the end token after each document, which is the size of the vocabulary."""
        self.shards = Shards(
            tokens=documents_of(self.folder, self.manifest),
            suffixes=self._part("suffixes", np.uint32).reshape(-1),
            heads=self._part("heads", np.uint32, self.end + 1),
            sampled_prefixes=self._part("signposts", token_type(self.end), PREFIX_TOKENS),
            extents=np.array(self._part("shards", np.int64, len(ShardExtent._fields))),
        )
        self._check_shards()
        self.tokens, self.addresses = self.shards.tokens, self.shards.addresses()

    @property
    def documents(self) -> Ints:
        """Tokens of all documents, each document followed by an end token."""
        return self.tokens

    def _part(self, part: str, kind: npt.DTypeLike, width: int = 1) -> Ints:
        return mapped_part(self.folder, self.manifest, part, kind, width)

    def _check_shards(self) -> None:
        """Raise StoreError unless the shards fill the files without gaps, so that lookups stay within the files."""
        extents = self.shards.extents
        sizes = np.stack([extents[:, TOKENS], extents[:, SUFFIXES], sampled_prefixes_in(extents[:, SUFFIXES])])
        starts = extents[:, [TOKEN, SUFFIX, PREFIX]].T
        files = (len(self.shards.tokens), len(self.shards.suffixes), len(self.shards.sampled_prefixes))
        # End tokens have no suffix, so a shard has fewer suffixes than tokens.
        filled = (extents[:, SUFFIXES] < extents[:, TOKENS]).all()
        tiled = filled and extents.min() >= 0 and np.array_equal(starts, np.cumsum(sizes, axis=1) - sizes)
        if not tiled or tuple(sizes.sum(axis=1)) != files or len(self.shards.heads) != len(extents):
            raise StoreError(f"{self.folder} is damaged (its shards do not fit its files): build it again")

    def after(self, context: Sequence[int] | Ints, max_nodes: int = LARGEST_TREE) -> Continuations:
        """Return continuations of the longest suffix of the last ``MAX_CONTEXT_TOKENS`` tokens found in the corpus."""
        tail = np.asarray(context[-MAX_CONTEXT_TOKENS:], INT64)
        # Constructing it from a tuple instead of fields saves a quarter of a microsecond.
        return tuple.__new__(Continuations, lookup(self.tokens, self.addresses, tail, self.end, max_nodes))


@compiled
def lookup(tokens: Ints, addresses: Ints, tail: Ints, end: int, max_nodes: int) -> tuple[int, int, Ints]:
    """Return the fields of ``Continuations`` for the longest suffix of ``tail`` that occurs in the corpus.

    The tree has at most ``max_nodes`` nodes.
    """
    shards = shards_at(tokens, addresses)
    matched, ranges = find_longest(shards, tail)
    num_matches = (ranges[:, 1] - ranges[:, 0]).sum()
    matches = np.empty((2, min(num_matches, MATCH_SAMPLES)), np.int64)
    sample_matches(shards, ranges, matched, num_matches, matches)
    continuations = np.empty((CONTINUATION_DEPTH, matches.shape[1]), np.int32)
    # Depth by depth: the first depth waits for memory once for all matches, the others are cache hits.
    for depth in range(CONTINUATION_DEPTH):
        read_followers(shards, matches, depth, continuations[depth])
    if len(ranges) > 1:
        continuations = _sorted_continuations(continuations)
    nodes = _tree(continuations, end, max_nodes)
    if num_matches > MATCH_SAMPLES:
        for node in range(nodes.shape[1]):
            nodes[NODE_COUNT, node] = nodes[NODE_COUNT, node] * num_matches // MATCH_SAMPLES
    return matched, num_matches, nodes


@compiled
def _sorted_continuations(continuations: Ints) -> Ints:
    """Return the continuations, one per column, in lexicographic order.

    Insertion sort is used, as the columns of each shard are already sorted.
    """
    count = continuations.shape[1]
    order = np.empty(count, np.int64)
    for column in range(count):
        low, high = 0, column
        while low < high:
            middle = (low + high) >> 1
            if _precedes(continuations, column, order[middle]):
                high = middle
            else:
                low = middle + 1
        for at in range(column, low, -1):
            order[at] = order[at - 1]
        order[low] = column
    return continuations[:, order]


@compiled
def _precedes(continuations: Ints, left: int, right: int) -> bool:
    for depth in range(len(continuations)):
        if continuations[depth, left] != continuations[depth, right]:
            return bool(continuations[depth, left] < continuations[depth, right])
    return False


@compiled
def _tree(continuations: Ints, end: int, max_nodes: int) -> Ints:
    """Return the ``max_nodes`` most frequent nodes of the tree of sorted continuations.

    Nodes shared by several continuations are built and sorted by count first. Nodes of a single continuation, which are
    the majority but rarely accepted, then fill the remaining space in the order of the continuations.
    """
    max_depth, samples = continuations.shape
    shared = _shared_lengths(continuations, end)
    grown = np.empty((3, samples * max_depth), np.int64)
    path = np.empty(max_depth + 1, np.int64)  # nodes of the previous continuation, which shares a prefix with the next
    path[0] = -1
    last = np.empty(samples, np.int64)  # deepest shared node of each continuation
    size = 0
    for column in range(samples):
        for depth in range(shared[column]):
            grown[NODE_COUNT, path[depth + 1]] += 1
        for depth in range(shared[column], shared[column + 1]):
            grown[NODE_TOKEN, size] = continuations[depth, column]
            grown[NODE_PARENT, size] = path[depth]
            grown[NODE_COUNT, size] = 1
            path[depth + 1] = size
            size += 1
        last[column] = path[max(shared[column], shared[column + 1])]
    nodes = np.empty((3, max_nodes), np.int64)
    moved = _by_count(grown[:, :size], samples, nodes)
    kept = min(size, max_nodes)
    for column in range(samples):
        if kept == max_nodes:
            break
        parent = moved[last[column]]
        for depth in range(max(shared[column], shared[column + 1]), max_depth):
            if kept == max_nodes or continuations[depth, column] == end:
                break
            nodes[NODE_TOKEN, kept] = continuations[depth, column]
            nodes[NODE_PARENT, kept] = parent
            nodes[NODE_COUNT, kept] = 1
            parent = kept
            kept += 1
    return nodes[:, :kept]


@compiled
def _shared_lengths(continuations: Ints, end: int) -> Ints:
    """Return how many leading tokens each continuation shares with the previous one.

    The first entry is 0, and so is an extra entry at the end.
    """
    max_depth, samples = continuations.shape
    shared, alike = np.zeros(samples + 1, np.int32), np.ones(samples + 1, np.int32)
    for depth in range(max_depth):
        for column in range(1, samples):
            token = continuations[depth, column]
            alike[column] &= (token == continuations[depth, column - 1]) & (token != end)
            shared[column] += alike[column]
    return shared


@compiled
def _by_count(grown: Ints, max_count: int, nodes: Ints) -> Ints:
    """Write to ``nodes`` the ``grown`` nodes that fit, highest count first; return each ``grown`` node's new index.

    No count exceeds ``max_count``. The result maps -1, the parent of top-level nodes, to -1. A counting sort takes a
    single pass and is stable: since a parent's count is at least its child's, parents remain before their children.
    """
    size, max_nodes = grown.shape[1], nodes.shape[1]
    starts = np.zeros(max_count + 2, np.int32)  # for each count, the new index of the first node with this count
    for node in range(size):
        starts[grown[NODE_COUNT, node]] += 1
    first = 0
    for count in range(max_count, 0, -1):
        same = starts[count]
        starts[count] = first
        first += same
    moved = np.full(size + 1, -1, np.int64)
    for node in range(size):
        to = starts[grown[NODE_COUNT, node]]
        starts[grown[NODE_COUNT, node]] += 1
        moved[node] = to
        if to < max_nodes:
            nodes[NODE_TOKEN, to] = grown[NODE_TOKEN, node]
            nodes[NODE_PARENT, to] = moved[grown[NODE_PARENT, node]]
            nodes[NODE_COUNT, to] = grown[NODE_COUNT, node]
    return moved
