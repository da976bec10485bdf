"""What may follow a node, and how likely: the evidence of all sources in one estimate."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from hdtool.runtime.drafters.hierarchy.candidates import put
from hdtool.runtime.drafters.hierarchy.level_weights import (
    CONTEXT_LEVELS,
    COPIED_LEVELS,
    CORPUS_LEVELS,
    FEW,
    HEADS_LEVELS,
    MANY,
    MODEL_LEVELS,
    ONE,
    RECYCLED_LEVELS,
    SIZES,
    bucket_of,
)
from hdtool.runtime.drafters.hierarchy.ranking_agreement import agree
from hdtool.runtime.drafters.hierarchy.sources.context_table import CHAINS, LONG, LONGEST_MATCH, SHORT, recent
from hdtool.runtime.drafters.hierarchy.sources.corpus_evidence import (
    FEWEST_SAMPLES,
    LONGEST_RANGE,
    SAMPLES,
    narrow,
    read_samples,
    size_of,
    tally,
)
from hdtool.runtime.drafters.hierarchy.sources.heads_evidence import WHOLE as ALL_OF_HEADS
from hdtool.runtime.drafters.hierarchy.sources.model_evidence import fetch, known_as, rows_of
from hdtool.runtime.drafters.hierarchy.sources.positions_ahead import place_behind
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

TREE, CONTEXT, MODEL = SourceName.NONE.value, SourceName.CONTEXT.value, SourceName.MODEL.value
CORPUS, RECYCLED = SourceName.CORPUS.value, SourceName.RECYCLED.value
COPIED, LAST, TRAINED = SourceName.COPIED.value, SourceName.LAST.value, SourceName.HEADS.value
NO_TRUTH = -1
WORTH_A_SEARCH = 5.0
"""The corpus costs the most, and is asked only where so many times the least that matters is open."""
BEFORE_ORDER = 3
"""Trained heads are asked before the levels that know so many tokens."""
MOST_OF_THE_REST = 0.9
"""Of what no level has explained, the candidates of the last logit get at most this part."""

Ints = npt.NDArray[Any]


@njit(cache=True, nogil=True)
def expand(corpus: Ints, at: Ints, node: int, least: float, floor: float, truth: int) -> None:
    """Ask the levels, the longest first, until less than ``least`` is open to those behind.

    Fills the candidates, leaving out contributions below ``floor``. With a ``truth``, the token that came,
    notes instead what each level said about it.
    """
    memory = memory_at(at)
    work, weights, table, model = memory.work[0], memory.weights[0], memory.table[0], memory.model[0]
    recycled, copied, last = memory.recycled[0], memory.copied[0], memory.last[0]
    _start(work, node)
    deepest = LONGEST_PREFIX if node == 0 else min(LONGEST_PREFIX, work.known[work.parents[node]] + 1)
    lap(work, TREE)
    if work.has[MODEL]:
        fetch(model, work.marks, deepest)
        lap(work, MODEL)
    else:
        deepest = 0
    if copied.longest > 0:
        fetch_rankings(copied, work.tails[node, LONGEST_MATCH - 1], work.marks)
        lap(work, COPIED)
    if recycled.longest > 0:
        fetch_rankings(recycled, work.tails[node, LONGEST_MATCH - 1], work.marks)
        lap(work, RECYCLED)
    left_open = 1.0
    lowest = LONGEST_RANGE + 1
    for order in range(LONGEST_MATCH, 0, -1):
        if order == BEFORE_ORDER and memory.heads[0].count > 0:
            left_open = _ask_heads(work, weights, memory.heads[0], node, left_open, floor, truth)
            lap(work, TRAINED)
            if left_open < least:
                break
        if work.has[CONTEXT]:
            left_open = _ask_context(work, weights, table, node, order, left_open, floor, truth)
            lap(work, CONTEXT)
            if left_open < least:
                break
        if order <= copied.longest:
            left_open = _ask_kept(work, weights, copied, COPIED, node, order, left_open, floor, truth)
            lap(work, COPIED)
            if left_open < least:
                break
        if order <= recycled.longest:
            left_open = _ask_kept(work, weights, recycled, RECYCLED, node, order, left_open, floor, truth)
            lap(work, RECYCLED)
            if left_open < least:
                break
        if order <= deepest:
            left_open = _ask_model(work, weights, model, node, order, left_open, floor, truth)
            lap(work, MODEL)
            if left_open < least:
                break
        if work.has[CORPUS] and order <= LONGEST_RANGE and left_open >= WORTH_A_SEARCH * least:
            lowest = order
            left_open = _ask_corpus(corpus, at, node, order, left_open, least, floor, truth)
            lap(work, CORPUS)
            if left_open < least:
                break
    if node == 0 and last.count > 0 and left_open >= least:
        _ask_last(work, weights, last, left_open, floor, truth)
        lap(work, LAST)
    if truth == NO_TRUTH and memory.near[0].count > 0:
        agree(work, weights.gains, memory.near[0], node)
        lap(work, RECYCLED)
    if node > 0:
        memory.ranges[0].lowest[node] = lowest
    if work.known[node] == 0 and left_open < least:
        work.known[node] = LONGEST_PREFIX  # it was not asked


@njit(cache=True, nogil=True)
def _start(work: Any, node: int) -> None:
    work.size = work.asked = work.known[node] = 0
    work.last_open = work.last_part = 0.0
    work.round += 1
    mark = np.uint64(0)
    for length in range(1, LONGEST_MATCH + 1):
        mark = mixed(mark, work.tails[node, LONGEST_MATCH - length])
        work.marks[length] = mark


@njit(cache=True, nogil=True)
def _ask_context(
    work: Any, weights: Any, table: Any, node: int, order: int, left_open: float, floor: float, truth: int
) -> float:
    """What remains open behind a level of the context."""
    if order == LONGEST_MATCH or order == CHAINS[LONG] - 1:
        # The places that share three tokens, and then all that share one.
        chain = LONG if order == LONGEST_MATCH else SHORT
        mark = work.marks[CHAINS[chain]]
        work.places = recent(table, work.tails[node], mark, chain, order, work.followers, work.lengths)
        work.total = work.distinct = 0
    _count(work, order)
    if work.total == 0:
        return left_open
    said = work.evidence[: work.distinct], work.counts[: work.distinct]
    level, bucket = CONTEXT_LEVELS + order - 1, bucket_of(work.total, work.distinct)
    return _weigh(work, weights, CONTEXT, level, said, work.total, bucket, left_open, floor, truth)


@njit(cache=True, nogil=True)
def _count(work: Any, order: int) -> None:
    """Add to the evidence what followed the places that match exactly ``order`` tokens."""
    for place in range(work.places):
        if work.lengths[place] == order:
            token = work.followers[place]
            at = 0
            while at < work.distinct and work.evidence[at] != token:
                at += 1
            if at == work.distinct:
                work.evidence[at], work.counts[at] = token, 0
                work.distinct += 1
            work.counts[at] += 1
            work.total += 1


@njit(cache=True, nogil=True)
def _ask_kept(
    work: Any,
    weights: Any,
    table: Any,
    source: int,
    node: int,
    order: int,
    left_open: float,
    floor: float,
    truth: int,
) -> float:
    """What remains open behind what the target once thought after the same tokens."""
    row = row_of(table, work.tails[node, LONGEST_MATCH - 1], work.marks[order], order)
    if row < 0:
        return left_open
    kept = rankings_of(table)[row]
    if kept.shares[0] == 0 or kept.tag != tag_of(work.marks[order]):
        return left_open
    said = kept.tokens, kept.shares
    level = (COPIED_LEVELS if source == COPIED else RECYCLED_LEVELS) + order - 1
    # How sure it was, and how often it would have said the same, take the place of how much evidence there is.
    sure: Any = SIZES * np.int64(kept.shares[0]) // WHOLE
    spread = ONE if kept.run >= LONG_RUN else FEW if kept.run > 0 else MANY
    bucket = 3 * min(SIZES - 1, sure) + spread
    return _weigh(work, weights, source, level, said, WHOLE, bucket, left_open, floor, truth)


@njit(cache=True, nogil=True)
def _ask_heads(work: Any, weights: Any, heads: Any, node: int, left_open: float, floor: float, truth: int) -> float:
    """What remains open behind the trained head that speaks of this depth."""
    head = place_behind(heads, work.depths[node])
    if head < 0:
        return left_open
    said = heads.tokens[head], heads.shares[head]
    sure: Any = SIZES * heads.shares[head, 0] // ALL_OF_HEADS
    bucket = 3 * min(SIZES - 1, sure) + ONE
    return _weigh(work, weights, TRAINED, HEADS_LEVELS + head, said, ALL_OF_HEADS, bucket, left_open, floor, truth)


@njit(cache=True, nogil=True)
def _ask_last(work: Any, weights: Any, last: Any, left_open: float, floor: float, truth: int) -> None:
    """Give each candidate of the last logit its part of what no level has explained."""
    whole = 0.0
    for place in range(last.count):
        whole += weights.rates[last.kinds[place]]
    unit = left_open / max(1.0, whole / MOST_OF_THE_REST)
    work.last_open = left_open
    for place in range(last.count):
        token, kind = last.tokens[place], last.kinds[place]
        part = unit * weights.rates[kind]
        if truth == NO_TRUTH:
            if part >= floor and 0 <= token < work.vocabulary:
                put(work, LAST, token, part)
        elif token == truth:
            work.last_part, work.last_kind = part, kind


@njit(cache=True, nogil=True)
def _ask_model(
    work: Any, weights: Any, model: Any, node: int, order: int, left_open: float, floor: float, truth: int
) -> float:
    """What remains open behind a level of the model store."""
    first, stop, total, distinct = known_as(model, work.marks[order])
    if total == 0:
        return left_open
    work.known[node] = max(work.known[node], order)
    rows = rows_of(model)[first:stop]
    said = rows[:, 0], rows[:, 1]
    level = MODEL_LEVELS + order - 1
    return _weigh(work, weights, MODEL, level, said, total, bucket_of(total, distinct), left_open, floor, truth)


@njit(cache=True, nogil=True)
def _ask_corpus(
    corpus: Ints, at: Ints, node: int, order: int, left_open: float, least: float, floor: float, truth: int
) -> float:
    """What remains open behind a level of the corpus."""
    memory = memory_at(at)
    work, ranges = memory.work[0], memory.ranges[0]
    if node > 0:
        narrow(corpus, ranges, work.tails[node], node, work.parents[node], order)
    found = size_of(ranges, node, order)
    if found == 0:
        return left_open
    if ranges.read[node, order] == 0:
        # Where little more is open than matters, only the commonest followers do.
        read_samples(corpus, ranges, node, order, found, max(FEWEST_SAMPLES, min(SAMPLES, int(left_open / least))))
    distinct = tally(ranges, node, order, work.corpus_evidence, work.corpus_counts)
    if distinct == 0:
        return left_open
    said = work.corpus_evidence[:distinct], work.corpus_counts[:distinct]
    read, level = ranges.read[node, order], CORPUS_LEVELS + order - 1
    bucket = bucket_of(found, distinct)
    return _weigh(work, memory.weights[0], CORPUS, level, said, read, bucket, left_open, floor, truth)


@njit(cache=True, nogil=True)
def _weigh(
    work: Any,
    weights: Any,
    source: int,
    level: int,
    said: tuple[Ints, Ints],
    read: int,
    bucket: int,
    left_open: float,
    floor: float,
    truth: int,
) -> float:
    """Give each token of a level its part of what is open, and return what stays open.

    ``said`` are tokens and counts, of ``read`` places in all; ``bucket`` is the kind of evidence.
    """
    tokens, counts = said
    weight = weights.weight[level, bucket]
    if truth == NO_TRUTH:
        unit = left_open * weight / read
        for at in range(len(tokens)):
            part = unit * min(np.int64(counts[at]), read)
            # A damaged file must not give a token that no model has.
            if part >= floor and 0 <= tokens[at] < work.vocabulary:
                put(work, source, np.int64(tokens[at]), part)
    else:
        share = 0.0
        for at in range(len(tokens)):
            if tokens[at] == truth:
                count: Any = np.int64(counts[at])
                share = max(0, min(count, read)) / read
        work.levels[work.asked], work.buckets[work.asked], work.shares[work.asked] = level, bucket, share
        work.asked += 1
    return left_open * (1 - weight)  # type: ignore[no-any-return]
