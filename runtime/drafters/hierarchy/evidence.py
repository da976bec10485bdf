"""Sources that name tokens with counts or shares: the model store, the corpus index, trained heads and plug-ins."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from hdtool.runtime.config import MOST_HEADS
from hdtool.runtime.drafters.hierarchy.candidates import contribute
from hdtool.runtime.drafters.hierarchy.memory import RESTART, Prior, Source, addresses, work_at
from hdtool.runtime.drafters.hierarchy.weights import ONE, bucket_of, bucket_of_share
from hdtool.runtime.kernels.clock import lap
from hdtool.runtime.kernels.compiled import Array, Ints, compiled
from hdtool.runtime.kernels.memory.raw_memory import array_at
from hdtool.runtime.source_names import PLUGINS, Evidence, SourceName
from hdtool.runtime.stores.corpus_ranges import (
    FEWEST_SAMPLES,
    LONGEST_RANGE,
    RANGES,
    SAMPLES,
    narrow,
    places_of,
    read_samples,
    size_of,
    tally,
)
from hdtool.runtime.stores.model_store import LONGEST_PREFIX, fetch, known_as, rows_of
from hdtool.runtime.stores.model_store import MODEL as MODEL_RECORD

WORTH_A_SEARCH = 5.0
"""The corpus costs the most, so it is searched only where so many times the least relevant probability is left."""
BEFORE_ORDER = 3
"""Trained heads and plug-ins come before the evidence of this n-gram order."""
WHOLE = 1_000_000
"""Shares of heads and plug-ins are in millionths."""
BEST_OF_HEAD = 10
"""Tokens of a trained head."""
MOST_PLUGINS = len(PLUGINS)
LONGEST_CHAIN = 8
"""Nodes of a plug-in's chain; a node keeps as many of its last tokens."""
BEST_OF_PLUGIN = 32
"""Tokens of a node of the chain, the most probable ones."""
OF_MODEL, OF_CORPUS = SourceName.MODEL.value, SourceName.CORPUS.value
OF_HEADS, OF_PLUGINS = SourceName.HEADS.value, SourceName.PLUGIN_1.value

HEADS_RECORD = np.dtype(
    [
        ("count", np.int64),  # of heads; 0 where there are no predictions
        ("ahead", np.int64),  # tokens that were emitted since
        ("tokens", np.int64, (MOST_HEADS, BEST_OF_HEAD)),  # most probable first
        ("shares", np.int64, (MOST_HEADS, BEST_OF_HEAD)),
    ],
    align=True,
)
PLUGIN_RECORD = np.dtype(
    [
        ("source", np.int64),  # its number
        ("count", np.int64),  # nodes of the chain; 0 where there is no evidence
        ("ahead", np.int64),  # tokens of the chain that were emitted since
        ("chain", np.int64, LONGEST_CHAIN),  # the arg-max token of each node
        ("tokens", np.int64, (LONGEST_CHAIN, BEST_OF_PLUGIN)),  # most probable first
        ("shares", np.int64, (LONGEST_CHAIN, BEST_OF_PLUGIN)),
    ],
    align=True,
)


def _find_in_model(at: int, node: int) -> int:
    """A node of which the parent is not in the store is not looked up, unless the parent's look-up was cut short."""
    work = work_at(addresses(at))
    deepest, parent = LONGEST_PREFIX, work.parents[node]
    if node > 0 and (work.known[parent] > 0 or not work.cut[parent]):
        deepest = min(LONGEST_PREFIX, work.known[parent] + 1)
    work.known[node] = 0
    fetch(array_at(addresses(at)[OF_MODEL], 1, MODEL_RECORD)[0], work.marks, deepest)
    return deepest


