"""The corpus index: what follows the last tokens of a context in a corpus.

Shards of a tokenized corpus, each with a suffix array: the positions of all tokens, sorted by the text
from there on. All matches of a context lie side by side in it, sorted by their continuations, so one pass
over them grows the tree of continuations with its counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hdtool.data.errors import StoreError
from hdtool.data.stores.documents import token_type
from hdtool.data.stores.store import Manifest, TokenizerFingerprint, read_store, require
from hdtool.runtime.kernels.compiled import Ints, compiled
from hdtool.runtime.kernels.memory.no_copy import Pinned
from hdtool.runtime.stores.mapped_file import documents_of, mapped_part
from hdtool.runtime.stores.suffix_search import (
    PREFIX,
    PREFIX_TOKENS,
    SUFFIX,
    SUFFIXES,
    TOKEN,
    TOKENS,
    ShardPlace,
    Shards,
    find_longest,
    read_followers,
    sample_matches,
    sampled_prefixes_in,
    shards_at,
)
from hdtool.runtime.tree import LARGEST_TREE

KIND = "corpus"
LONGEST_CONTEXT = 16
DEPTH = 10
MATCH_SAMPLES = 128
NODE_TOKEN, NODE_PARENT, NODE_COUNT = range(3)
WIDE = np.dtype(np.int64)  # numpy takes a dtype four times as fast as a class


class Continuations(NamedTuple):
    """What follows the longest suffix of a context that the corpus holds: a tree with counts, most frequent first."""

    matched: int
    """Length of that suffix."""
    found: int
    """Number of its matches."""
    nodes: Ints
    """A column for each node; every parent stands before its children."""

    @property
    def tokens(self) -> Any:
        return self.nodes[NODE_TOKEN]

    @property
    def parents(self) -> Any:
        return self.nodes[NODE_PARENT]

    @property
    def counts(self) -> Any:
        """How often the path down to each node follows; estimated where the matches were sampled."""
        return self.nodes[NODE_COUNT]


class CorpusIndex(Pinned):
    """An index opened for lookups; its files are mapped, read only where they are touched."""

    def __init__(
        self, folder: Path, tokenizer: TokenizerFingerprint | None = None, manifest: Manifest | None = None
    ) -> None:
        """``manifest`` is that of the folder, if it was read already."""
        self.folder = folder
        if manifest:
            self._open(manifest, tokenizer)
        else:
            read_store(folder, lambda found: self._open(found, tokenizer))

    def _open(self, manifest: Manifest, tokenizer: TokenizerFingerprint | None) -> None:
        require(manifest, self.folder, KIND, tokenizer)
        self.manifest = manifest
        self.end = manifest.tokenizer.vocab_size
        """The token that closes a document."""
        self.shards = Shards(
            tokens=documents_of(self.folder, manifest),
            suffixes=self._part("suffixes", np.uint32).reshape(-1),
            heads=self._part("heads", np.uint32, self.end + 1),
            sampled_prefixes=self._part("signposts", token_type(self.end), PREFIX_TOKENS),
            places=np.array(self._part("shards", np.int64, len(ShardPlace._fields))),
        )
        self._check_shards()
        self.tokens, self.addresses = self.shards.tokens, self.shards.addresses()

    @property
    def documents(self) -> Ints:
        """All documents, an end after each."""
        return self.tokens

    def _part(self, part: str, kind: npt.DTypeLike, width: int = 1) -> Ints:
        return mapped_part(self.folder, self.manifest, part, kind, width)

    def _check_shards(self) -> None:
        """The shards must lie one after the other and fill the files, or a lookup would leave them."""
        places = self.shards.places
        sizes = np.stack([places[:, TOKENS], places[:, SUFFIXES], sampled_prefixes_in(places[:, SUFFIXES])])
        starts = places[:, [TOKEN, SUFFIX, PREFIX]].T
        files = (len(self.shards.tokens), len(self.shards.suffixes), len(self.shards.sampled_prefixes))
        # No suffix stands for an end, so a shard has fewer suffixes than tokens.
        filled = (places[:, SUFFIXES] < places[:, TOKENS]).all()
        tiled = filled and places.min() >= 0 and np.array_equal(starts, np.cumsum(sizes, axis=1) - sizes)
        if not tiled or tuple(sizes.sum(axis=1)) != files or len(self.shards.heads) != len(places):
            raise StoreError(f"{self.folder} is damaged (its shards do not fit its files): build it again")

    def after(self, context: Sequence[int] | Ints, most: int = LARGEST_TREE) -> Continuations:
        """The continuations of the longest suffix of ``context`` that the corpus holds."""
        tail = np.asarray(context[-LONGEST_CONTEXT:], WIDE)
        # Made from a whole tuple: a named one costs a quarter of a microsecond more from its fields.
        return tuple.__new__(Continuations, lookup(self.tokens, self.addresses, tail, self.end, most))


@compiled
def lookup(tokens: Ints, addresses: Ints, tail: Ints, end: int, most: int) -> tuple[int, int, Ints]:
    """The fields of ``Continuations``."""
    shards = shards_at(tokens, addresses)
    matched, ranges = find_longest(shards, tail)
    found = (ranges[:, 1] - ranges[:, 0]).sum()
    matches = np.empty((2, min(found, MATCH_SAMPLES)), np.int64)
    sample_matches(shards, ranges, matched, found, matches)
    continuations = np.empty((DEPTH, matches.shape[1]), np.int32)
    # Depth by depth: the first one waits for memory, for all matches at once; the others find it in the cache.
    for depth in range(DEPTH):
        read_followers(shards, matches, depth, continuations[depth])
    if len(ranges) > 1:
        continuations = _in_order(continuations)
    nodes = _tree(continuations, end, most)
    if found > MATCH_SAMPLES:
        for node in range(nodes.shape[1]):
            nodes[NODE_COUNT, node] = nodes[NODE_COUNT, node] * found // MATCH_SAMPLES
    return matched, found, nodes


@compiled
def _in_order(continuations: Ints) -> Ints:
    """The columns, sorted by insertion: those of each shard are sorted already."""
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
def _precedes(continuations: Ints, one: int, other: int) -> bool:
    for depth in range(len(continuations)):
        if continuations[depth, one] != continuations[depth, other]:
            return bool(continuations[depth, one] < continuations[depth, other])
    return False


@compiled
def _tree(continuations: Ints, end: int, most: int) -> Ints:
    """The ``most`` most frequent nodes of the tree of sorted continuations.

    Nodes that several continuations share are grown and sorted first. The nodes of one continuation alone
    fill up the tree in the order of the continuations: they are the greater part, and few are accepted.
    """
    longest, samples = continuations.shape
    shared = _shared(continuations, end)
    grown = np.empty((3, samples * longest), np.int64)
    path = np.empty(longest + 1, np.int64)  # nodes of the last continuation: the next one shares a start of it
    path[0] = -1
    last = np.empty(samples, np.int64)  # the deepest shared node of each
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
    nodes = np.empty((3, most), np.int64)
    moved = _by_count(grown[:, :size], samples, nodes)
    kept = min(size, most)
    for column in range(samples):
        if kept == most:
            break
        parent = moved[last[column]]
        for depth in range(max(shared[column], shared[column + 1]), longest):
            if kept == most or continuations[depth, column] == end:
                break
            nodes[NODE_TOKEN, kept] = continuations[depth, column]
            nodes[NODE_PARENT, kept] = parent
            nodes[NODE_COUNT, kept] = 1
            parent = kept
            kept += 1
    return nodes[:, :kept]


@compiled
def _shared(continuations: Ints, end: int) -> Ints:
    """The length of the start that each continuation shares with the one before it; 0 at both ends."""
    longest, samples = continuations.shape
    shared, alike = np.zeros(samples + 1, np.int32), np.ones(samples + 1, np.int32)
    for depth in range(longest):
        for column in range(1, samples):
            token = continuations[depth, column]
            alike[column] &= (token == continuations[depth, column - 1]) & (token != end)
            shared[column] += alike[column]
    return shared


@compiled
def _by_count(grown: Ints, highest: int, nodes: Ints) -> Ints:
    """Fill ``nodes`` in the order of counts, none above ``highest``; the new place of each node, and -1 for -1.

    A counting sort takes one pass and keeps equals in order: a parent, which counts no less than its
    child and stands before it, stays before it.
    """
    size, most = grown.shape[1], nodes.shape[1]
    starts = np.zeros(highest + 2, np.int32)  # for each count, where its nodes begin in the sorted tree
    for node in range(size):
        starts[grown[NODE_COUNT, node]] += 1
    place = 0
    for count in range(highest, 0, -1):
        same = starts[count]
        starts[count] = place
        place += same
    moved = np.full(size + 1, -1, np.int64)
    for node in range(size):
        to = starts[grown[NODE_COUNT, node]]
        starts[grown[NODE_COUNT, node]] += 1
        moved[node] = to
        if to < most:
            nodes[NODE_TOKEN, to] = grown[NODE_TOKEN, node]
            nodes[NODE_PARENT, to] = moved[grown[NODE_PARENT, node]]
            nodes[NODE_COUNT, to] = grown[NODE_COUNT, node]
    return moved
