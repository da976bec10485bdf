"""The probability of each continuation of a node: back-off n-gram interpolation over the evidence of all sources."""

from __future__ import annotations

from typing import Any

import numpy as np

from hdtool.runtime.drafters.hierarchy.backoff_weights import (
    CONTEXT_ORDERS,
    HISTORY_ORDERS,
    PREDICTION_ORDERS,
)
from hdtool.runtime.drafters.hierarchy.contributions import (
    DRAFTING,
    add_corpus,
    add_followers,
    add_heads,
    add_last,
    add_model,
    add_plugins,
    add_recycled,
)
from hdtool.runtime.drafters.hierarchy.known_draws import weigh_draws
from hdtool.runtime.drafters.hierarchy.ranking_agreement import agree
from hdtool.runtime.drafters.hierarchy.recency import weigh_recency
from hdtool.runtime.drafters.hierarchy.sources.context_evidence import LONGEST_SHORT, find_short_matches
from hdtool.runtime.drafters.hierarchy.sources.context_evidence import find_matches as find_in_context
from hdtool.runtime.drafters.hierarchy.sources.context_table import CHAINS, LEVELS, LONG, LONGEST_HASH
from hdtool.runtime.drafters.hierarchy.sources.followers import clear, sort
from hdtool.runtime.drafters.hierarchy.sources.history_evidence import ANSWERS
from hdtool.runtime.drafters.hierarchy.sources.history_evidence import PREDICTION as PREDICTED
from hdtool.runtime.drafters.hierarchy.sources.history_evidence import find_matches as find_in_log
from hdtool.runtime.drafters.hierarchy.sources.positions_ahead import place_after
from hdtool.runtime.drafters.hierarchy.sources.recycled_rankings import (
    fetch_rankings,
)
from hdtool.runtime.drafters.hierarchy.workspace import memory_at
from hdtool.runtime.kernels.clock import lap
from hdtool.runtime.kernels.compiled import Ints, compiled
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.stores.corpus_ranges import (
    LONGEST_RANGE,
)
from hdtool.runtime.stores.history.log_search import LONGEST_MATCH
from hdtool.runtime.stores.history.token_log import CHAINED
from hdtool.runtime.stores.model_store import LONGEST_PREFIX, fetch, mixed

TREE, CONTEXT, MODEL = SourceName.NONE.value, SourceName.CONTEXT.value, SourceName.MODEL.value
CORPUS, RECYCLED = SourceName.CORPUS.value, SourceName.RECYCLED.value
HISTORY, PREDICTION = SourceName.HISTORY.value, SourceName.PREDICTION.value
LAST, TRAINED = SourceName.LAST.value, SourceName.HEADS.value
OF_CONTEXT, OF_HISTORY, OF_PREDICTION = range(3)
"""Which followers a source counts."""
WORTH_A_SEARCH = 5.0
"""The corpus costs the most, so it is searched only where so many times the least relevant probability is left."""
HIGHEST_OTHER = LONGEST_RANGE
"""The highest n-gram order of evidence other than matches in tokens."""
BEFORE_ORDER = 3
"""Trained heads and plug-ins come before the evidence of this n-gram order."""