def _weigh_model(
    at: int, node: int, order: int, first: int, left: float, least: float, floor: float, truth: int
) -> float:
    work, model = work_at(addresses(at)), array_at(addresses(at)[OF_MODEL], 1, MODEL_RECORD)[0]
    start, stop, total, distinct = known_as(model, work.marks[order])
    if total == 0:
        return left
    work.known[node] = max(work.known[node], order)
    rows = rows_of(model)[start:stop]
    bucket = bucket_of(total, distinct)
    return contribute(
        addresses(at), OF_MODEL, first + order - 1, rows[:, 0], rows[:, 1], total, bucket, left, floor, truth
    )


MODEL = Source(SourceName.MODEL, 1, Prior(LONGEST_PREFIX, 0.9, 0.75, 0.4, 0.05), _find_in_model, _weigh_model)


@cache
def corpus_source(dtype: str) -> Source:
    """The corpus index, with tokens of this dtype."""
    token = getattr(np, dtype)

    def find(at: int, node: int) -> int:
        if node > 0:
            ranges_at(addresses(at)).lowest[node] = LONGEST_RANGE + 1
        return LONGEST_RANGE

    def weigh(at: int, node: int, order: int, first: int, left: float, least: float, floor: float, truth: int) -> float:
        if left < WORTH_A_SEARCH * least:
            return left
        work, ranges = work_at(addresses(at)), ranges_at(addresses(at))
        corpus = array_at(ranges.shards[0, 0], ranges.shards[0, 1], token)
        if node > 0:
            ranges.lowest[node] = order
            narrow(corpus, ranges, work.tails[node], node, work.parents[node], order)
        found = size_of(ranges, node, order)
        if found == 0:
            return left
        if ranges.read[node, order] == 0:
            # Where little more is left than is relevant, only the commonest followers are.
            read_samples(corpus, ranges, node, order, found, max(FEWEST_SAMPLES, min(SAMPLES, int(left / least))))
        distinct = tally(ranges, node, order, work.corpus_evidence, work.corpus_counts)
        if distinct == 0:
            return left
        tokens, counts = work.corpus_evidence[:distinct], work.corpus_counts[:distinct]
        read, bucket = ranges.read[node, order], bucket_of(found, distinct)
        return contribute(addresses(at), OF_CORPUS, first + order - 1, tokens, counts, read, bucket, left, floor, truth)

    def move(at: int, follower: int, emitted: int) -> None:
        ranges = ranges_at(addresses(at))
        if follower == RESTART:
            places_of(ranges)[0] = 0
            ranges.read[0] = 0
            return
        corpus = array_at(ranges.shards[0, 0], ranges.shards[0, 1], token)
        # In place, and the longest first: each comes from the next shorter one of the previous root.
        for order in range(LONGEST_RANGE, 0, -1):
            narrow(corpus, ranges, work_at(addresses(at)).tails[0], 0, 0, order)

    return Source(SourceName.CORPUS, 1, Prior(LONGEST_RANGE, 0.9, 0.75, 0.35, 0.12), find, weigh, move)


@compiled
def ranges_at(at: Ints) -> Any:
    return array_at(at[OF_CORPUS], 1, RANGES)[0]


def note_heads(memory: Array, tokens: Array, probs: Array) -> None:
    """Store the best tokens ``[heads, best]`` of each head after the root, and their probabilities."""
    heads, best = tokens.shape
    memory["count"], memory["ahead"] = heads, 0
    memory["tokens"][0, :heads, :best] = tokens
    memory["shares"][0, :heads] = 0
    memory["shares"][0, :heads, :best] = probs * WHOLE


@compiled
def place_after(record: Any, depth: int) -> int:
    """The position after a node at this depth in a record of ``count`` positions after the root, or -1."""
    place = depth + record.ahead
    return int(place) if place < record.count else -1


@compiled
def pass_by(record: Any, token: int) -> None:
    """Move such a record on by an emitted token."""
    record.ahead += 1
    if token == RESTART:
        record.count = 0


def _find_heads(at: int, node: int) -> int:
    heads = array_at(addresses(at)[OF_HEADS], 1, HEADS_RECORD)[0]
    return BEFORE_ORDER if place_after(heads, work_at(addresses(at)).depths[node]) >= 0 else -1


