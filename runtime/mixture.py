"""What may follow a node, and how likely: the evidence of all sources in one estimate."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from hdtool.runtime.model_store import LONGEST_PREFIX, mixed
from hdtool.runtime.sources import SourceName
from hdtool.runtime.sources.context_table import CHAINS, LONG, LONGEST_MATCH, SHORT, recent
from hdtool.runtime.sources.corpus_levels import LONGEST_RANGE, narrow, read_samples, size_of, tally
from hdtool.runtime.sources.model_levels import known_as
from hdtool.runtime.weights import CONTEXT_LEVELS, CORPUS_LEVELS, MODEL_LEVELS, bucket_of
from hdtool.runtime.workspace import CANDIDATES, SLOTS, Memory

CONTEXT, MODEL, CORPUS = SourceName.CONTEXT.value, SourceName.MODEL.value, SourceName.CORPUS.value
NO_TRUTH = -1
WORTH_A_SEARCH = 3.0
"""The corpus costs the most, and is asked only where so many times the least that matters is open."""

Ints = npt.NDArray[Any]


@njit(cache=True, nogil=True)
def expand(memory: Memory, node: int, least: float, floor: float, truth: int) -> None:
    """Ask the levels, the longest first, until less than ``least`` is open to those behind.

    Fills the candidates, leaving out contributions below ``floor``. With a ``truth``, the token that came,
    notes instead what each level said about it.
    """
    work = memory.work[0]
    _start(work, node)
    left_open = 1.0
    places = total = distinct = 0
    deepest = LONGEST_PREFIX if node == 0 else min(LONGEST_PREFIX, work.known[work.parents[node]] + 1)
    known, lowest = 0, LONGEST_RANGE + 1
    for order in range(LONGEST_MATCH, 0, -1):
        if work.has[CONTEXT]:
            if order == LONGEST_MATCH or order == CHAINS[LONG] - 1:
                places = _places(memory, node, order)
                total = distinct = 0
            total, distinct = _count(work, order, places, total, distinct)
            if total > 0:
                level = CONTEXT_LEVELS + order - 1
                said = work.evidence[:distinct], work.counts[:distinct]
                left_open = _weigh(memory, CONTEXT, level, said, total, total, distinct, left_open, floor, truth)
                if left_open < least:
                    break
        if work.has[MODEL] and order <= deepest:
            first, stop, all_of_it, kinds = known_as(memory.model, work.marks[order])
            if all_of_it > 0:
                known = max(known, order)
                level = MODEL_LEVELS + order - 1
                rows = memory.model.rows[first:stop]
                said = rows[:, 0], rows[:, 1]
                left_open = _weigh(memory, MODEL, level, said, all_of_it, all_of_it, kinds, left_open, floor, truth)
                if left_open < least:
                    break
        if work.has[CORPUS] and order <= LONGEST_RANGE and left_open >= WORTH_A_SEARCH * least:
            lowest = order
            left_open = _ask_corpus(memory, node, order, left_open, floor, truth)
            if left_open < least:
                break
    if node > 0:
        memory.ranges.lowest[node] = lowest
    work.known[node] = known if known > 0 or left_open >= least else LONGEST_PREFIX


@njit(cache=True, nogil=True)
def _start(work: Any, node: int) -> None:
    work.size = work.asked = 0
    work.round += 1
    mark = np.uint64(0)
    for length in range(1, LONGEST_MATCH + 1):
        mark = mixed(mark, work.tails[node, LONGEST_MATCH - length])
        work.marks[length] = mark


@njit(cache=True, nogil=True)
def _places(memory: Memory, node: int, longest: int) -> int:
    """Find the places of the context for orders from ``longest`` down: those that share three tokens, then those of one."""
    chain = LONG if longest >= CHAINS[LONG] else SHORT
    work = memory.work[0]
    mark = work.marks[CHAINS[chain]]
    return recent(memory.table[0], work.tails[node], mark, chain, longest, work.followers, work.lengths)


@njit(cache=True, nogil=True)
def _count(work: Any, order: int, places: int, total: int, distinct: int) -> tuple[int, int]:
    """Add to the evidence what followed the places that match exactly ``order`` tokens."""
    for place in range(places):
        if work.lengths[place] == order:
            token = work.followers[place]
            at = 0
            while at < distinct and work.evidence[at] != token:
                at += 1
            if at == distinct:
                work.evidence[at], work.counts[at] = token, 0
                distinct += 1
            work.counts[at] += 1
            total += 1
    return total, distinct


@njit(cache=True, nogil=True)
def _ask_corpus(memory: Memory, node: int, order: int, left_open: float, floor: float, truth: int) -> float:
    """What remains open behind a level of the corpus."""
    shards, ranges, work = memory.shards, memory.ranges, memory.work[0]
    if node > 0:
        narrow(shards, ranges, work.tails[node], node, work.parents[node], order)
    found = size_of(ranges, node, order)
    if found == 0:
        return left_open
    if ranges.read[node, order] == 0:
        read_samples(shards, ranges, node, order, found)
    read = ranges.read[node, order]
    distinct = tally(shards, ranges, node, order, memory.work[0].corpus_evidence, memory.work[0].corpus_counts)
    if distinct == 0:
        return left_open
    said = work.corpus_evidence[:distinct], work.corpus_counts[:distinct]
    return _weigh(memory, CORPUS, CORPUS_LEVELS + order - 1, said, read, found, distinct, left_open, floor, truth)


@njit(cache=True, nogil=True)
def _weigh(
    memory: Memory,
    source: int,
    level: int,
    said: tuple[Ints, Ints],
    read: int,
    total: int,
    distinct: int,
    left_open: float,
    floor: float,
    truth: int,
) -> float:
    """Give each token of a level its part of what is open, and return what stays open.

    ``said`` are tokens and counts, of ``read`` places in all; the level knows of ``total``.
    """
    work, weights = memory.work[0], memory.weights[0]
    tokens, counts = said
    bucket = bucket_of(total, distinct)
    weight = weights.weight[level, bucket]
    if truth == NO_TRUTH:
        unit = left_open * weight / read
        for at in range(len(tokens)):
            part = unit * min(np.int64(counts[at]), read)
            # A damaged file must not give a token that no model has.
            if part >= floor and (source != MODEL or 0 <= tokens[at] < memory.vocabulary):
                _put(work, source, np.int64(tokens[at]), part)
    else:
        share = 0.0
        for at in range(len(tokens)):
            if tokens[at] == truth:
                share = max(0, min(np.int64(counts[at]), read)) / read
        work.levels[work.asked], work.buckets[work.asked], work.shares[work.asked] = level, bucket, share
        work.asked += 1
    return left_open * (1 - weight)


@njit(cache=True, nogil=True)
def _put(work: Any, source: int, token: int, part: float) -> None:
    """Add to the chance of a candidate."""
    slot = (token * 40503) & (SLOTS - 1)
    while work.slots[slot] >= work.round * CANDIDATES:
        at = work.slots[slot] & (CANDIDATES - 1)
        if work.candidates[at] == token:
            work.chances[at] += part
            work.parts[at, source] += part
            return
        slot = (slot + 1) & (SLOTS - 1)
    if work.size < CANDIDATES:
        at = work.size
        work.slots[slot] = work.round * CANDIDATES + at
        work.candidates[at], work.chances[at] = token, part
        work.parts[at, :] = 0.0
        work.parts[at, source] = part
        work.size += 1
