"""RACER (Zhang et al., 2026): retrieved n-grams, completed by a tree of recycled rankings.

All suffixes of the context are looked up from the root of a trie. Unlike an Aho-Corasick automaton, a trie has no
failure links that can become stale.

The most frequent continuations of all matches come first. The rest of the tree follows the rankings: the best token
after a node gets half of the node's breadth (after the root, all of it), and each further token half of the breadth of
the token before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hdtool.runtime.budget.node_budget import Budget
from hdtool.runtime.core.tree import LARGEST_TREE, ROOT, DraftTree, Trie
from hdtool.runtime.drafters.published.lookup_methods import GrowingContext
from hdtool.runtime.drafters.published.token_recycling import (
    NO_RECYCLED_TOKEN,
    RECYCLED_PER_TOKEN,
    RecyclingDrafter,
)
from hdtool.runtime.kernels.best_first import insert_best
from hdtool.runtime.kernels.compiled import Ints, compiled
from hdtool.runtime.settings.draft_sources import SourceId

NGRAM_LENGTH = 10
"""Number of tokens in an n-gram."""
MAX_TRIE_NODES = 10_000
HASH_CHAINS = 1 << 14
MIN_MATCH_TOKENS = 2
NO_NODE = -1
ROOT_NODE = 0

TRIE = np.dtype(
    [
        ("size", np.int64),
        ("tokens", np.int64, MAX_TRIE_NODES),
        ("counts", np.int64, MAX_TRIE_NODES),
        ("parents", np.int32, MAX_TRIE_NODES),
        ("first", np.int32, MAX_TRIE_NODES),  # latest child of each node
        ("next", np.int32, MAX_TRIE_NODES),  # next older child of the same parent
        ("heads", np.int32, HASH_CHAINS),  # latest node by hash of parent and token
        ("chain", np.int32, MAX_TRIE_NODES),  # next older node with the same hash
        # A ring of all nodes through the root, sorted by last use.
        ("later", np.int32, MAX_TRIE_NODES),  # for the root: the least recently used node
        ("earlier", np.int32, MAX_TRIE_NODES),  # for the root: the most recently used node
    ],
    align=True,
)


class NgramTrie:
    """Counts n-grams in a trie of bounded size; once it is full, new nodes replace the least recently used leaves."""

    def __init__(self) -> None:
        self.memory = np.zeros(1, TRIE)
        self.clear()
        self.add([0] * NGRAM_LENGTH, 0)  # compile all code, or load it from the cache, before the first step
        self.after([0, 0], 1)
        self.clear()

    def clear(self) -> None:
        _clear(self.memory[0])

    def add(self, context: Sequence[int] | Ints, known: int) -> None:
        """Count a context's n-grams, except those within its first ``known`` tokens."""
        start = max(0, known - NGRAM_LENGTH + 1)
        _add_all(self.memory[0], np.asarray(context[start:], np.int64))

    def after(self, context: Sequence[int] | Ints, max_rows: int) -> Ints:
        """Return the most frequent continuations of a context's suffixes, one per row, padded with ``NO_NODE``."""
        rows: Ints = np.full((max_rows, NGRAM_LENGTH), NO_NODE, np.int32)
        return rows[: _after(self.memory[0], np.asarray(context[-NGRAM_LENGTH + 1 :], np.int64), rows)]


@compiled
def _clear(trie: Any) -> None:
    trie.size = 1
    trie.first[ROOT_NODE] = NO_NODE
    trie.heads[:] = NO_NODE
    trie.later[ROOT_NODE] = trie.earlier[ROOT_NODE] = ROOT_NODE


@compiled
def _add_all(trie: Any, tokens: Ints) -> None:
    for start in range(len(tokens) - NGRAM_LENGTH + 1):
        node = ROOT_NODE
        for token in tokens[start : start + NGRAM_LENGTH]:
            child = child_of(trie, node, token)
            if child == NO_NODE:
                child = _new_node(trie, node, token)
            else:
                _leave(trie, child)
            _enter(trie, child)
            trie.counts[child] += 1
            node = child
        _touch_path(trie, node)


@compiled
def _head(parent: Any, token: Any) -> int:
    mixed_hash = np.int64(parent) * 40503 + np.int64(token) * 2654435761
    return int((mixed_hash ^ (mixed_hash >> 15)) & (HASH_CHAINS - 1))


