"""Best-first search for the most probable paths, in one sorted list.

Each path in turn becomes a node, its continuations are estimated, and their paths enter the list after it, as a path
is never more probable than its start. So parents come before their children, nodes are sorted by probability, and a
smaller tree is a prefix of a larger one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hdtool.runtime.drafters.hierarchy.backoff_weights import learn
from hdtool.runtime.drafters.hierarchy.calibration import calibrate, learn_calibration
from hdtool.runtime.drafters.hierarchy.contributions import DRAFTING
from hdtool.runtime.drafters.hierarchy.estimator import CORPUS, TREE, expand
from hdtool.runtime.drafters.hierarchy.ranking_agreement import learn_gains
from hdtool.runtime.drafters.hierarchy.sources.context_table import add
from hdtool.runtime.drafters.hierarchy.sources.history_evidence import ANSWERS
from hdtool.runtime.drafters.hierarchy.sources.last_logits import forget
from hdtool.runtime.drafters.hierarchy.sources.plugin_evidence import end_chains, follow
from hdtool.runtime.drafters.hierarchy.sources.positions_ahead import clear, pass_by
from hdtool.runtime.drafters.hierarchy.workspace import memory_at
from hdtool.runtime.kernels.clock import lap, start_clock
from hdtool.runtime.kernels.compiled import Ints, compiled
from hdtool.runtime.kernels.memory.raw_memory import array_at
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.stores.corpus_ranges import LONGEST_RANGE, narrow, places_of
from hdtool.runtime.stores.history.log_search import LONGEST_MATCH
from hdtool.runtime.stores.history.token_log import LOG, append

DEEPEST = 64
WORTH_EXPANDING = 1.6
"""A node is expanded if its path is so many times as probable as the last one of a full list."""
WORTH_ADDING = 0.1
"""A contribution below this share of the last path's probability is left out."""
LEAST_LEFT = 0.002
LEAST_PART = 1e-4
LEFT_TO_LEARN = 0.02
"""Below so much that is left, shorter orders learn nothing from an emitted token."""
SOURCES = len(SourceName)
GRAMMAR, RECYCLED = SourceName.GRAMMAR.value, SourceName.RECYCLED.value


@compiled
def grow(corpus: Ints, at: Ints, most: int) -> int:
    """Fill the workspace with the ``most`` most probable nodes, and return how many there are."""
    work = memory_at(at).work[0]
    start_clock(work)
    work.parents[0], work.depths[0], work.probs[0] = 0, 0, 1.0
    size, node, bar = 0, 0, 0.0
    while True:
        probs = work.probs[node]
        if node < work.expected and size < most:
            # For the matches that lower nodes inherit.
            expand(corpus, at, node, LEAST_LEFT, LEAST_PART, DRAFTING)
            size = _enlist_expected(work, node)
        elif work.depths[node] < DEEPEST and probs > WORTH_EXPANDING * bar:
            least = max(WORTH_EXPANDING * bar / probs, LEAST_LEFT)
            expand(corpus, at, node, least, max(WORTH_ADDING * bar / probs, LEAST_PART), DRAFTING)
            size, bar = _enlist(work, node, size, most, bar)
        if node == size:
            break
        node += 1
        _settle(work, node)
        if node == most:
            break
    work.expected = 0
    calibrate(work, node)
    for place in range(node):
        work.above[place] = work.parents[place + 1] - 1
    lap(work, TREE)
    return node


@compiled
def grow_all(corpus: Ints, at: Ints, most: Ints, grown: Ints) -> None:
    """The same for several workspaces, a row of addresses each, with the same corpus; ``grown`` gets the numbers."""
    for row in range(len(most)):
        grown[row] = grow(corpus, at[row], most[row]) if most[row] > 0 else 0


@compiled
def _enlist_expected(work: Any, node: int) -> int:
    """Put the token that is expected after a node into the list, alone; the new size of the list."""
    work.best_probs[node] = work.probs[node]
    work.best_keys[node] = GRAMMAR << 40 | node << 32 | work.chain[node]
    return node + 1