def _weigh_heads(
    at: int, node: int, order: int, first: int, left: float, least: float, floor: float, truth: int
) -> float:
    """Add the predictions of the trained head for this depth; each head counts as an n-gram order."""
    heads = array_at(addresses(at)[OF_HEADS], 1, HEADS_RECORD)[0]
    head = place_after(heads, work_at(addresses(at)).depths[node])
    tokens, shares = heads.tokens[head], heads.shares[head]
    bucket = bucket_of_share(shares[0], WHOLE, ONE)
    return contribute(addresses(at), OF_HEADS, first + head, tokens, shares, WHOLE, bucket, left, floor, truth)


def _move_heads(at: int, token: int, emitted: int) -> None:
    pass_by(array_at(addresses(at)[OF_HEADS], 1, HEADS_RECORD)[0], token)


HEADS = Source(
    SourceName.HEADS, BEFORE_ORDER, Prior(MOST_HEADS, 0.5, 0.85, 0.5, 0.5), _find_heads, _weigh_heads, _move_heads
)


def note_plugin(plugin: Any, evidence: Evidence, context: Sequence[int]) -> None:
    """Store the evidence of a function in Python at the end of a context and along the chain of its arg-max tokens."""
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
        best = np.argsort(-values, kind="stable")[:BEST_OF_PLUGIN]
        plugin["shares"][node] = 0
        plugin["tokens"][node, : len(best)] = tokens[best]
        plugin["shares"][node, : len(best)] = values[best] / max(1.0, values.sum()) * WHOLE
        plugin["chain"][node] = tokens[best[0]]
        plugin["count"] = node + 1
        path.append(int(tokens[best[0]]))


@compiled
def _node_of_chain(plugin: Any, tail: Array, depth: int) -> int:
    """The node of the chain that a node of the tree is, by its depth and last tokens; or -1."""
    node = plugin.ahead + depth
    if node >= plugin.count:
        return -1
    for step in range(depth):
        if tail[len(tail) - depth + step] != plugin.chain[plugin.ahead + step]:
            return -1
    return int(node)


def _find_plugins(at: int, node: int) -> int:
    return BEFORE_ORDER if work_at(addresses(at)).plugins > 0 else -1


def _weigh_plugins(
    at: int, node: int, order: int, first: int, left: float, least: float, floor: float, truth: int
) -> float:
    """Add the evidence of each plug-in, if the node is on its chain."""
    work, plugins = work_at(addresses(at)), array_at(addresses(at)[OF_PLUGINS], MOST_PLUGINS, PLUGIN_RECORD)
    for slot in range(MOST_PLUGINS):
        plugin = plugins[slot]
        found = _node_of_chain(plugin, work.tails[node], work.depths[node])
        if found >= 0:
            tokens, shares = plugin.tokens[found], plugin.shares[found]
            bucket = bucket_of_share(shares[0], WHOLE, ONE)
            left = contribute(
                addresses(at), plugin.source, first + slot, tokens, shares, WHOLE, bucket, left, floor, truth
            )
            lap(work, plugin.source)
    return left


def _move_plugins(at: int, token: int, emitted: int) -> None:
    """Move each chain on by an emitted token; a chain that continues otherwise ends."""
    plugins = array_at(addresses(at)[OF_PLUGINS], MOST_PLUGINS, PLUGIN_RECORD)
    for slot in range(MOST_PLUGINS):
        plugin = plugins[slot]
        if token != RESTART and plugin.ahead < plugin.count and plugin.chain[plugin.ahead] == token:
            plugin.ahead += 1
        else:
            plugin.count = 0


_OF_PLUGINS = Prior(MOST_PLUGINS, 0.5, 0.85, 0.5, 0.5)
PLUGIN = Source(SourceName.PLUGIN_1, BEFORE_ORDER, _OF_PLUGINS, _find_plugins, _weigh_plugins, _move_plugins)
