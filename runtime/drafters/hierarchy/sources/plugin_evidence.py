"""The evidence of a source from outside the package: a function in Python, called once a step for a chain of nodes.

The chain begins at the root and follows the arg-max token of each call. Compiled code reads the evidence at the nodes
of the chain, and at the next root for as long as the emitted tokens follow the chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hdtool.runtime.kernels.compiled import Array, compiled
from hdtool.runtime.source_names import PLUGINS, Evidence

MOST_PLUGINS = len(PLUGINS)
LONGEST_CHAIN = 8
"""Nodes of a chain; a node keeps as many of its last tokens."""
BEST = 32
"""Tokens of a node, the most probable ones."""
WHOLE = 1_000_000
"""Shares are in millionths."""

PLUGIN = np.dtype(
    [
        ("source", np.int64),  # its number
        ("count", np.int64),  # nodes of the chain; 0 where there is no evidence
        ("ahead", np.int64),  # tokens of the chain that were emitted since
        ("chain", np.int64, LONGEST_CHAIN),  # the arg-max token of each node
        ("tokens", np.int64, (LONGEST_CHAIN, BEST)),  # most probable first
        ("shares", np.int64, (LONGEST_CHAIN, BEST)),
    ],
    align=True,
)


def note(plugin: Any, evidence: Evidence, context: Sequence[int]) -> None:
    """Store the evidence at the end of a context and along the chain after it."""
    plugin["count"] = plugin["ahead"] = 0
    path = list(context)
    for node in range(LONGEST_CHAIN):
        found = evidence(path)
        tokens = np.fromiter(found.keys(), np.int64, len(found))
        values = np.fromiter(found.values(), np.float64, len(found))
        usable = np.isfinite(values) & (values > 0)
        tokens, values = tokens[usable], values[usable]
        if not len(tokens):
            return
        best = np.argsort(-values, kind="stable")[:BEST]
        plugin["shares"][node] = 0
        plugin["tokens"][node, : len(best)] = tokens[best]
        plugin["shares"][node, : len(best)] = values[best] / max(1.0, values.sum()) * WHOLE
        plugin["chain"][node] = tokens[best[0]]
        plugin["count"] = node + 1
        path.append(int(tokens[best[0]]))


@compiled
def node_of_chain(plugin: Any, tail: Array, depth: int) -> int:
    """The node of the chain that a node of the tree is, by its depth and last tokens; or -1."""
    node = plugin.ahead + depth
    if node >= plugin.count:
        return -1
    for step in range(depth):
        if tail[len(tail) - depth + step] != plugin.chain[plugin.ahead + step]:
            return -1
    return int(node)


@compiled
def follow(plugins: Any, token: int) -> None:
    """Move each chain on by an emitted token; a chain that continues otherwise ends."""
    for slot in range(MOST_PLUGINS):
        if plugins[slot].ahead < plugins[slot].count and plugins[slot].chain[plugins[slot].ahead] == token:
            plugins[slot].ahead += 1
        else:
            plugins[slot].count = 0


@compiled
def end_chains(plugins: Any) -> None:
    for slot in range(MOST_PLUGINS):
        plugins[slot].count = 0