@compiled
def _enlist(work: Any, node: int, size: int, most: int, bar: float) -> tuple[int, float]:
    """Put the continuations of a node into the list; its new size, and the probability to exceed once it is full."""
    for at in range(work.size):
        # The shares of a damaged store may exceed the whole.
        probs = min(1.0, work.chances[at]) * work.probs[node]
        if size < most:
            place = size
            size += 1
        elif probs > bar:
            place = size - 1
        else:
            continue
        while place > node and work.best_probs[place - 1] < probs:
            work.best_probs[place], work.best_keys[place] = work.best_probs[place - 1], work.best_keys[place - 1]
            place -= 1
        source = np.argmax(work.parts[at])
        work.best_probs[place] = probs
        work.best_keys[place] = work.agreed[at] << 48 | source << 40 | node << 32 | work.candidates[at]
        if size == most:
            bar = work.best_probs[size - 1]
    return size, bar


@compiled
def _settle(work: Any, node: int) -> None:
    """Make a node of the next path of the list."""
    key = work.best_keys[node - 1]
    parent, token = (key >> 32) & 0xFF, key & 0xFFFFFFFF
    work.probs[node] = work.best_probs[node - 1]
    work.tokens[node], work.parents[node], work.sources[node] = token, parent, key >> 40 & 0xFF
    work.agreements[node] = key >> 48
    work.depths[node] = work.depths[parent] + 1
    extend(work, parent, node, token)


@compiled
def extend(work: Any, above: int, node: int, token: int) -> None:
    """Give a node the last tokens of its parent and its own token."""
    for place in range(LONGEST_MATCH - 1):
        work.tails[node, place] = work.tails[above, place + 1]
    work.tails[node, LONGEST_MATCH - 1] = token


@compiled
def restart(corpus: Ints, at: Ints, tail: Ints) -> None:
    """Move the root to the end of another context, which ends with ``tail``."""
    memory = memory_at(at)
    memory.work[0].tails[0] = -1
    forget(memory.last[0])
    clear(memory.heads[0])
    clear(memory.near[0])
    end_chains(memory.plugins)
    ranges = memory.ranges[0]
    places_of(ranges)[0] = 0
    ranges.read[0] = 0
    for token in tail:
        _advance(corpus, at, token)


@compiled
def observe_step(corpus: Ints, at: Ints, outcome: Ints, count: int, nodes: int) -> None:
    """Learn from ``count`` emitted tokens, which come first in the ``outcome``, and from the accepted path after them.

    The path is that of a tree of so many nodes, 0 if it is not known which of them were accepted.
    """
    if nodes > 0:
        work = memory_at(at).work[0]
        if work.has[RECYCLED]:
            learn_gains(at, outcome[count:], nodes)
        learn_calibration(work, len(outcome) - count, nodes)
    feed(corpus, at, outcome[:count])


@compiled
def feed(corpus: Ints, at: Ints, tokens: Ints) -> None:
    """Learn from emitted tokens one by one, add them to the context table and move the root on."""
    memory = memory_at(at)
    lane = memory.lane[0]
    for token in tokens:
        expand(corpus, at, 0, LEFT_TO_LEARN, 0.0, token)
        learn(memory.weights[0], memory.work[0], memory.last[0])
        add(memory.table[0], token)
        if lane.owner > 0:
            append(array_at(memory.matches[ANSWERS].log, 1, LOG)[0], lane, token, True)
        _advance(corpus, at, token)


@compiled
def _advance(corpus: Ints, at: Ints, token: int) -> None:
    memory = memory_at(at)
    work, ranges = memory.work[0], memory.ranges[0]
    extend(work, 0, 0, token)
    forget(memory.last[0])
    pass_by(memory.heads[0])
    pass_by(memory.near[0])
    follow(memory.plugins, token)
    if work.has[CORPUS]:
        # In place, and the longest first: each comes from the next shorter one of the previous root.
        for order in range(LONGEST_RANGE, 0, -1):
            narrow(corpus, ranges, work.tails[0], 0, 0, order)
