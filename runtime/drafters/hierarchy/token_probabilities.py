"""Probabilities of the tokens after a node, estimated from the evidence of all sources by learned weights.

The estimate goes from the highest n-gram order to the lowest; each order gets a share of the remaining probability:

    P(token) += left * weight * count(token) / total;  left *= 1 - weight

After each emitted token, every order is credited with its part of the estimate: one step of expectation maximization.

Two adjustments follow. Recency: texts reuse their own words, so a token that occurred lately is more probable than
n-gram counts predict, and one that never occurred is less probable (cache language models; Kuhn and De Mori, 1990).
Known draws: with a seed, a token's time in the exponential race is known in advance, as it does not depend on the
model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hdtool.runtime.core.acceptance_rates import learn_rate
from hdtool.runtime.core.exponential_race import stream_start, time_of
from hdtool.runtime.drafters.hierarchy.compiled_source import (
    CANDIDATE_SLOTS,
    DRAFTING,
    MAX_CANDIDATES,
    MAX_WEIGHT_ROWS,
    WEIGHTS_AT,
    CompiledSource,
    record_at,
    work_at,
)
from hdtool.runtime.kernels.compiled import Array, compiled
from hdtool.runtime.settings.draft_sources import SourceId
from hdtool.runtime.stores.context_table import latest_position

EVIDENCE_SIZES = 8
ONE_TOKEN, FEW_TOKENS, MANY_TOKENS = range(3)
"""Spread of the evidence: over one token, over at most a quarter as many tokens as occurrences, or over more."""
PRIOR_OBSERVATIONS = 20.0
"""Weight of the prior, in observations."""
WEIGHT_WINDOW = 100.0
"""Number of observations that a weight averages over; small, because answers differ from question to question."""
UNSEEN_SHARE = 1 / 32_000
"""Share of a single token in the probability that is left after all orders; it suits vocabularies of any size."""
NEGLIGIBLE_PROB = 1e-6
RECENCY = (
    (0.42, 0.47, 0.37, 0.93),  # the token never occurred
    (0.51, 0.72, 1.13, 1.13),  # it is the last token
    (0.78, 0.74, 0.95, 1.04),  # it occurred 2 or 3 tokens ago, and so on by doubling
    (0.74, 1.09, 1.90, 1.36),
    (0.79, 1.24, 2.44, 2.30),
    (0.87, 1.38, 2.31, 2.65),
    (0.85, 1.24, 1.88, 2.98),
    (0.67, 0.83, 1.53, 2.20),
    (0.55, 0.60, 1.06, 1.95),
    (0.61, 0.50, 0.94, 1.17),
    (0.70, 0.61, 0.68, 0.95),
    (0.70, 0.61, 0.68, 0.95),  # 1,024 or more tokens ago; too few conversations are that long to fit this row
)
"""Factors by class of distance (row) and probability (column); only ratios matter (``tests/benchmarks/recency.py``)."""

WEIGHTS = np.dtype(
    [
        ("weight", np.float64, (MAX_WEIGHT_ROWS, 3 * EVIDENCE_SIZES)),
        ("credit", np.float64, (MAX_WEIGHT_ROWS, 3 * EVIDENCE_SIZES)),
        ("used", np.float64, (MAX_WEIGHT_ROWS, 3 * EVIDENCE_SIZES)),
        ("recency", np.float64, (len(RECENCY), len(RECENCY[0]))),  # a copy of RECENCY, which is not learned
    ],
    align=True,
)


def rows_of_weights(sources: Sequence[CompiledSource]) -> dict[SourceId, slice]:
    """Return each source's rows of weights, one for each n-gram order; sources with the same name share rows."""
    rows, free = dict[SourceId, slice](), 0
    for source in sources:
        if source.name not in rows:
            rows[source.name] = slice(free, free + source.prior.orders)
            free += source.prior.orders
    assert free <= MAX_WEIGHT_ROWS
    return rows


