"""Estimate what follows a node, and grow the tree by best-first search over one sorted list of paths.

The best path becomes a node. Its continuations are estimated and inserted after it, as a path is never more probable
than its prefix. So parents come before their children, nodes are sorted by probability, and a smaller tree is a prefix
of a larger one.

Learned weights change slowly and apply to all answers. Within a few steps, a factor corrects the nodes' probabilities
for an answer that is more or less predictable than the weights imply: how often its next token was drafted, relative to
how often that was expected.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hdtool.runtime.core.acceptance_rates import learn_rate
from hdtool.runtime.drafters.hierarchy.compiled_source import (
    DRAFTING,
    RESTART,
    call_find,
    call_weigh,
    move_all,
    table_at,
    work_at,
)
from hdtool.runtime.drafters.hierarchy.counting_sources import position_after
from hdtool.runtime.drafters.hierarchy.matching_sources import matches_at, table_of
from hdtool.runtime.drafters.hierarchy.ranking_sources import near_at, weigh_agreement
from hdtool.runtime.drafters.hierarchy.token_probabilities import learn, weigh_draws, weigh_recency, weights_at
from hdtool.runtime.kernels.best_first import insert_best
from hdtool.runtime.kernels.compiled import Ints, compiled, lap, start_clock
from hdtool.runtime.settings.draft_sources import SourceId
from hdtool.runtime.stores.model_store import mix_hash
from hdtool.runtime.stores.token_log import MAX_MATCH_TOKENS

MAX_DEPTH = 64
WORTH_EXPANDING = 1.6
"""A node is expanded only if its path is at least this many times as probable as the last path of a full list."""
WORTH_ADDING = 0.1
"""A contribution is dropped if it is less than this fraction of the last path's probability."""
MIN_LEFT = 0.002
MIN_CONTRIBUTION = 1e-4
LEFT_TO_LEARN = 0.02
"""Orders learn from an emitted token only while at least this much probability is left to them."""
TREE_NUMBER, CONTEXT_NUMBER = SourceId.NONE.value, SourceId.CONTEXT.value
RECYCLED_NUMBER = SourceId.RECYCLED.value
EXPECTED_HITS = 2.0
"""Weight of the prior of an answer's factor, in hits; low, so that the factor adapts within a few steps."""
HITS_WINDOW = 50.0
"""Number of expected hits that the factor's moving average spans."""
MAX_FACTOR = 1.5
GRAMMAR_NUMBER = SourceId.GRAMMAR.value


@compiled
def expand(records_at: int, node: int, min_left: float, floor: float, truth: int) -> None:
    """Estimate the next token from the highest n-gram order down, until less than ``min_left`` probability is left.

    If ``truth`` is ``DRAFTING``, fill in the candidates, without contributions below ``floor``. If it is an emitted
    token, record the share that each order gives to this token instead.
    """
    work, table = work_at(records_at), table_at(records_at)
    work.min_left, work.floor, work.truth = min_left, floor, truth
    _start(work, node)
    lap(work, TREE_NUMBER)
    order = 0
    # Call ``find`` in reverse order, as the last sources prefetch what they will read. No source is left out, even
    # if one would suffice, because the node's children inherit its matches.
    for number in range(work.rows - 1, -1, -1):
        row = table[number]
        row.highest = call_find(row.find, (records_at, node))
        order = max(order, row.highest)
        lap(work, row.source)
    left = 1.0
    while order > 0 and left >= min_left:
        left = _add_order(records_at, node, order, left)
        order -= 1
    work.cut[node] = left < min_left
    if truth == DRAFTING:
        _adjust(records_at, node, left)
    elif left >= min_left:
        _add_order(records_at, node, 0, left)


@compiled
def _start(work: Any, node: int) -> None:
    """Clear the candidates, and hash the last tokens of the path to a node."""
    work.size = work.used = 0
    work.round += 1
    suffix_hash = np.uint64(0)
    for length in range(1, work.hashed + 1):
        suffix_hash = mix_hash(suffix_hash, work.tails[node, MAX_MATCH_TOKENS - length])
        work.suffix_hashes[length] = suffix_hash


@compiled
def _add_order(records_at: int, node: int, order: int, left: float) -> float:
    """Add all sources' evidence for an n-gram order while enough probability is left; return how much is left."""
    work, table = work_at(records_at), table_at(records_at)
    for number in range(work.rows):
        row = table[number]
        if row.lowest <= order <= row.highest:
            left = call_weigh(row.weigh, (records_at, node, order, row.first, left))
            lap(work, row.source)
            if left < work.min_left:
                break
    return left


@compiled
def _adjust(records_at: int, node: int, left: float) -> None:
    """Add the evidence for order 0, and adjust probabilities by recency, neighboring rankings and known draws."""
    work, near, weights = work_at(records_at), near_at(records_at), weights_at(records_at)
    # The target's own ranking of the same position already reflects recency.
    ranked = position_after(near, work.depths[node])
    if work.has_context and ranked < 0:
        weigh_recency(work, weights.recency, table_of(matches_at(records_at, CONTEXT_NUMBER)), node)
        lap(work, CONTEXT_NUMBER)
    if left >= work.min_left:
        _add_order(records_at, node, 0, left)
    if ranked >= 0:
        weigh_agreement(work, near, ranked)
        lap(work, RECYCLED_NUMBER)
    if work.is_sampled:
        weigh_draws(work, node)


