"""The corpus index: sharded suffix arrays of a tokenized corpus.

A suffix array holds the positions of all tokens but end tokens, sorted by the text that starts there. All matches of a
context are adjacent and sorted by continuation, so the tree of continuations with counts is built from ranges of
adjacent matches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hdtool.data.documents import token_type
from hdtool.data.errors import StoreError
from hdtool.data.stores.kinds import CORPUS_KIND
from hdtool.runtime.core.tree import LARGEST_TREE, ROOT
from hdtool.runtime.kernels.best_first import insert_best
from hdtool.runtime.kernels.compiled import Ints, compiled
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
    read_followers,
    sample_matches,
    sampled_prefixes_in,
    shards_at,
)

MAX_CONTEXT_TOKENS = 16
CONTINUATION_DEPTH = 10
MATCH_SAMPLES = 128
NODE_TOKEN, NODE_PARENT, NODE_COUNT = range(3)
SCORE_UNIT = 1 << 16
"""Upper bound on a node's place: its depth, plus the maximum depth times the index of its first continuation."""
INT64 = np.dtype(np.int64)  # NumPy handles a dtype four times as fast as a class


class Continuations(NamedTuple):
    """Tree of the tokens that follow a context's longest suffix that the corpus contains, most frequent nodes first."""

    matched: int
    """Length of the matched suffix in tokens."""
    num_matches: int
    """Number of occurrences of the matched suffix."""
    tokens: Ints
    """Token of each node."""
    parents: Ints
    """Index of each node's parent, which precedes the node; ``ROOT`` at the top level."""
    counts: Ints
    """Number of matches that continue with the path to each node; estimated if the matches were sampled."""


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
        """Return the most frequent continuations of the longest suffix of ``context`` that occurs in the corpus.

        At most ``MAX_CONTEXT_TOKENS`` tokens are matched, and at most ``max_nodes`` nodes returned.
        """
        tail = np.asarray(context[-MAX_CONTEXT_TOKENS:], INT64)
        matched, num_matches, nodes = lookup(self.tokens, self.addresses, tail, self.end, max_nodes)
        return Continuations(matched, num_matches, *nodes)


@compiled
def lookup(tokens: Ints, addresses: Ints, tail: Ints, end: int, max_nodes: int) -> tuple[int, int, Ints]:
    """Look up the longest suffix of ``tail`` that occurs in the corpus; return the fields of ``Continuations``.

    The last three fields are the rows of one array, with at most ``max_nodes`` columns.
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
    """Return up to ``max_nodes`` nodes of the tree of sorted continuations, most frequent first.

    A node stands for adjacent continuations that begin alike. Ties go to the nodes of earlier continuations, so that a
    small tree has a few whole paths instead of the beginnings of many. The rows of the result are the nodes' tokens,
    parents and counts.
    """
    max_depth, samples = continuations.shape
    scores, keys = np.empty(max_nodes, np.int64), np.empty(max_nodes, np.int64)
    size, node, depth, column, stop = 0, ROOT, 0, 0, samples
    while True:
        while column < stop and depth < max_depth:
            first, token = column, continuations[depth, column]
            while column < stop and continuations[depth, column] == token:
                column += 1
            if token != end:
                score, key = (column - first) * SCORE_UNIT - (first * max_depth + depth), first * max_depth + depth
                size = insert_best(scores, keys, score, (node + 1) * SCORE_UNIT + key, node + 1, size, max_nodes)
        node += 1
        if node == size:
            break
        column, depth = divmod(keys[node] % SCORE_UNIT, max_depth)
        depth, stop = depth + 1, column + count_in(scores[node])
    nodes = np.empty((3, size), np.int64)
    for node in range(size):
        first, depth = divmod(keys[node] % SCORE_UNIT, max_depth)
        nodes[NODE_TOKEN, node], nodes[NODE_PARENT, node] = continuations[depth, first], keys[node] // SCORE_UNIT - 1
        nodes[NODE_COUNT, node] = count_in(scores[node])
    return nodes


@compiled
def count_in(score: Any) -> int:
    """Return the count of a node from its score, which is ``SCORE_UNIT`` times the count, less the node's place."""
    return -(-score // SCORE_UNIT)  # type: ignore[no-any-return]
