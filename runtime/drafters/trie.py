"""A trie that merges token sequences into one tree, and the sequences of a tree."""

from __future__ import annotations

import numpy as np

from hdtool.runtime.kernels.compiled import Ints, compiled
from hdtool.runtime.tree import ROOT

NO_TOKEN = -1
"""Padding after the end of a sequence that is shorter than others."""


class Trie:
    """At most ``most`` nodes below a root; a shared prefix is stored once, with the source of the first sequence.

    ``extra`` more nodes are reserved for a tree that is appended without merging.
    """

    def __init__(self, most: int, extra: int = 0) -> None:
        self._most = most
        self._tokens = np.empty(most + extra, np.int64)
        self._parents = np.empty(most + extra, np.int32)
        self._sources = np.empty(most + extra, np.uint8)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def clear(self) -> None:
        self._size = 0

    def add(self, sequences: Ints, source: int, *, wanted: int) -> int:
        """Add rows of tokens until ``wanted`` of them added a node; return how many did.

        Tokens for which there is no room are left out.
        """
        if not len(sequences) or wanted <= 0:
            return 0
        rows = np.ascontiguousarray(sequences, np.int32)
        # As an int, because numba unboxes an enum slowly in each call.
        self._size, added = _add(
            self._tokens, self._parents, self._sources, self._size, self._most, rows, int(source), wanted
        )
        return int(added)

    def append_tree(self, tokens: Ints, parents: Ints, source: int) -> None:
        """Append a whole tree below the same root without merging."""
        start, self._size = self._size, self._size + len(tokens)
        self._tokens[start : self._size] = tokens
        self._parents[start : self._size] = parents + np.int32(start) * (parents != ROOT)
        self._sources[start : self._size] = source

    def nodes(self) -> tuple[Ints, Ints, Ints]:
        """Copies of the tokens, parents and sources."""
        size = self._size
        return self._tokens[:size].copy(), self._parents[:size].copy(), self._sources[:size].copy()


@compiled
def _add(
    tokens: Ints, parents: Ints, sources: Ints, size: int, most: int, rows: Ints, source: int, wanted: int
) -> tuple[int, int]:
    added = 0
    for row in rows:
        if added == wanted or size >= most:
            break
        before, node = size, ROOT
        for token in row:
            if token == NO_TOKEN:
                break
            child = max(node, 0)  # a child comes after its parent
            while child < size and not (parents[child] == node and tokens[child] == token):
                child += 1
            if child == size:
                if size >= most:
                    break
                tokens[size], parents[size], sources[size] = token, node, source
                size += 1
            node = child
        added += size > before
    return size, added


def sequences_of(tokens: Ints, parents: Ints, length: int, most: int) -> Ints:
    """The first ``most`` paths from the root to a node of depth ``length`` or to a leaf above it, one row each.

    They are in the order of their last nodes; a parent must come before its children.
    """
    return _sequences(np.ascontiguousarray(tokens), np.ascontiguousarray(parents), length, most)


@compiled
def _sequences(tokens: Ints, parents: Ints, length: int, most: int) -> Ints:
    size = len(tokens)
    depths = np.empty(size, np.int64)
    is_leaf = np.ones(size, np.bool_)
    for node in range(size):
        parent = parents[node]
        depths[node] = 1 if parent == ROOT else depths[parent] + 1
        if parent != ROOT:
            is_leaf[parent] = False
    rows = np.full((most, length), NO_TOKEN, np.int32)
    count = 0
    for end in range(size):
        if count < most and (depths[end] == length or (is_leaf[end] and depths[end] < length)):
            node = end
            for level in range(depths[end] - 1, -1, -1):
                rows[count, level] = tokens[node]
                node = parents[node]
            count += 1
    return rows[:count]