def new_weights(sources: Sequence[CompiledSource]) -> Array:
    """Return the initial weights of a drafter, in a ``WEIGHTS`` record."""
    memory, rows = np.zeros(1, WEIGHTS), rows_of_weights(sources)
    weight = memory["weight"][0]
    for source in sources:
        prior = source.prior
        for size in range(EVIDENCE_SIZES):
            single_weight = 1 - prior.remainder * prior.decay**size
            weight[rows[source.name], 3 * size : 3 * size + 3] = single_weight, prior.few, prior.many
    memory["credit"], memory["used"], memory["recency"] = weight * PRIOR_OBSERVATIONS, PRIOR_OBSERVATIONS, RECENCY
    return memory


@compiled
def weights_at(records_at: int) -> Any:
    return record_at(records_at, WEIGHTS_AT, WEIGHTS)


@compiled
def evidence_bucket(total: Any, spread: int) -> int:
    """Return the weight bucket for evidence, by ``spread`` and by the number of binary digits of ``total``."""
    size, left = 0, total
    while left >= 2 and size < EVIDENCE_SIZES - 1:
        left >>= 1
        size += 1
    return 3 * size + spread


@compiled
def spread_of(total: Any, distinct: Any) -> int:
    return ONE_TOKEN if distinct <= 1 else FEW_TOKENS if distinct * 4 <= total else MANY_TOKENS


@compiled
def share_bucket(share: Any, share_unit: int) -> int:
    """Return the weight bucket for a ranking, given the ``share`` of its best token.

    ``share_unit`` is the sum of all shares.
    """
    certainty: Any = EVIDENCE_SIZES * np.int64(share) // share_unit
    return 3 * min(EVIDENCE_SIZES - 1, certainty)  # type: ignore[no-any-return]


@compiled
def learn(weights: Any, work: Any) -> None:
    """Credit each order with its share of the estimate for the emitted token, and update its weight."""
    left, estimate = 1.0, 0.0
    for turn in range(work.used):
        weight = weights.weight[work.orders[turn], work.buckets[turn]]
        work.explained[turn] = left * weight * work.shares[turn]
        estimate += work.explained[turn]
        left *= 1 - weight
    estimate += left * UNSEEN_SHARE
    left = 1.0
    for turn in range(work.used):
        order, bucket = work.orders[turn], work.buckets[turn]
        credit = work.explained[turn] / estimate
        learn_rate(weights.credit, weights.used, (order, bucket), credit, left, WEIGHT_WINDOW)
        weights.weight[order, bucket] = weights.credit[order, bucket] / weights.used[order, bucket]
        left -= credit
        if left < NEGLIGIBLE_PROB:
            break


DISTANCE_CLASSES = len(RECENCY)
"""Number of distance classes: never, 1 token ago, 2 or 3, 4 to 7, and so on by doubling; the last is unbounded."""
PROB_CLASS_BOUNDS = (0.1, 0.01, 0.001)
"""Lower bounds of the probability classes; the last class is below all of them."""
MIN_RACE_TIME = 1e-12
"""Lower bound on a token's time in the exponential race, since a drawn time may be 0."""


@compiled
def contribute(
    records_at: int, source: int, row: int, tokens: Array, counts: Array, read: int, bucket: int, left: float
) -> float:
    """Add an order's evidence to the candidates; return the probability that is left to lower orders.

    ``row`` and ``bucket`` select the weight; ``tokens`` occurred ``counts`` times among ``read`` observations. If the
    estimate serves to learn from an emitted token, the token's share is recorded, and no candidate changes.
    """
    work = work_at(records_at)
    weight = weights_at(records_at).weight[row, bucket]
    if work.truth == DRAFTING:
        unit, floor = left * weight / read, work.floor
        # No count exceeds ``read``, so an order whose whole part is below the floor adds nothing.
        for index in range(len(tokens) if left * weight >= floor else 0):
            part = unit * min(np.int64(counts[index]), read)
            # A damaged file may hold tokens outside the vocabulary.
            if part >= floor and 0 <= tokens[index] < work.vocabulary:
                add_probability(work, source, np.int64(tokens[index]), part)
    else:
        share = 0.0
        for index in range(len(tokens)):
            if tokens[index] == work.truth:
                count: Any = np.int64(counts[index])
                share = max(0, min(count, read)) / read
        work.orders[work.used], work.buckets[work.used], work.shares[work.used] = row, bucket, share
        work.used += 1
    return left * (1 - weight)  # type: ignore[no-any-return]