@compiled
def child_of(trie: Any, node: int, token: Any) -> int:
    child = trie.heads[_head(node, token)]
    while child != NO_NODE and (trie.parents[child] != node or trie.tokens[child] != token):
        child = trie.chain[child]
    return int(child)


@compiled
def _new_node(trie: Any, parent: int, token: Any) -> int:
    """Return a new node below a parent; in a full trie, it replaces the least recently used leaf."""
    if trie.size < MAX_TRIE_NODES:
        node = trie.size
        trie.size += 1
    else:
        node = trie.later[ROOT_NODE]
        _leave(trie, node)
        _unlink(trie, node)
    trie.tokens[node], trie.counts[node], trie.parents[node], trie.first[node] = token, 0, parent, NO_NODE
    trie.next[node], trie.first[parent] = trie.first[parent], node
    head = _head(parent, token)
    trie.chain[node], trie.heads[head] = trie.heads[head], node
    return int(node)


@compiled
def _unlink(trie: Any, leaf: int) -> None:
    """Remove a leaf from the children of its parent and from its hash chain."""
    parent = trie.parents[leaf]
    _remove(trie.first, parent, trie.next, leaf)
    _remove(trie.heads, _head(parent, trie.tokens[leaf]), trie.chain, leaf)


@compiled
def _remove(firsts: Ints, key: Any, nexts: Ints, node: int) -> None:
    """Remove a node from the linked list that begins with ``firsts[key]``."""
    if firsts[key] == node:
        firsts[key] = nexts[node]
        return
    previous = firsts[key]
    while nexts[previous] != node:
        previous = nexts[previous]
    nexts[previous] = nexts[node]


@compiled
def _touch_path(trie: Any, node: int) -> None:
    """Mark a node and then its ancestors as most recently used, so that the least recently used node is a leaf."""
    while node != ROOT_NODE:
        _leave(trie, node)
        _enter(trie, node)
        node = trie.parents[node]


@compiled
def _leave(trie: Any, node: int) -> None:
    trie.later[trie.earlier[node]], trie.earlier[trie.later[node]] = trie.later[node], trie.earlier[node]


@compiled
def _enter(trie: Any, node: int) -> None:
    """Insert a node into the ring as the most recently used one."""
    latest = trie.earlier[ROOT_NODE]
    trie.later[latest], trie.earlier[ROOT_NODE] = node, node
    trie.earlier[node], trie.later[node] = latest, ROOT_NODE


@compiled
def _after(trie: Any, tail: Ints, rows: Ints) -> int:
    """Write the most frequent continuations of all matches to ``rows``; return their number."""
    max_rows = len(rows)
    keys, counts = np.empty(max_rows, np.int64), np.empty(max_rows, np.int64)
    size = 0
    for length in range(len(tail), MIN_MATCH_TOKENS - 1, -1):
        match = ROOT_NODE
        for token in tail[len(tail) - length :]:
            match = child_of(trie, match, token)
            if match == NO_NODE:
                break
        if match == NO_NODE:
            continue
        _touch_path(trie, match)
        size = _collect(trie, match, keys, counts, size)
    for row in range(size):
        node = keys[row] & 0xFFFFFFFF
        for depth in range((keys[row] >> 32) - 1, -1, -1):
            rows[row, depth] = trie.tokens[node]
            node = trie.parents[node]
    return size


@compiled
def _collect(trie: Any, match: int, keys: Ints, counts: Ints, size: int) -> int:
    """Merge the nodes below a match into ``keys``, which keeps those with the highest counts; return its size.

    A key is a node's depth below the match and the node, packed. Of nodes with equal counts, the shallower comes first.
    """
    max_rows = len(keys)
    waiting, depths = np.empty(MAX_TRIE_NODES, np.int64), np.empty(MAX_TRIE_NODES, np.int64)
    waiting[0], depths[0] = match, 0
    read, written = 0, 1
    while read < written:
        parent, depth = waiting[read], depths[read] + 1
        read += 1
        child = trie.first[parent]
        while child != NO_NODE:
            count = trie.counts[child]
            if size < max_rows or count > counts[size - 1]:
                size = insert_best(counts, keys, count, depth << 32 | np.int64(child), 0, size, max_rows)
                waiting[written], depths[written] = child, depth
                written += 1
            child = trie.next[child]
    return size


