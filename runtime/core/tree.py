"""The draft tree that one forward pass verifies, and the trie that merges sequences into a tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from hdtool.runtime.kernels.compiled import Ints, compiled
from hdtool.runtime.settings.draft_token_limits import LARGEST_BUDGET

ROOT = -1
"""Parent of the nodes that directly follow the last emitted token."""
UNDETERMINED = -1
"""Value in ``DraftTree.forced_tokens`` where more than one token may follow."""
LARGEST_TREE = LARGEST_BUDGET
"""Maximum number of nodes in a tree that a target verifies; a pass over a batch verifies several trees."""


@dataclass(eq=False)
class DraftTree:
    """Draft tokens after ``root``, the last emitted token, which is not in the KV cache yet.

    Nodes are sorted so that a parent comes before its children. A tree without nodes is plain decoding.
    """

    root: int
    tokens: npt.NDArray[np.int64]
    parents: npt.NDArray[np.int32]
    sources: npt.NDArray[np.uint8]
    """``SourceId`` of each node."""
    forced_tokens: npt.NDArray[np.int64] | None = None
    """The only token that may follow the root and each node; ``UNDETERMINED`` where several may.

    Rows with such a token need no logits. None if no grammar is in use, or if all logits are read.
    """

    @classmethod
    def bare(cls, root: int) -> DraftTree:
        return cls(root, *_NO_NODES)

    @classmethod
    def of(cls, root: int, tokens: Sequence[int] | Ints, parents: Sequence[int] | Ints, source: int = 0) -> DraftTree:
        """Make a tree from copies of lists or arrays; all nodes come from one source."""
        size = len(tokens)
        return cls(root, np.array(tokens, np.int64), np.array(parents, np.int32), np.full(size, source, np.uint8))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def all_tokens(self) -> list[int]:
        """Tokens of the root and the nodes, in the order of the rows of a forward pass."""
        return [self.root, *self.tokens.tolist()] if len(self) else [self.root]

    @cached_property
    def ancestor_mask(self) -> npt.NDArray[np.bool_]:
        """Mask ``[rows, rows]``: True where the column is the row itself or its ancestor; row 0 is the root."""
        related = np.empty((len(self) + 1, len(self) + 1), np.bool_)
        mark_ancestors(related, 0, self.parents, True, False)
        return related

    @cached_property
    def depths(self) -> npt.NDArray[np.int64]:
        """Depth of each row below the root; row 0 is the root."""
        return _depths(self.parents)

    def child(self, node: int, token: int) -> int | None:
        """Return the first child of ``node`` that drafts ``token``, or None."""
        node_of_child = child_of(self.tokens, self.parents, node, token)
        return None if node_of_child == ROOT else int(node_of_child)

    @property
    def is_chain(self) -> bool:
        """True if each node is the child of the one before it."""
        return bool((self.parents == np.arange(-1, len(self) - 1)).all())

    def first_chain(self) -> DraftTree:
        """Return the chain of first children from the root on; drafters put the most probable child first."""
        if self.is_chain:
            return self
        chain, last = [], ROOT
        for node, parent in enumerate(self.parents.tolist()):
            if parent == last:
                chain.append(node)
                last = node
        return self.select(np.array(chain, np.int64))

    def within(self, depth: int, vocabulary: int) -> DraftTree:
        """Return the tree without nodes deeper than ``depth``, those of tokens without an embedding, and all below."""
        if fits(self.tokens, self.parents, depth, vocabulary):
            return self
        return self.select(np.flatnonzero(_within(self.tokens, self.parents, depth, vocabulary)))

    def first(self, size: int) -> DraftTree:
        """Return a tree of the first ``size`` nodes, without ``forced_tokens``."""
        return DraftTree(self.root, self.tokens[:size], self.parents[:size], self.sources[:size])

    def select(self, order: npt.NDArray[np.int64]) -> DraftTree:
        """Return a tree of the nodes in ``order``, without ``forced_tokens``; ``order`` must list parents first."""
        return DraftTree(self.root, self.tokens[order], _remap_parents(self.parents, order), self.sources[order])


_NO_NODES = (np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.uint8))


def compile_trees() -> None:
    """Compile the functions for trees, or load them from the cache, before the first step."""
    tree = DraftTree.of(0, [1, 1], [ROOT, 0])
    _ = tree.ancestor_mask
    tree.within(1, 2)
    tree.child(0, 1)


@compiled
def child_of(tokens: npt.NDArray[np.int64], parents: npt.NDArray[np.int32], node: int, token: int) -> int:
    """Return the first child of ``node`` that drafts ``token``, or ``ROOT`` if there is none."""
    for child in range(node + 1, len(tokens)):
        if parents[child] == node and tokens[child] == token:
            return child
    return ROOT


@compiled
def descend(
    walk_buffer: npt.NDArray[np.int64],
    column: int,
    tokens: npt.NDArray[np.int64],
    parents: npt.NDArray[np.int32],
    node: int,
    token: int,
) -> int:
    """Return the first child of ``node`` that drafts ``token``, or ``ROOT`` if there is none.

    The token and the result are also written to a column of ``walk_buffer``.
    """
    child = child_of(tokens, parents, node, token)
    walk_buffer[0, column], walk_buffer[1, column] = token, child
    return child


@compiled
def fits(tokens: npt.NDArray[np.int64], parents: npt.NDArray[np.int32], depth: int, vocabulary: int) -> bool:
    """Return True if no node is deeper than ``depth`` and all tokens have an embedding."""
    for token in tokens:
        if not 0 <= token < vocabulary:
            return False
    return len(tokens) <= depth or _depths(parents).max() <= depth


@compiled
def _remap_parents(parents: npt.NDArray[np.int32], order: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Return the parents of the nodes in ``order``, as indices into ``order``; ``ROOT`` stays the same."""
    indices = np.full(len(parents) + 1, ROOT, np.int32)  # the last item, at index ROOT, is for the root
    new_parents = np.empty(len(order), np.int32)
    for index in range(len(order)):
        indices[order[index]] = index
        new_parents[index] = indices[parents[order[index]]]
    return new_parents


