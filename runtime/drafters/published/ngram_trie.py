"""A trie of n-grams with a fixed number of nodes, of which the least recently used leaf makes room for a new one.

An automaton of Aho and Corasick (1975) goes from a match to its suffixes by failure links. Matches here have fewer
tokens than an n-gram, so all suffixes of the context are looked up from the root instead, and no link becomes stale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hdtool.runtime.kernels.compiled import Ints, compiled

LENGTH = 10
"""Tokens of an n-gram."""
NODES = 10_000
HEADS = 1 << 14
SHORTEST_MATCH = 2
NONE = -1
ROOT_NODE = 0

TRIE = np.dtype(
    [
        ("size", np.int64),
        ("tokens", np.int64, NODES),
        ("counts", np.int64, NODES),
        ("parents", np.int32, NODES),
        ("first", np.int32, NODES),  # the latest child, and the next older one of the same node
        ("next", np.int32, NODES),
        ("heads", np.int32, HEADS),  # by hash of parent and token, and the next one of the same hash
        ("chain", np.int32, NODES),
        # The nodes by their last use, in a ring through the root.
        ("later", np.int32, NODES),  # of the root: the least recently used one
        ("earlier", np.int32, NODES),  # of the root: the latest one
    ],
    align=True,
)


class NgramTrie:
    def __init__(self) -> None:
        self.memory = np.zeros(1, TRIE)
        self.clear()
        self.add([0] * LENGTH, 0)  # compiles all, or loads it
        self.after([0, 0], 1)
        self.clear()

    def clear(self) -> None:
        _clear(self.memory[0])

    def add(self, context: Sequence[int] | Ints, known: int) -> None:
        """Count the n-grams that end after the first ``known`` tokens of a context."""
        start = max(0, known - LENGTH + 1)
        _add_all(self.memory[0], np.asarray(context[start:], np.int64))

    def after(self, context: Sequence[int] | Ints, most: int) -> tuple[Ints, Ints]:
        """The most frequent continuations of all suffixes of a context, as rows and the lengths of these."""
        rows: Ints = np.full((most, LENGTH), NONE, np.int32)
        lengths: Ints = np.zeros(most, np.int64)
        count = _after(self.memory[0], np.asarray(context[-LENGTH + 1 :], np.int64), rows, lengths)
        return rows[:count], lengths[:count]


@compiled
def _clear(trie: Any) -> None:
    trie.size = 1
    trie.first[ROOT_NODE] = NONE
    trie.heads[:] = NONE
    trie.later[ROOT_NODE] = trie.earlier[ROOT_NODE] = ROOT_NODE


@compiled
def _add_all(trie: Any, tokens: Ints) -> None:
    for start in range(len(tokens) - LENGTH + 1):
        node = ROOT_NODE
        for token in tokens[start : start + LENGTH]:
            child = child_of(trie, node, token)
            if child == NONE:
                child = _new_node(trie, node, token)
            else:
                _leave(trie, child)
            _enter(trie, child)
            trie.counts[child] += 1
            node = child
        _touch_path(trie, node)


@compiled
def _head(parent: Any, token: Any) -> int:
    mark = np.int64(parent) * 40503 + np.int64(token) * 2654435761
    return int((mark ^ (mark >> 15)) & (HEADS - 1))


@compiled
def child_of(trie: Any, node: int, token: Any) -> int:
    child = trie.heads[_head(node, token)]
    while child != NONE and (trie.parents[child] != node or trie.tokens[child] != token):
        child = trie.chain[child]
    return int(child)


@compiled
def _new_node(trie: Any, parent: int, token: Any) -> int:
    """A node below a parent, which takes the place of the least recently used leaf if there is no other."""
    if trie.size < NODES:
        node = trie.size
        trie.size += 1
    else:
        node = trie.later[ROOT_NODE]
        _leave(trie, node)
        _unlink(trie, node)
    trie.tokens[node], trie.counts[node], trie.parents[node], trie.first[node] = token, 0, parent, NONE
    trie.next[node], trie.first[parent] = trie.first[parent], node
    head = _head(parent, token)
    trie.chain[node], trie.heads[head] = trie.heads[head], node
    return int(node)


@compiled
def _unlink(trie: Any, leaf: int) -> None:
    """Remove a leaf from the lists that hold it."""
    parent = trie.parents[leaf]
    _remove(trie.first, parent, trie.next, leaf)
    _remove(trie.heads, _head(parent, trie.tokens[leaf]), trie.chain, leaf)


@compiled
def _remove(firsts: Ints, key: Any, nexts: Ints, node: int) -> None:
    """Remove a node from the list that begins with ``firsts[key]``."""
    if firsts[key] == node:
        firsts[key] = nexts[node]
        return
    other = firsts[key]
    while nexts[other] != node:
        other = nexts[other]
    nexts[other] = nexts[node]


@compiled
def _touch_path(trie: Any, node: int) -> None:
    """Make a node and those above it the latest in use, the node first: the oldest of all nodes is always a leaf."""
    while node != ROOT_NODE:
        _leave(trie, node)
        _enter(trie, node)
        node = trie.parents[node]


@compiled
def _leave(trie: Any, node: int) -> None:
    trie.later[trie.earlier[node]], trie.earlier[trie.later[node]] = trie.later[node], trie.earlier[node]


@compiled
def _enter(trie: Any, node: int) -> None:
    """Make a node the latest in use."""
    latest = trie.earlier[ROOT_NODE]
    trie.later[latest], trie.earlier[ROOT_NODE] = node, node
    trie.earlier[node], trie.later[node] = latest, ROOT_NODE


@compiled
def _after(trie: Any, tail: Ints, rows: Ints, lengths: Ints) -> int:
    """Fill the rows with the paths from the matches to their most frequent continuations."""
    most = len(rows)
    nodes, counts = np.empty(most, np.int64), np.empty(most, np.int64)
    size = 0
    for length in range(len(tail), SHORTEST_MATCH - 1, -1):
        match = ROOT_NODE
        for token in tail[len(tail) - length :]:
            match = child_of(trie, match, token)
            if match == NONE:
                break
        if match == NONE:
            continue
        _touch_path(trie, match)
        size = _collect(trie, match, length, nodes, counts, lengths, size)
    for row in range(size):
        node = nodes[row]
        for place in range(lengths[row] - 1, -1, -1):
            rows[row, place] = trie.tokens[node]
            node = trie.parents[node]
    return size


@compiled
def _collect(trie: Any, match: int, matched: int, nodes: Ints, counts: Ints, lengths: Ints, size: int) -> int:
    """Add the nodes below a match to the most frequent ones, sorted by count; the shallower of equals first."""
    most = len(nodes)
    waiting, depths = np.empty(NODES, np.int64), np.empty(NODES, np.int64)
    waiting[0], depths[0] = match, 0
    read, written = 0, 1
    while read < written:
        above, depth = waiting[read], depths[read] + 1
        read += 1
        child = trie.first[above]
        while child != NONE:
            count = trie.counts[child]
            if size < most or count > counts[size - 1]:
                place = size if size < most else size - 1
                size = min(size + 1, most)
                while place > 0 and counts[place - 1] < count:
                    nodes[place], counts[place] = nodes[place - 1], counts[place - 1]
                    lengths[place] = lengths[place - 1]
                    place -= 1
                nodes[place], counts[place], lengths[place] = child, count, depth
                waiting[written], depths[written] = child, depth
                written += 1
            child = trie.next[child]
    return size