@compiled
def expand(corpus: Ints, at: Ints, node: int, least: float, floor: float, truth: int) -> None:
    """Interpolate from the longest n-gram order down, until less than ``least`` is left to shorter ones.

    Fills the candidates, without contributions below ``floor``. With a ``truth``, the emitted token, it notes
    the share that each order gives to it instead.
    """
    memory = memory_at(at)
    work, weights, table, model = memory.work[0], memory.weights[0], memory.table[0], memory.model[0]
    recycled, last = memory.recycled[0], memory.last[0]
    hashes = work.has[MODEL] or recycled.longest > 0
    _start(work, node, LONGEST_HASH if hashes else CHAINS[LONG])
    deepest = LONGEST_PREFIX if node == 0 else min(LONGEST_PREFIX, work.known[work.parents[node]] + 1)
    lap(work, TREE)
    if work.has[MODEL]:
        fetch(model, work.marks, deepest)
        lap(work, MODEL)
    else:
        deepest = 0
    if recycled.longest > 0:
        fetch_rankings(recycled, work.tails[node, LONGEST_MATCH - 1], work.marks)
        lap(work, RECYCLED)
    left = 1.0
    lowest = LONGEST_RANGE + 1
    for order in range(_find_matches(at, node), 0, -1):
        if order == BEFORE_ORDER:
            if memory.heads[0].count > 0:
                left = add_heads(work, weights, memory.heads[0], node, left, floor, truth)
                lap(work, TRAINED)
                if left < least:
                    break
            if work.plugins > 0:
                left = add_plugins(work, weights, memory.plugins, node, left, floor, truth)
                if left < least:
                    break
        if work.has[CONTEXT]:
            found = memory.followers[OF_CONTEXT]
            if order <= LONGEST_SHORT and order == min(LONGEST_SHORT, memory.context[0].shortest[node] - 1):
                find_short_matches(table, memory.context[0], node, work.tails[node], work.marks, found)
                sort(found)
            left = add_followers(work, weights, CONTEXT, CONTEXT_ORDERS, found, order, left, floor, truth)
            lap(work, CONTEXT)
            if left < least:
                break
        if work.has[PREDICTION] and order >= CHAINED:
            found = memory.followers[OF_PREDICTION]
            left = add_followers(work, weights, PREDICTION, PREDICTION_ORDERS, found, order, left, floor, truth)
            lap(work, PREDICTION)
            if left < least:
                break
        if work.has[HISTORY] and order >= CHAINED:
            found = memory.followers[OF_HISTORY]
            left = add_followers(work, weights, HISTORY, HISTORY_ORDERS, found, order, left, floor, truth)
            lap(work, HISTORY)
            if left < least:
                break
        if order <= recycled.longest > 1:
            left = add_recycled(work, weights, recycled, node, order, left, floor, truth)
            lap(work, RECYCLED)
            if left < least:
                break
        if order <= deepest:
            left = add_model(work, weights, model, node, order, left, floor, truth)
            lap(work, MODEL)
            if left < least:
                break
        if work.has[CORPUS] and order <= LONGEST_RANGE and left >= WORTH_A_SEARCH * least:
            lowest = order
            left = add_corpus(corpus, at, node, order, left, least, floor, truth)
            lap(work, CORPUS)
            if left < least:
                break
    if recycled.longest == 1 and left >= least:
        # Rankings of single tokens that nothing replaces count less than what followed the token in texts.
        left = add_recycled(work, weights, recycled, node, 1, left, floor, truth)
        lap(work, RECYCLED)
    # The target's own ranking of the same position already reflects recency.
    ranked = place_after(memory.near[0], work.depths[node])
    if truth == DRAFTING and work.has[CONTEXT] and ranked < 0:
        weigh_recency(work, weights.recency, table, node)
        lap(work, CONTEXT)
    if node == 0 and last.count > 0 and left >= least:
        add_last(work, weights, last, left, floor, truth)
        lap(work, LAST)
    if truth == DRAFTING and ranked >= 0:
        agree(work, weights.gains, memory.near[0], ranked)
        lap(work, RECYCLED)
    if truth == DRAFTING and work.is_sampled:
        weigh_draws(work, node)
    if node > 0:
        memory.ranges[0].lowest[node] = lowest
    if work.known[node] == 0 and left < least:
        work.known[node] = LONGEST_PREFIX  # no look-up was made


@compiled
def _start(work: Any, node: int, hashed: int) -> None:
    """Begin with no candidates, and hash up to so many of the last tokens."""
    work.size = work.used = work.known[node] = 0
    work.last_open = work.last_part = 0.0
    work.round += 1
    mark = np.uint64(0)
    for length in range(1, hashed + 1):
        mark = mixed(mark, work.tails[node, LONGEST_MATCH - length])
        work.marks[length] = mark


@compiled
def _find_matches(at: Ints, node: int) -> int:
    """Find what matches the tail of a node in tokens; returns the highest n-gram order of any evidence.

    Matches are found even where those of one source suffice, because the children of the node inherit them.
    """
    memory = memory_at(at)
    work, highest = memory.work[0], HIGHEST_OTHER
    if work.has[CONTEXT]:
        found = memory.followers[OF_CONTEXT]
        clear(found)
        tail, parent = work.tails[node], work.parents[node]
        find_in_context(memory.table[0], memory.context[0], node, parent, tail, work.marks, found)
        sort(found)
        highest = max(highest, _highest_order(found))
        lap(work, CONTEXT)
    if work.has[PREDICTION]:
        highest = max(highest, _find_in_logs(work, memory.followers[OF_PREDICTION], memory.matches, PREDICTED, 1, node))
        lap(work, PREDICTION)
    if work.has[HISTORY]:
        highest = max(highest, _find_in_logs(work, memory.followers[OF_HISTORY], memory.matches, ANSWERS, 2, node))
        lap(work, HISTORY)
    return highest


@compiled
def _find_in_logs(work: Any, found: Any, matches: Any, first: int, logs: int, node: int) -> int:
    """Find the matches in so many logs from the ``first`` one on; returns their highest n-gram order."""
    clear(found)
    for log in range(first, first + logs):
        find_in_log(matches[log], node, work.parents[node], work.tails[node], work.marks[CHAINED], found)
    sort(found)
    return _highest_order(found)


@compiled
def _highest_order(found: Any) -> int:
    order = LEVELS if found.places > 0 else 0
    while order > 0 and found.stops[order] == 0:
        order -= 1
    return order
