"""The probability of each continuation of a node: back-off n-gram interpolation over the evidence of all sources."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from hdtool.runtime.drafters.hierarchy.backoff_weights import (
    CONTEXT_ORDERS,
    CORPUS_ORDERS,
    FEW,
    HEADS_ORDERS,
    HISTORY_ORDERS,
    MANY,
    MODEL_ORDERS,
    ONE,
    PLUGIN_ORDERS,
    PREDICTION_ORDERS,
    RECYCLED_ORDERS,
    SIZES,
    bucket_of,
)
from hdtool.runtime.drafters.hierarchy.candidates import put
from hdtool.runtime.drafters.hierarchy.ranking_agreement import agree
from hdtool.runtime.drafters.hierarchy.sources.context_evidence import LONGEST_SHORT, find_short_matches
from hdtool.runtime.drafters.hierarchy.sources.context_evidence import find_matches as find_in_context
from hdtool.runtime.drafters.hierarchy.sources.context_table import CHAINS, LEVELS, LONG, LONGEST_HASH, LONGEST_MATCH
from hdtool.runtime.drafters.hierarchy.sources.corpus_evidence import (
    FEWEST_SAMPLES,
    LONGEST_RANGE,
    SAMPLES,
    narrow,
    read_samples,
    size_of,
    tally,
)
from hdtool.runtime.drafters.hierarchy.sources.followers import clear, count_order, sort
from hdtool.runtime.drafters.hierarchy.sources.heads_evidence import WHOLE as ALL_OF_HEADS
from hdtool.runtime.drafters.hierarchy.sources.history_evidence import ANSWERS
from hdtool.runtime.drafters.hierarchy.sources.history_evidence import PREDICTION as PREDICTED
from hdtool.runtime.drafters.hierarchy.sources.history_evidence import find_matches as find_in_log
from hdtool.runtime.drafters.hierarchy.sources.model_evidence import fetch, known_as, rows_of
from hdtool.runtime.drafters.hierarchy.sources.plugin_evidence import MOST_PLUGINS, node_of_chain
from hdtool.runtime.drafters.hierarchy.sources.plugin_evidence import WHOLE as ALL_OF_PLUGIN
from hdtool.runtime.drafters.hierarchy.sources.positions_ahead import place_after
from hdtool.runtime.drafters.hierarchy.sources.recycled_rankings import (
    LONG_RUN,
    WHOLE,
    fetch_rankings,
    rankings_of,
    row_of,
    tag_of,
)
from hdtool.runtime.drafters.hierarchy.workspace import memory_at
from hdtool.runtime.kernels.clock import lap
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.stores.model_store import LONGEST_PREFIX, mixed
from hdtool.runtime.stores.token_log import CHAINED

TREE, CONTEXT, MODEL = SourceName.NONE.value, SourceName.CONTEXT.value, SourceName.MODEL.value
CORPUS, RECYCLED = SourceName.CORPUS.value, SourceName.RECYCLED.value
HISTORY, PREDICTION = SourceName.HISTORY.value, SourceName.PREDICTION.value
LAST, TRAINED = SourceName.LAST.value, SourceName.HEADS.value
OF_CONTEXT, OF_HISTORY, OF_PREDICTION = range(3)
"""Which followers a source counts."""
DRAFTING = -1
"""In place of an emitted token to learn from."""
WORTH_A_SEARCH = 5.0
"""The corpus costs the most, so it is searched only where so many times the least relevant probability is left."""
HIGHEST_OTHER = LONGEST_RANGE
"""The highest n-gram order of evidence other than matches in tokens."""
BEFORE_ORDER = 3
"""Trained heads and plug-ins come before the evidence of this n-gram order."""
MOST_OF_THE_REST = 0.9
"""The candidates of the last logit get at most this part of the probability that is left in the end."""

Ints = npt.NDArray[Any]


@njit(cache=True, nogil=True)
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
                left = _add_heads(work, weights, memory.heads[0], node, left, floor, truth)
                lap(work, TRAINED)
                if left < least:
                    break
            if work.plugins > 0:
                left = _add_plugins(work, weights, memory.plugins, node, left, floor, truth)
                if left < least:
                    break
        if work.has[CONTEXT]:
            found = memory.followers[OF_CONTEXT]
            if order <= LONGEST_SHORT and order == min(LONGEST_SHORT, memory.context[0].shortest[node] - 1):
                find_short_matches(table, memory.context[0], node, work.tails[node], work.marks, found)
                sort(found)
            left = _add_followers(work, weights, CONTEXT, CONTEXT_ORDERS, found, order, left, floor, truth)
            lap(work, CONTEXT)
            if left < least:
                break
        if work.has[PREDICTION] and order >= CHAINED:
            found = memory.followers[OF_PREDICTION]
            left = _add_followers(work, weights, PREDICTION, PREDICTION_ORDERS, found, order, left, floor, truth)
            lap(work, PREDICTION)
            if left < least:
                break
        if work.has[HISTORY] and order >= CHAINED:
            found = memory.followers[OF_HISTORY]
            left = _add_followers(work, weights, HISTORY, HISTORY_ORDERS, found, order, left, floor, truth)
            lap(work, HISTORY)
            if left < least:
                break
        if order <= recycled.longest:
            left = _add_recycled(work, weights, recycled, node, order, left, floor, truth)
            lap(work, RECYCLED)
            if left < least:
                break
        if order <= deepest:
            left = _add_model(work, weights, model, node, order, left, floor, truth)
            lap(work, MODEL)
            if left < least:
                break
        if work.has[CORPUS] and order <= LONGEST_RANGE and left >= WORTH_A_SEARCH * least:
            lowest = order
            left = _add_corpus(corpus, at, node, order, left, least, floor, truth)
            lap(work, CORPUS)
            if left < least:
                break
    if node == 0 and last.count > 0 and left >= least:
        _add_last(work, weights, last, left, floor, truth)
        lap(work, LAST)
    if truth == DRAFTING and memory.near[0].count > 0:
        agree(work, weights.gains, memory.near[0], node)
        lap(work, RECYCLED)
    if node > 0:
        memory.ranges[0].lowest[node] = lowest
    if work.known[node] == 0 and left < least:
        work.known[node] = LONGEST_PREFIX  # no look-up was made


@njit(cache=True, nogil=True)
def _start(work: Any, node: int, hashed: int) -> None:
    """Begin with no candidates, and hash up to so many of the last tokens."""
    work.size = work.used = work.known[node] = 0
    work.last_open = work.last_part = 0.0
    work.round += 1
    mark = np.uint64(0)
    for length in range(1, hashed + 1):
        mark = mixed(mark, work.tails[node, LONGEST_MATCH - length])
        work.marks[length] = mark


@njit(cache=True, nogil=True)
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


@njit(cache=True, nogil=True)
def _find_in_logs(work: Any, found: Any, matches: Any, first: int, logs: int, node: int) -> int:
    """Find the matches in so many logs from the ``first`` one on; returns their highest n-gram order."""
    clear(found)
    for log in range(first, first + logs):
        find_in_log(matches[log], node, work.parents[node], work.tails[node], work.marks[CHAINED], found)
    sort(found)
    return _highest_order(found)


@njit(cache=True, nogil=True)
def _highest_order(found: Any) -> int:
    order = LEVELS if found.places > 0 else 0
    while order > 0 and found.stops[order] == 0:
        order -= 1
    return order


@njit(cache=True, nogil=True)
def _add_followers(
    work: Any,
    weights: Any,
    source: int,
    orders: int,
    found: Any,
    order: int,
    left: float,
    floor: float,
    truth: int,
) -> float:
    """Add the tokens after matches of this order or a higher one; return what is left."""
    if found.stops[order] == 0:
        return left
    count_order(found, order)
    evidence = found.tokens[: found.distinct], found.counts[: found.distinct]
    bucket = bucket_of(found.total, found.distinct)
    return _weigh(work, weights, source, orders + order - 1, evidence, found.total, bucket, left, floor, truth)


@njit(cache=True, nogil=True)
def _add_recycled(
    work: Any, weights: Any, table: Any, node: int, order: int, left: float, floor: float, truth: int
) -> float:
    """Add the ranking that the target last gave after the same tokens; return what is left."""
    row = row_of(table, work.tails[node, LONGEST_MATCH - 1], work.marks[order], order)
    if row < 0:
        return left
    kept = rankings_of(table)[row]
    if kept.shares[0] == 0 or kept.tag != tag_of(work.marks[order]):
        return left
    evidence = kept.tokens, kept.shares
    # The share of the best token, and how often it was the best, take the place of the amount of evidence.
    certainty: Any = SIZES * np.int64(kept.shares[0]) // WHOLE
    spread = ONE if kept.run >= LONG_RUN else FEW if kept.run > 0 else MANY
    bucket = 3 * min(SIZES - 1, certainty) + spread
    return _weigh(work, weights, RECYCLED, RECYCLED_ORDERS + order - 1, evidence, WHOLE, bucket, left, floor, truth)


@njit(cache=True, nogil=True)
def _add_heads(work: Any, weights: Any, heads: Any, node: int, left: float, floor: float, truth: int) -> float:
    """Add the predictions of the trained head for this depth; return what is left."""
    head = place_after(heads, work.depths[node])
    if head < 0:
        return left
    evidence = heads.tokens[head], heads.shares[head]
    certainty: Any = SIZES * heads.shares[head, 0] // ALL_OF_HEADS
    bucket = 3 * min(SIZES - 1, certainty) + ONE
    return _weigh(work, weights, TRAINED, HEADS_ORDERS + head, evidence, ALL_OF_HEADS, bucket, left, floor, truth)


@njit(cache=True, nogil=True)
def _add_plugins(work: Any, weights: Any, plugins: Any, node: int, left: float, floor: float, truth: int) -> float:
    """Add the evidence of each plug-in, if the node is on its chain; return what is left."""
    for slot in range(MOST_PLUGINS):
        plugin = plugins[slot]
        found = node_of_chain(plugin, work.tails[node], work.depths[node])
        if found >= 0:
            evidence = plugin.tokens[found], plugin.shares[found]
            certainty: Any = SIZES * plugin.shares[found, 0] // ALL_OF_PLUGIN
            bucket = 3 * min(SIZES - 1, certainty) + ONE
            order = PLUGIN_ORDERS + slot
            left = _weigh(work, weights, plugin.source, order, evidence, ALL_OF_PLUGIN, bucket, left, floor, truth)
            lap(work, plugin.source)
    return left


@njit(cache=True, nogil=True)
def _add_last(work: Any, weights: Any, last: Any, left: float, floor: float, truth: int) -> None:
    """Give each candidate of the last logit its part of what is left."""
    whole = 0.0
    for place in range(last.count):
        whole += weights.rates[last.kinds[place]]
    unit = left / max(1.0, whole / MOST_OF_THE_REST)
    work.last_open = left
    for place in range(last.count):
        token, kind = last.tokens[place], last.kinds[place]
        part = unit * weights.rates[kind]
        if truth == DRAFTING:
            if part >= floor and 0 <= token < work.vocabulary:
                put(work, LAST, token, part)
        elif token == truth:
            work.last_part, work.last_kind = part, kind


@njit(cache=True, nogil=True)
def _add_model(
    work: Any, weights: Any, model: Any, node: int, order: int, left: float, floor: float, truth: int
) -> float:
    """Add the entry of this order in the model store; return what is left."""
    first, stop, total, distinct = known_as(model, work.marks[order])
    if total == 0:
        return left
    work.known[node] = max(work.known[node], order)
    rows = rows_of(model)[first:stop]
    evidence, bucket = (rows[:, 0], rows[:, 1]), bucket_of(total, distinct)
    return _weigh(work, weights, MODEL, MODEL_ORDERS + order - 1, evidence, total, bucket, left, floor, truth)


@njit(cache=True, nogil=True)
def _add_corpus(
    corpus: Ints, at: Ints, node: int, order: int, left: float, least: float, floor: float, truth: int
) -> float:
    """Add a sample of the matches of this order in the corpus; return what is left."""
    memory = memory_at(at)
    work, ranges = memory.work[0], memory.ranges[0]
    if node > 0:
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
    evidence = work.corpus_evidence[:distinct], work.corpus_counts[:distinct]
    read, row = ranges.read[node, order], CORPUS_ORDERS + order - 1
    bucket = bucket_of(found, distinct)
    return _weigh(work, memory.weights[0], CORPUS, row, evidence, read, bucket, left, floor, truth)


@njit(cache=True, nogil=True)
def _weigh(
    work: Any,
    weights: Any,
    source: int,
    row: int,
    evidence: tuple[Ints, Ints],
    read: int,
    bucket: int,
    left: float,
    floor: float,
    truth: int,
) -> float:
    """Give each token of an order its part of what is left, and return what is left then.

    ``row`` and ``bucket`` select the weight; ``evidence`` is tokens and their counts, out of ``read``.
    """
    tokens, counts = evidence
    weight = weights.weight[row, bucket]
    if truth == DRAFTING:
        unit = left * weight / read
        # No count exceeds ``read``, so nothing of a weak order counts.
        for at in range(len(tokens) if left * weight >= floor else 0):
            part = unit * min(np.int64(counts[at]), read)
            # A damaged file may hold tokens outside the vocabulary.
            if part >= floor and 0 <= tokens[at] < work.vocabulary:
                put(work, source, np.int64(tokens[at]), part)
    else:
        share = 0.0
        for at in range(len(tokens)):
            if tokens[at] == truth:
                count: Any = np.int64(counts[at])
                share = max(0, min(count, read)) / read
        work.orders[work.used], work.buckets[work.used], work.shares[work.used] = row, bucket, share
        work.used += 1
    return left * (1 - weight)  # type: ignore[no-any-return]
