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

from hdtool.data.documents import token_type
from hdtool.data.errors import StoreError
from hdtool.data.store import Manifest, TokenizerMark, read_manifest, require

KIND = "corpus"
LONGEST_CONTEXT = 16
DEPTH = 10
MATCHES_READ = 128
LARGEST_TREE = 64

Ints = npt.NDArray[Any]


class Continuations(NamedTuple):
    """How the longest known part of a context goes on: a tree with counts, commonest first."""

    matched: int
    """Tokens of the context that were found."""
    found: int
    """How often they were found."""
    tokens: npt.NDArray[np.int64]
    parents: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int64]
    """How often the path down to each node follows; estimated where not every match was read."""


class ShardPlace(NamedTuple):
    """Where a shard lies in the files of tokens and suffixes."""

    token: int
    tokens: int
    suffix: int
    suffixes: int


class CorpusIndex:
    """An index opened for look-ups; its files are mapped, read only where they are touched."""

    def __init__(self, folder: Path, tokenizer: TokenizerMark | None = None) -> None:
        self.folder = folder
        self.manifest: Manifest = read_manifest(folder)
        require(self.manifest, folder, KIND, tokenizer)
        self.end = self.manifest.tokenizer.vocab_size
        """The token that closes a document."""
        self.tokens = self._part("tokens", token_type(self.end))
        self._suffixes = self._part("suffixes", np.uint32)
        self._heads = self._part("heads", np.int64).reshape(-1, self.end + 1)
        self._shards = np.array(self._part("shards", np.int64).reshape(-1, 4))
        self._check_shards()

    def _part(self, name: str, kind: npt.DTypeLike) -> Ints:
        # A plain array on the map: np.memmap's own slices cost microseconds each.
        return np.asarray(np.memmap(self.folder / self.manifest.files[name].name, kind, "r"))

    def _check_shards(self) -> None:
        """The shards must lie one behind the other and fill the files, or a look-up would leave them."""
        token, tokens, suffix, suffixes = self._shards.T
        tiled = np.array_equal(token, np.cumsum(tokens) - tokens) and np.array_equal(
            suffix, np.cumsum(suffixes) - suffixes
        )
        sizes = (tokens.sum(), suffixes.sum(), len(self._shards))
        if not tiled or self._shards.min() < 0 or sizes != (len(self.tokens), len(self._suffixes), len(self._heads)):
            raise StoreError(f"{self.folder} is damaged (its shards do not fit its files): build it again")

    def after(self, context: Sequence[int] | Ints, most: int = LARGEST_TREE) -> Continuations:
        """The continuations of the longest suffix of ``context`` that the corpus holds."""
        tail = np.asarray(context[-LONGEST_CONTEXT:], np.int64)
        return Continuations(*look_up(self.tokens, self._suffixes, self._heads, self._shards, tail, self.end, most))


@njit(cache=True, nogil=True)
def look_up(
    tokens: Ints, suffixes: Ints, heads: Ints, shards: Ints, tail: Ints, end: int, most: int
) -> tuple[int, int, Ints, Ints, Ints]:
    """Length and number of the matches, and the tree of what follows them."""
    matched, ranges = find_longest(tokens, suffixes, heads, shards, tail)
    found = 0
    for shard in range(len(shards)):
        found += ranges[shard, 1] - ranges[shard, 0]
    read = min(found, MATCHES_READ)
    follows = np.empty((read, DEPTH), np.int64)
    shard, before = 0, 0
    for turn in range(read):
        # Spread over all matches: the first in order would be those with small token ids.
        match = turn * found // read
        while match - before >= ranges[shard, 1] - ranges[shard, 0]:
            before += ranges[shard, 1] - ranges[shard, 0]
            shard += 1
        place = np.int64(suffixes[shards[shard, 2] + ranges[shard, 0] + match - before])
        first = shards[shard, 0] + place + matched
        stop = shards[shard, 0] + shards[shard, 1]
        # A damaged file must not lead out of the shard or to a token that no model has.
        for level in range(DEPTH):
            token = np.int64(tokens[first + level]) if first + level < stop else end
            follows[turn, level] = min(token, end)
            if token >= end:
                break
    if len(shards) > 1:
        _sort_rows(follows)
    node_tokens, parents, counts = _tree(follows, end, most)
    if found > read:
        counts = counts * found // read
    return matched, found, node_tokens, parents, counts


@njit(cache=True, nogil=True)
def _sort_rows(rows: Ints) -> None:
    """In place, by insertion: each shard's rows are sorted already, and there are few."""
    width = rows.shape[1]
    held = np.empty(width, rows.dtype)
    for row in range(1, len(rows)):
        held[:] = rows[row]
        at = row
        while at > 0 and _precedes(held, rows[at - 1]):
            rows[at] = rows[at - 1]
            at -= 1
        rows[at] = held