@compiled
def add_probability(work: Any, source: int, token: Any, part: float) -> None:
    """Add ``part`` to the probability of a token; a token that is not a candidate yet becomes one if there is room."""
    slot = _slot_of(work, token)
    if _is_taken(work, slot):
        index = work.slots[slot] & (MAX_CANDIDATES - 1)
        work.chances[index] += part
        work.parts[index, source] += part
    elif work.size < MAX_CANDIDATES:
        index = work.size
        work.slots[slot] = work.round * MAX_CANDIDATES + index
        work.candidates[index], work.chances[index] = token, part
        work.parts[index, :] = 0.0
        work.parts[index, source] = part
        work.size += 1


@compiled
def candidate_index(work: Any, token: Any) -> int:
    """Return the index of a token among the candidates, or -1 if it is not one of them."""
    slot = _slot_of(work, token)
    return int(work.slots[slot] & (MAX_CANDIDATES - 1)) if _is_taken(work, slot) else -1


@compiled
def total_probability(work: Any) -> float:
    """Return the sum of the candidates' probabilities."""
    sum_of_all = 0.0
    for index in range(work.size):
        sum_of_all += work.chances[index]
    return sum_of_all


@compiled
def rescale(work: Any, sum_of_all: float) -> None:
    """Scale all probabilities so that they sum to ``sum_of_all``."""
    if work.size > 0:
        factor = sum_of_all / total_probability(work)
        for index in range(work.size):
            work.chances[index] *= factor


@compiled
def _slot_of(work: Any, token: Any) -> Any:
    """Return the hash slot of a token if it is a candidate, or else the free slot where it belongs."""
    slot = (token * 40503) & (CANDIDATE_SLOTS - 1)
    while _is_taken(work, slot) and work.candidates[work.slots[slot] & (MAX_CANDIDATES - 1)] != token:
        slot = (slot + 1) & (CANDIDATE_SLOTS - 1)
    return slot


@compiled
def _is_taken(work: Any, slot: Any) -> Any:
    """Return True if a slot was filled for the current node."""
    return work.slots[slot] >= work.round * MAX_CANDIDATES


@compiled
def weigh_recency(work: Any, gains: Any, table: Any, node: int) -> None:
    """Multiply the probability of each candidate after a node by the factor for its recency, preserving the sum.

    Small probabilities change the most, as they rest on few counts.
    """
    next_position = table.end + work.depths[node]
    for index in range(work.size):
        position = latest_position(table, work.candidates[index])
        work.recency[index] = 0 if position < 0 else distance_class(next_position - position)
    before = total_probability(work)
    for index in range(work.size):
        work.chances[index] *= gains[work.recency[index], prob_class(work.chances[index])]
    rescale(work, before)


@compiled
def distance_class(distance: int) -> int:
    """Return the class of a distance: its number of binary digits, at most ``DISTANCE_CLASSES - 1``."""
    digits = 0
    while distance > 0 and digits < DISTANCE_CLASSES - 1:
        distance >>= 1
        digits += 1
    return digits


@compiled
def prob_class(prob: float) -> int:
    index = 0
    while index < len(PROB_CLASS_BOUNDS) and prob < PROB_CLASS_BOUNDS[index]:
        index += 1
    return index


@compiled
def weigh_draws(work: Any, node: int) -> None:
    """Divide the probabilities after a node by the square roots of the tokens' exponential-race times, and normalize.

    Exact probabilities would determine the winner of the race. With estimates, the inverse square root fits best.
    Tokens that are not candidates count together, with the square root of the probability left to them.
    """
    start = stream_start(work.seed, work.position + work.depths[node])
    sum_of_all = np.sqrt(max(0.0, 1.0 - total_probability(work)))
    for index in range(work.size):
        work.chances[index] /= np.sqrt(max(MIN_RACE_TIME, time_of(start, work.candidates[index])))
        sum_of_all += work.chances[index]
    for index in range(work.size):
        work.chances[index] /= sum_of_all
