"""The corpus index: what people write, found again by its last few words.

Shards of a tokenized corpus, each with a suffix array: the positions of all tokens, sorted by what
follows from there on. All places that continue a given context lie side by side in it, themselves
sorted by how they go on, so one pass over them grows the tree of continuations with its counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from hdtool.data.errors import StoreError
from hdtool.data.stores.documents import token_type
from hdtool.data.stores.store import Manifest, TokenizerFingerprint, read_store, require
from hdtool.runtime.kernels.no_copy import Pinned
from hdtool.runtime.stores.mapped_file import documents_of, mapped_part
from hdtool.runtime.stores.suffix_search import (
    SIGNPOST,
    SIGNPOST_TOKENS,
    SUFFIX,
    SUFFIXES,
    TOKEN,
    TOKENS,
    Ints,
    ShardPlace,
    Shards,
    find_longest,
    shards_at,
    signposts_in,
)
from hdtool.runtime.tree import LARGEST_TREE

KIND = "corpus"
LONGEST_CONTEXT = 16
DEPTH = 10
MATCHES_READ = 128
NODE_TOKEN, NODE_PARENT, NODE_COUNT = range(3)
WIDE = np.dtype(np.int64)  # numpy takes a dtype four times as fast as a class


class Continuations(NamedTuple):
    """How the longest known part of a context goes on: a tree with counts, commonest first."""

    matched: int
    """Tokens of the context that were found."""
    found: int
    """How often they were found."""
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
        """How often the path down to each node follows; estimated where not every match was read."""
        return self.nodes[NODE_COUNT]


class CorpusIndex(Pinned):
    """An index opened for look-ups; its files are mapped, read only where they are touched."""

    def __init__(self, folder: Path, tokenizer: TokenizerFingerprint | None = None) -> None:
        self.folder = folder
        read_store(folder, lambda manifest: self._open(manifest, tokenizer))

    @classmethod
    def of(cls, folder: Path, manifest: Manifest) -> CorpusIndex:
        """The index with this manifest, which was read already."""
        index = cls.__new__(cls)
        index.folder = folder
        index._open(manifest)
        return index

    def _open(self, manifest: Manifest, tokenizer: TokenizerFingerprint | None = None) -> None:
        require(manifest, self.folder, KIND, tokenizer)
        self.manifest = manifest
        self.end = manifest.tokenizer.vocab_size
        """The token that closes a document."""
        self.shards = Shards(
            tokens=documents_of(self.folder, manifest),
            suffixes=self._part("suffixes", np.uint32).reshape(-1),
            heads=self._part("heads", np.uint32, self.end + 1),
            signposts=self._part("signposts", token_type(self.end), SIGNPOST_TOKENS),
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
        """The shards must lie one after the other and fill the files, or a look-up would leave them."""
        places = self.shards.places
        sizes = np.stack([places[:, TOKENS], places[:, SUFFIXES], signposts_in(places[:, SUFFIXES])])
        starts = places[:, [TOKEN, SUFFIX, SIGNPOST]].T
        files = (len(self.shards.tokens), len(self.shards.suffixes), len(self.shards.signposts))
        # No suffix stands for an end, so a shard has fewer suffixes than tokens.
        filled = (places[:, SUFFIXES] < places[:, TOKENS]).all()
        tiled = filled and places.min() >= 0 and np.array_equal(starts, np.cumsum(sizes, axis=1) - sizes)
        if not tiled or tuple(sizes.sum(axis=1)) != files or len(self.shards.heads) != len(places):
            raise StoreError(f"{self.folder} is damaged (its shards do not fit its files): build it again")

    def after(self, context: Sequence[int] | Ints, most: int = LARGEST_TREE) -> Continuations:
        """The continuations of the longest suffix of ``context`` that the corpus holds."""
        tail = np.asarray(context[-LONGEST_CONTEXT:], WIDE)
        # Made from a whole tuple: a named one costs a quarter of a microsecond more from its fields.
        return tuple.__new__(Continuations, look_up(self.tokens, self.addresses, tail, self.end, most))


@njit(cache=True, nogil=True)
def look_up(tokens: Ints, addresses: Ints, tail: Ints, end: int, most: int) -> tuple[int, int, Ints]:
    """The fields of ``Continuations``."""
    shards = shards_at(tokens, addresses)
    matched, ranges = find_longest(shards, tail)
    found = (ranges[:, 1] - ranges[:, 0]).sum()
    follows = _follows(shards, ranges, matched, found, end)
    if len(ranges) > 1:
        follows = _in_order(follows)
    nodes = _tree(follows, end, most)
    if found > MATCHES_READ:
        for node in range(nodes.shape[1]):
            nodes[NODE_COUNT, node] = nodes[NODE_COUNT, node] * found // MATCHES_READ
    return matched, found, nodes


@njit(cache=True, nogil=True)
def _follows(shards: Shards, ranges: Ints, matched: int, found: int, end: int) -> Ints:
    """What comes after the matches: a column for each that is read, an end behind a document's last token."""
    read = min(found, MATCHES_READ)
    places = np.empty((2, read), np.int64)  # where each goes on, and where its shard ends
    stride, rest = (found // read, found % read) if read else (0, 0)
    match, over, before, turn = 0, 0, 0, 0
    for shard in range(len(ranges)):
        size = ranges[shard, 1] - ranges[shard, 0]
        start = shards.places[shard, SUFFIX] + ranges[shard, 0] - before
        while turn < read and match < before + size:
            places[0, turn] = shards.places[shard, TOKEN] + matched + np.int64(shards.suffixes[start + match])
            places[1, turn] = shards.places[shard, TOKEN] + shards.places[shard, TOKENS]
            turn += 1
            # Spread over all matches: the first in order would be those with small token ids.
            match, over = match + stride, over + rest
            if over >= read:
                match, over = match + 1, over - read
        before += size
    follows = np.empty((DEPTH, read), np.int32)
    # Level by level: the first one waits for memory, for all places at once, and the others find it there.
    for level in range(DEPTH):
        for turn in range(read):
            at = places[0, turn] + level
            # A damaged file must not lead out of the shard or to a token that no model has.
            token = np.int64(shards.tokens[at] if at < places[1, turn] else end)
            follows[level, turn] = token if token < end else end
    return follows


@njit(cache=True, nogil=True)
def _in_order(follows: Ints) -> Ints:
    """The columns sorted; each shard's are already, so each finds its place among those before it."""
    count = follows.shape[1]
    order = np.empty(count, np.int64)
    for column in range(count):
        low, high = 0, column
        while low < high:
            middle = (low + high) >> 1
            if _precedes(follows, column, order[middle]):
                high = middle
            else:
                low = middle + 1
        for at in range(column, low, -1):
            order[at] = order[at - 1]
        order[low] = column
    return follows[:, order]


@njit(cache=True, nogil=True)
def _precedes(follows: Ints, one: int, other: int) -> bool:
    for level in range(len(follows)):
        if follows[level, one] != follows[level, other]:
            return bool(follows[level, one] < follows[level, other])
    return False


@njit(cache=True, nogil=True)
def _tree(follows: Ints, end: int, most: int) -> Ints:
    """The ``most`` commonest nodes of the tree of sorted continuations.

    What more than one of them shares is grown and sorted first. What only one of them says fills up
    the tree, in their order: of most continuations it is the greater part, and mostly in vain.
    """
    width, read = follows.shape
    shared = _shared(follows, end)
    grown = np.empty((3, read * width), np.int64)
    path = np.empty(width + 1, np.int64)  # nodes of the last continuation: the next one shares a start of it
    path[0] = -1
    last = np.empty(read, np.int64)  # the deepest shared node of each
    size = 0
    for column in range(read):
        for level in range(shared[column]):
            grown[NODE_COUNT, path[level + 1]] += 1
        for level in range(shared[column], shared[column + 1]):
            grown[NODE_TOKEN, size] = follows[level, column]
            grown[NODE_PARENT, size] = path[level]
            grown[NODE_COUNT, size] = 1
            path[level + 1] = size
            size += 1
        last[column] = path[max(shared[column], shared[column + 1])]
    nodes = np.empty((3, most), np.int64)
    moved = _commonest(grown[:, :size], read, nodes)
    kept = min(size, most)
    for column in range(read):
        if kept == most:
            break
        parent = moved[last[column]]
        for level in range(max(shared[column], shared[column + 1]), width):
            if kept == most or follows[level, column] == end:
                break
            nodes[NODE_TOKEN, kept] = follows[level, column]
            nodes[NODE_PARENT, kept] = parent
            nodes[NODE_COUNT, kept] = 1
            parent = kept
            kept += 1
    return nodes[:, :kept]


@njit(cache=True, nogil=True)
def _shared(follows: Ints, end: int) -> Ints:
    """How long a start each continuation shares with the one before; the first and what is behind the last, none."""
    width, read = follows.shape
    shared, alike = np.zeros(read + 1, np.int32), np.ones(read + 1, np.int32)
    for level in range(width):
        for column in range(1, read):
            token = follows[level, column]
            alike[column] &= (token == follows[level, column - 1]) & (token != end)
            shared[column] += alike[column]
    return shared


@njit(cache=True, nogil=True)
def _commonest(grown: Ints, highest: int, nodes: Ints) -> Ints:
    """Fill ``nodes`` in the order of counts, none above ``highest``; where each has gone, and -1 to -1.

    Counting the counts sorts in one pass, and keeps equals in order: a parent, which counts no less
    than its child and stands before it, stays before it.
    """
    size, most = grown.shape[1], nodes.shape[1]
    behind = np.zeros(highest + 2, np.int32)  # for each count, where its nodes begin in the sorted tree
    for node in range(size):
        behind[grown[NODE_COUNT, node]] += 1
    place = 0
    for count in range(highest, 0, -1):
        same = behind[count]
        behind[count] = place
        place += same
    moved = np.full(size + 1, -1, np.int64)
    for node in range(size):
        to = behind[grown[NODE_COUNT, node]]
        behind[grown[NODE_COUNT, node]] += 1
        moved[node] = to
        if to < most:
            nodes[NODE_TOKEN, to] = grown[NODE_TOKEN, node]
            nodes[NODE_PARENT, to] = moved[grown[NODE_PARENT, node]]
            nodes[NODE_COUNT, to] = grown[NODE_COUNT, node]
    return moved
