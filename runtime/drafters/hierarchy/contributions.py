"""What each source adds to the candidates of a node: its evidence of an n-gram order, with the weight of that order."""

from __future__ import annotations

from typing import Any

import numpy as np

from hdtool.runtime.drafters.hierarchy.backoff_weights import (
    CORPUS_ORDERS,
    FEW,
    HEADS_ORDERS,
    MANY,
    MODEL_ORDERS,
    ONE,
    PLUGIN_ORDERS,
    RECYCLED_ORDERS,
    SIZES,
    bucket_of,
)
from hdtool.runtime.drafters.hierarchy.candidates import put
from hdtool.runtime.drafters.hierarchy.sources.followers import count_order
from hdtool.runtime.drafters.hierarchy.sources.heads_evidence import WHOLE as ALL_OF_HEADS
from hdtool.runtime.drafters.hierarchy.sources.plugin_evidence import MOST_PLUGINS, node_of_chain
from hdtool.runtime.drafters.hierarchy.sources.plugin_evidence import WHOLE as ALL_OF_PLUGIN
from hdtool.runtime.drafters.hierarchy.sources.positions_ahead import place_after
from hdtool.runtime.drafters.hierarchy.sources.recycled_rankings import (
    LONG_RUN,
    WHOLE,
    rankings_of,
    row_of,
    tag_of,
)
from hdtool.runtime.drafters.hierarchy.workspace import memory_at
from hdtool.runtime.kernels.clock import lap
from hdtool.runtime.kernels.compiled import Ints, compiled
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.stores.corpus_ranges import (
    FEWEST_SAMPLES,
    SAMPLES,
    narrow,
    read_samples,
    size_of,
    tally,
)
from hdtool.runtime.stores.history.log_search import LONGEST_MATCH
from hdtool.runtime.stores.model_store import known_as, rows_of

MODEL, CORPUS, RECYCLED = SourceName.MODEL.value, SourceName.CORPUS.value, SourceName.RECYCLED.value
LAST, TRAINED = SourceName.LAST.value, SourceName.HEADS.value
DRAFTING = -1
"""In place of an emitted token to learn from."""
MOST_OF_THE_REST = 0.9
"""The candidates of the last logit get at most this part of the probability that is left in the end."""


@compiled
def add_followers(
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


@compiled
def add_recycled(
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


@compiled
def add_heads(work: Any, weights: Any, heads: Any, node: int, left: float, floor: float, truth: int) -> float:
    """Add the predictions of the trained head for this depth; return what is left."""
    head = place_after(heads, work.depths[node])
    if head < 0:
        return left
    evidence = heads.tokens[head], heads.shares[head]
    certainty: Any = SIZES * heads.shares[head, 0] // ALL_OF_HEADS
    bucket = 3 * min(SIZES - 1, certainty) + ONE
    return _weigh(work, weights, TRAINED, HEADS_ORDERS + head, evidence, ALL_OF_HEADS, bucket, left, floor, truth)


@compiled
def add_plugins(work: Any, weights: Any, plugins: Any, node: int, left: float, floor: float, truth: int) -> float:
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


@compiled
def add_last(work: Any, weights: Any, last: Any, left: float, floor: float, truth: int) -> None:
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


@compiled
def add_model(
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


@compiled
def add_corpus(
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


@compiled
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