@compiled
def grow(records_at: int, max_nodes: int) -> int:
    """Grow a tree of the expected chain, then of the most probable nodes; return its size, at most ``max_nodes``."""
    work = work_at(records_at)
    start_clock(work)
    work.parents[0], work.depths[0], work.probs[0] = 0, 0, 1.0
    size, node, bar = 0, 0, 0.0
    while True:
        probs = work.probs[node]
        if node < work.expected and size < max_nodes:
            # Only the expected token follows; the estimate is needed as its descendants inherit the matches.
            expand(records_at, node, MIN_LEFT, MIN_CONTRIBUTION, DRAFTING)
            work.best_probs[node], work.best_keys[node] = probs, GRAMMAR_NUMBER << 40 | node << 32 | work.chain[node]
            size = node + 1
        elif work.depths[node] < MAX_DEPTH and probs > WORTH_EXPANDING * bar:
            min_left = max(WORTH_EXPANDING * bar / probs, MIN_LEFT)
            expand(records_at, node, min_left, max(WORTH_ADDING * bar / probs, MIN_CONTRIBUTION), DRAFTING)
            size, bar = _insert_paths(work, node, size, max_nodes, bar)
        if node == size:
            break
        node += 1
        _make_node(work, node)
        if node == max_nodes:
            break
    work.expected = 0
    for index in range(node):
        work.tree_parents[index] = work.parents[index + 1] - 1
    calibrate(work, node)
    lap(work, TREE_NUMBER)
    return node


@compiled
def grow_all(records_at: Ints, max_nodes: Ints, grown: Ints) -> None:
    """Grow a tree for the drafter at each address in ``records_at``, and write their sizes to ``grown``."""
    for row in range(len(max_nodes)):
        grown[row] = grow(records_at[row], max_nodes[row]) if max_nodes[row] > 0 else 0


@compiled
def _insert_paths(work: Any, node: int, size: int, max_nodes: int, bar: float) -> tuple[int, float]:
    """Insert the continuations of a node into the list of best paths.

    Return ``(size, bar)``: the new size of the list, and the probability that a further path must exceed, which is 0
    until the list is full.
    """
    for index in range(work.size):
        # Shares from a damaged store may exceed 1.
        probs = min(1.0, work.chances[index]) * work.probs[node]
        if size < max_nodes or probs > bar:
            key = np.argmax(work.parts[index]) << 40 | node << 32 | work.candidates[index]
            size = insert_best(work.best_probs, work.best_keys, probs, key, node, size, max_nodes)
            if size == max_nodes:
                bar = work.best_probs[size - 1]
    return size, bar


@compiled
def _make_node(work: Any, node: int) -> None:
    """Turn the next path in the list of best paths into a node."""
    key = work.best_keys[node - 1]
    parent, token = (key >> 32) & 0xFF, key & 0xFFFFFFFF
    work.probs[node] = work.best_probs[node - 1]
    work.tokens[node], work.parents[node], work.sources[node] = token, parent, key >> 40
    work.depths[node] = work.depths[parent] + 1
    extend(work, parent, node, token)


@compiled
def extend(work: Any, parent: int, node: int, token: int) -> None:
    """Set the last tokens of a node: those of its parent, followed by its own token."""
    for index in range(MAX_MATCH_TOKENS - 1):
        work.tails[node, index] = work.tails[parent, index + 1]
    work.tails[node, MAX_MATCH_TOKENS - 1] = token


@compiled
def restart(records_at: int, tail: Ints) -> None:
    """Move the root to the end of another context, whose last tokens are ``tail``."""
    work = work_at(records_at)
    start_calibration(work)
    work.tails[0] = -1
    move_all(records_at, RESTART, 0)
    for token in tail:
        extend(work, 0, 0, token)
        move_all(records_at, token, 0)


@compiled
def feed(records_at: int, tokens: Ints) -> None:
    """Learn from emitted tokens one by one, making each the new root."""
    for token in tokens:
        feed_token(records_at, token)


@compiled
def feed_token(records_at: int, token: int) -> None:
    """Learn from an emitted token, and make it the new root."""
    work = work_at(records_at)
    if work.grown:
        count_hit(work, token)
    expand(records_at, 0, LEFT_TO_LEARN, 0.0, token)
    learn(weights_at(records_at), work)
    extend(work, 0, 0, token)
    move_all(records_at, token, 1)


@compiled
def start_calibration(work: Any) -> None:
    """Reset the correction factor to 1 for a new answer, and forget the last tree."""
    work.hits[0] = work.expected_hits[0] = EXPECTED_HITS
    work.grown = 0


@compiled
def calibrate(work: Any, nodes: int) -> None:
    """Store calibrated probabilities of a tree's nodes, or the original ones if a grammar forces the first token."""
    is_certain = nodes > 0 and work.sources[1] == GRAMMAR_NUMBER
    work.grown = 0 if is_certain else nodes
    factor = 1.0 if is_certain else min(MAX_FACTOR, work.hits[0] / work.expected_hits[0])
    for node in range(nodes):
        work.calibrated[node] = min(1.0, work.probs[node + 1] * factor)


@compiled
def count_hit(work: Any, token: int) -> None:
    """Record whether the last tree had ``token`` as a child of the root, even if that node was not verified."""
    hit = expected = 0.0
    for node in range(1, work.grown + 1):
        if work.parents[node] == 0:
            expected += work.probs[node]
            if work.tokens[node] == token:
                hit = 1.0
    work.grown = 0
    learn_rate(work.hits, work.expected_hits, 0, hit, expected, HITS_WINDOW)