@compiled
def _within(
    tokens: npt.NDArray[np.int64], parents: npt.NDArray[np.int32], depth: int, vocabulary: int
) -> npt.NDArray[np.bool_]:
    """Return a mask of the nodes up to a depth whose own token and ancestors' tokens all have embeddings."""
    depths, kept = _depths(parents), np.empty(len(tokens), np.bool_)
    for node in range(len(tokens)):
        has_place = 0 <= tokens[node] < vocabulary and depths[node + 1] <= depth
        kept[node] = has_place and (parents[node] == ROOT or kept[parents[node]])
    return kept


def rows_of(path: Sequence[int]) -> list[int]:
    """Return which rows of a pass over a tree hold the root and the nodes of a path below it."""
    return [0, *[node + 1 for node in path]]


@compiled
def mark_ancestors(
    values: npt.NDArray[Any], first: int, parents: npt.NDArray[np.int32], related: float, unrelated: float
) -> None:
    """Set each row's own column and its ancestors' to ``related``, and the tree's other columns to ``unrelated``.

    Column ``first`` of ``values`` is the root's; columns outside the tree are left as they are.
    """
    rows = len(parents) + 1
    for row in range(rows):
        parent_row = parents[row - 1] + 1 if row > 0 else 0
        for column in range(first, first + rows):  # ancestors come before their descendants
            values[row, column] = values[parent_row, column] if column < first + row else unrelated
        values[row, first + row] = related


@compiled
def _depths(parents: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    depths = np.zeros(len(parents) + 1, np.int64)
    for row in range(1, len(depths)):
        depths[row] = depths[parents[row - 1] + 1] + 1
    return depths


NO_TOKEN = -1
"""Padding at the end of a row that is longer than its sequence."""


class Trie:
    """Merges sequences into a tree of up to ``max_nodes`` nodes; a shared prefix keeps the source that added it first.

    There is room for ``extra`` more nodes of a tree that is appended without merging.
    """

    def __init__(self, max_nodes: int, extra: int = 0) -> None:
        self._max_nodes = max_nodes
        self._tokens = np.empty(max_nodes + extra, np.int64)
        self._parents = np.empty(max_nodes + extra, np.int32)
        self._sources = np.empty(max_nodes + extra, np.uint8)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def clear(self) -> None:
        self._size = 0

    def add(self, sequences: Ints, source: int, *, wanted: int) -> int:
        """Add rows of tokens until ``wanted`` rows have each added at least one node; return the number of such rows.

        Tokens beyond ``max_nodes`` are dropped.
        """
        if not len(sequences) or wanted <= 0:
            return 0
        rows = np.ascontiguousarray(sequences, np.int32)
        # As an int, because numba unboxes an enum slowly in each call.
        self._size, added = _add(
            self._tokens, self._parents, self._sources, self._size, self._max_nodes, rows, int(source), wanted
        )
        return int(added)

    def append_tree(self, tokens: Ints, parents: Ints, source: int) -> None:
        """Append a whole tree without merging; its root is taken to be the root of this trie."""
        start, self._size = self._size, self._size + len(tokens)
        self._tokens[start : self._size] = tokens
        self._parents[start : self._size] = parents + np.int32(start) * (parents != ROOT)
        self._sources[start : self._size] = source

    def copy_arrays(self) -> tuple[Ints, Ints, Ints]:
        """Return copies of the tokens, parents and sources."""
        size = self._size
        return self._tokens[:size].copy(), self._parents[:size].copy(), self._sources[:size].copy()


@compiled
def _add(
    tokens: Ints, parents: Ints, sources: Ints, size: int, max_nodes: int, rows: Ints, source: int, wanted: int
) -> tuple[int, int]:
    added = 0
    for row in rows:
        if added == wanted or size >= max_nodes:
            break
        before, node = size, ROOT
        for token in row:
            if token == NO_TOKEN:
                break
            child = max(node, 0)  # a child comes after its parent
            while child < size and not (parents[child] == node and tokens[child] == token):
                child += 1
            if child == size:
                if size >= max_nodes:
                    break
                tokens[size], parents[size], sources[size] = token, node, source
                size += 1
            node = child
        added += size > before
    return size, added


def sequences_of(tokens: Ints, parents: Ints, length: int, max_paths: int) -> Ints:
    """Return the first ``max_paths`` paths from the root to depth ``length`` or to a shallower leaf, one per row.

    Rows are in the order of their last nodes, and shorter paths are padded with ``NO_TOKEN``. A parent must come before
    its children.
    """
    return _sequences(np.ascontiguousarray(tokens), np.ascontiguousarray(parents), length, max_paths)


@compiled
def _sequences(tokens: Ints, parents: Ints, length: int, max_paths: int) -> Ints:
    size = len(tokens)
    depths = np.empty(size, np.int64)
    is_leaf = np.ones(size, np.bool_)
    for node in range(size):
        parent = parents[node]
        depths[node] = 1 if parent == ROOT else depths[parent] + 1
        if parent != ROOT:
            is_leaf[parent] = False
    rows = np.full((max_paths, length), NO_TOKEN, np.int32)
    count = 0
    for end in range(size):
        if count < max_paths and (depths[end] == length or (is_leaf[end] and depths[end] < length)):
            node = end
            for level in range(depths[end] - 1, -1, -1):
                rows[count, level] = tokens[node]
                node = parents[node]
            count += 1
    return rows[:count]