@njit(cache=True, nogil=True)
def _precedes(left: Ints, right: Ints) -> bool:
    for place in range(len(left)):
        if left[place] != right[place]:
            return bool(left[place] < right[place])
    return False


@njit(cache=True, nogil=True)
def find_longest(tokens: Ints, suffixes: Ints, heads: Ints, shards: Ints, tail: Ints) -> tuple[int, Ints]:
    """The longest suffix of ``tail`` that occurs anywhere, and its range of suffixes in each shard.

    If a suffix occurs, so does every shorter one, so the length is found by bisection.
    """
    known = 0
    ranges = np.zeros((len(shards), 2), np.int64)
    trial = np.zeros((len(shards), 2), np.int64)
    shortest, longest = 1, len(tail)
    while shortest <= longest:
        length = (shortest + longest) // 2
        pattern = tail[len(tail) - length :]
        occurs = False
        for shard in range(len(shards)):
            token, suffix = shards[shard, 0], shards[shard, 2]
            own = tokens[token : token + shards[shard, 1]]
            trial[shard] = find(own, suffixes[suffix : suffix + shards[shard, 3]], heads[shard], pattern)
            occurs |= trial[shard, 0] < trial[shard, 1]
        if occurs:
            known = length
            ranges[:] = trial
            shortest = length + 1
        else:
            longest = length - 1
    return known, ranges


@njit(cache=True, nogil=True)
def find(tokens: Ints, suffixes: Ints, heads: Ints, pattern: Ints) -> tuple[int, int]:
    """The range of suffixes of one shard that start with ``pattern``."""
    head = pattern[0]
    if head < 0 or head >= len(heads) - 1:
        return 0, 0
    low, high = max(0, heads[head]), min(heads[head + 1], len(suffixes))
    if low >= high:
        return 0, 0
    if len(pattern) == 1:
        return low, high
    start = _bisect(tokens, suffixes, pattern, low, high, False)
    return start, _bisect(tokens, suffixes, pattern, start, high, True)


@njit(cache=True, nogil=True)
def _bisect(tokens: Ints, suffixes: Ints, pattern: Ints, low: int, high: int, past_equals: bool) -> int:
    while low < high:
        middle = (low + high) // 2
        place = np.int64(suffixes[middle])
        order = 0  # of the suffix against the pattern
        for offset in range(1, len(pattern)):
            if place + offset >= len(tokens):
                order = -1
                break
            token = np.int64(tokens[place + offset])
            if token != pattern[offset]:
                order = -1 if token < pattern[offset] else 1
                break
        if order < 0 or (past_equals and order == 0):
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True, nogil=True)
def _tree(follows: Ints, end: int, most: int) -> tuple[Ints, Ints, Ints]:
    """The tree of sorted continuations, its ``most`` commonest nodes."""
    rows, width = follows.shape
    tokens = np.empty(rows * width, np.int64)
    parents = np.empty(rows * width, np.int32)
    counts = np.empty(rows * width, np.int64)
    path = np.empty(width, np.int32)  # nodes of the last continuation: the next one shares a start of it
    depth, size = 0, 0
    for row in range(rows):
        shared = True
        level = 0
        while level < width and follows[row, level] != end:
            token = follows[row, level]
            shared = shared and level < depth and tokens[path[level]] == token
            if not shared:
                tokens[size] = token
                parents[size] = path[level - 1] if level else -1
                counts[size] = 0
                path[level] = size
                size += 1
            counts[path[level]] += 1
            level += 1
        depth = level
    return _commonest(tokens[:size], parents[:size], counts[:size], rows, most)


@njit(cache=True, nogil=True)
def _commonest(tokens: Ints, parents: Ints, counts: Ints, highest: int, most: int) -> tuple[Ints, Ints, Ints]:
    """The nodes of highest count, sorted by it; no count is above ``highest``.

    Counting the counts sorts in one pass, and keeps equals in order: a parent, which counts no less
    than its child and stands before it, stays before it.
    """
    behind = np.zeros(highest + 2, np.int32)  # for each count, where its nodes begin in the sorted tree
    for count in counts:
        behind[count] += 1
    place = 0
    for count in range(highest, 0, -1):
        same = behind[count]
        behind[count] = place
        place += same
    kept = min(most, len(tokens))
    new_tokens, new_parents, new_counts = np.empty(kept, np.int64), np.empty(kept, np.int32), np.empty(kept, np.int64)
    moved = np.empty(len(tokens), np.int32)
    for node in range(len(tokens)):
        count = counts[node]
        moved[node] = behind[count]
        behind[count] += 1
        if moved[node] < kept:
            new_tokens[moved[node]] = tokens[node]
            new_parents[moved[node]] = moved[parents[node]] if parents[node] >= 0 else -1
            new_counts[moved[node]] = count
    return new_tokens, new_parents, new_counts