KIND_PRIOR_RATES = (0.4, 0.45, 0.12, 0.06, 0.04, 0.03, 0.02, 0.02, 0.01)
"""Initial acceptance rates of retrieved tokens, then of ranked tokens by rank."""
RETRIEVED_KIND = 0
RECYCLED_NUMBER = SourceId.RECYCLED.value


class Racer(RecyclingDrafter):
    """Drafts from n-grams and rankings, which are kept between conversations unless ``remembers`` is False."""

    def __init__(self, budget: Budget | None = None, *, remembers: bool = True) -> None:
        super().__init__(budget, KIND_PRIOR_RATES, SourceId.CONTEXT, SourceId.RECYCLED, remembers=remembers)
        self._ngrams, self._trie = NgramTrie(), Trie(LARGEST_TREE)
        self._context = GrowingContext()
        self._known = 0
        """Number of context tokens whose n-grams have been counted."""
        # Compile the code, or load it from the cache, before the first step.
        self._trie.add(np.full((1, 1), NO_RECYCLED_TOKEN, np.int32), SourceId.CONTEXT, wanted=1)
        _fill(np.zeros((1, RECYCLED_PER_TOKEN), np.int64), 0, *self._trie.copy_arrays(), 1)

    def begin(self, prompt: Sequence[int]) -> None:
        super().begin(prompt)
        self._context.restart(prompt)
        self._ngrams.add(self._context.grown(prompt), 0)
        self._known = len(prompt)

    def _forget(self) -> None:
        super()._forget()
        self._ngrams.clear()

    def _propose(self, context: Sequence[int], max_nodes: int) -> tuple[Ints, DraftTree]:
        with self._timing(SourceId.CONTEXT):
            known = self._context.grown(context)
            self._ngrams.add(known, self._known)
            self._known = len(known)
            rows = self._ngrams.after(known, max_nodes)
            self._trie.clear()
            self._trie.add(rows, SourceId.CONTEXT, wanted=len(rows))
        with self._timing(SourceId.RECYCLED):
            *nodes, kinds = _fill(self._table.rows, context[-1], *self._trie.copy_arrays(), max_nodes)
            return kinds, DraftTree(context[-1], *nodes)


@compiled
def _fill(
    rows: Ints, root: int, retrieved: Ints, retrieved_parents: Ints, retrieved_sources: Ints, max_nodes: int
) -> tuple[Ints, Ints, Ints, Ints]:
    """Add ranked tokens to the retrieved nodes, breadth first, up to ``max_nodes`` nodes in all.

    Return the tokens, parents, sources and kinds of the nodes.
    """
    size = min(len(retrieved), max_nodes)
    tokens, parents = np.empty(max_nodes, np.int64), np.empty(max_nodes, np.int32)
    sources, kinds = np.empty(max_nodes, np.uint8), np.full(max_nodes, RETRIEVED_KIND)
    tokens[:size], parents[:size], sources[:size] = retrieved[:size], retrieved_parents[:size], retrieved_sources[:size]
    waiting, breadths = np.full(max_nodes + 1, ROOT), np.full(max_nodes + 1, RECYCLED_PER_TOKEN)
    read, written = 0, 1
    while read < written and size < max_nodes:
        node, breadth = waiting[read], breadths[read]
        following = breadth if node == ROOT else breadth // 2
        token = root if node == ROOT else tokens[node]
        read += 1
        for rank in range(breadth if 0 <= token < len(rows) else 0):
            if rows[token, rank] == NO_RECYCLED_TOKEN or written > max_nodes:
                break
            child = 0
            while child < size and not (parents[child] == node and tokens[child] == rows[token, rank]):
                child += 1
            if child == size:
                if size == max_nodes:
                    break
                tokens[size], parents[size] = rows[token, rank], node
                sources[size], kinds[size] = RECYCLED_NUMBER, rank + 1
                size += 1
            waiting[written], breadths[written] = child, max(1, following)
            following //= 2
            written += 1
    return tokens[:size], parents[:size], sources[:size], kinds[:size]
