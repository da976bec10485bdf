"""Candidate tokens after a node: their probabilities, how evidence adds to them, and learned weights.

Every function gets ``at``, the address of an array of addresses, through which it reaches all records.

The estimate goes from the longest n-gram order to the shortest; each gets its share of the remaining probability:

    P(token) += left * weight * count(token) / total;  left *= 1 - weight

After each emitted token, every order is credited with its part of the estimate: one step of expectation maximization.

Recency: texts reuse their own words, so a token that occurred lately is more probable than n-gram counts predict, and
one that never occurred is less probable (cache language models; Kuhn and De Mori, 1990). Known draws: with a seed, a
token's time in the exponential race does not depend on the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import types

from hdtool.runtime.kernels.compiled import Array, address_of, array_at, caller_of, compiled
from hdtool.runtime.sampling.draws import stream_start, time_of
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.stores.corpus_index import MAX_SAMPLES, RANGE_ROWS
from hdtool.runtime.stores.live_tables import latest_place
from hdtool.runtime.stores.token_log import MAX_MATCH_TOKENS
from hdtool.runtime.tree import LARGEST_TREE

WORK_AT, WEIGHTS_AT, NEAR_AT, TABLE_AT = SourceName.NONE.value, *range(len(SourceName), len(SourceName) + 3)
"""Places of addresses; the record of a source has the number of the source."""
ADDRESSES = TABLE_AT + 1
MAX_CANDIDATES = 512
CANDIDATE_SLOTS = 2 * MAX_CANDIDATES
MAX_HASHED_TOKENS = 8
"""Most last tokens of a node that are hashed."""
MAX_WEIGHT_ROWS, MAX_SOURCE_ROWS = 128, 32
"""Rows of learned weights, and rows of the table of sources, at most."""
DRAFTING = RESTART = -1
"""In place of an emitted token: an estimate is for a tree, or another conversation begins."""

WORKSPACE = np.dtype(
    [
        # The nodes, a row each; row 0 is the last emitted token.
        ("tokens", np.int64, RANGE_ROWS),
        ("parents", np.int32, RANGE_ROWS),
        ("sources", np.uint8, RANGE_ROWS),
        ("probs", np.float64, RANGE_ROWS),  # that the target takes the whole path
        ("depths", np.int64, RANGE_ROWS),
        ("tails", np.int64, (RANGE_ROWS, MAX_MATCH_TOKENS)),  # the last tokens down to the node
        ("known", np.int64, RANGE_ROWS),  # the longest match in the model store
        ("cut", np.int64, RANGE_ROWS),  # whether too little was left for the shortest orders
        ("above", np.int32, LARGEST_TREE),  # parents as a tree has them: the root is not counted
        # The best paths, most probable first: those that are nodes already, and those that may become nodes.
        ("best_probs", np.float64, LARGEST_TREE),
        ("best_keys", np.int64, LARGEST_TREE),  # source, parent and token in one number
        # Tokens that the tree begins with, as they are almost certain.
        ("expected", np.int64),
        ("chain", np.int64, LARGEST_TREE),
        # What may follow one node.
        ("size", np.int64),
        ("candidates", np.int64, MAX_CANDIDATES),
        ("chances", np.float64, MAX_CANDIDATES),
        ("recency", np.int64, MAX_CANDIDATES),  # the class of its distance from its latest place in the conversation
        ("parts", np.float64, (MAX_CANDIDATES, len(SourceName))),  # of each chance, by source
        ("round", np.int64),  # slots of earlier rounds are empty
        ("slots", np.int64, CANDIDATE_SLOTS),  # a hash table of candidates
        ("hashed", np.int64),  # how many last tokens are hashed
        ("marks", np.uint64, MAX_HASHED_TOKENS + 1),  # hashes of so many last tokens
        # Evidence of the order in use.
        ("corpus_evidence", np.int64, MAX_SAMPLES),
        ("corpus_counts", np.int64, MAX_SAMPLES),
        # What an estimate is for: a tree, or learning from an emitted token.
        ("truth", np.int64),  # the emitted token, or DRAFTING
        ("min_left", np.float64),  # evidence is used while so much probability is left
        ("floor", np.float64),  # smaller contributions are left out
        # The evidence of each order for the emitted token.
        ("used", np.int64),
        ("orders", np.int64, MAX_WEIGHT_ROWS),
        ("buckets", np.int64, MAX_WEIGHT_ROWS),
        ("shares", np.float64, MAX_WEIGHT_ROWS),
        ("explained", np.float64, MAX_WEIGHT_ROWS),
        # What the times of draws depend on.
        ("is_sampled", np.int64),
        ("seed", np.uint64),
        ("position", np.int64),  # of the token after the root
        # What is in use.
        ("vocabulary", np.int64),  # no source may draft a token outside it
        ("rows", np.int64),  # of the table of sources
        ("has_context", np.int64),
        # The time of a draft that is timed, in nanoseconds by source; NONE is the tree itself.
        ("timed", np.int64),
        ("laps", np.int64, len(SourceName)),
        ("since", np.int64),
        ("instant", np.int64, 2),  # seconds and nanoseconds, as the clock gives them
        ("instant_at", np.int64),  # its address
    ],
    align=True,
)
SOURCE_ROW = np.dtype([(name, np.int64) for name in ("source", "first", "lowest", "highest", "find", "weigh", "move")])
"""A source in the table: its number, its first row of weights, the n-gram orders that it has evidence of at the node in
hand, and the addresses of its functions; 0 for none."""
FIND, MOVE = types.int64(types.int64, types.int64), types.void(types.int64, types.int64, types.int64)
WEIGH = types.float64(*[types.int64] * 4, types.float64)


class Prior(NamedTuple):
    """The weights that a source begins with, the same for all of its n-gram orders.

    Evidence of one token leaves a ``remainder`` to shorter orders, which each doubling of the evidence multiplies by
    ``decay``; evidence that names few or many tokens has a weight of its own.
    """

    orders: int
    remainder: float = 1.0
    decay: float = 1.0
    few: float = 0.0
    many: float = 0.0


class CompiledSource(NamedTuple):
    """A source of evidence: functions that compiled code calls by their addresses."""

    name: SourceName
    lowest: int
    """Its shortest n-gram order."""
    prior: Prior
    find: Callable[[int, int], int]
    """``find(at, node)``: begin with a node; returns the highest order with evidence, -1 for none."""
    weigh: Callable[[int, int, int, int, float], float]
    """``weigh(at, node, order, first, left)``: give tokens their parts of the probability that is ``left``, and return
    what is left then. ``first`` is the row of the source's weights."""
    move: Callable[[int, int, int], None] | None = None
    """``move(at, token, emitted)``: the root moves on by a token, which was emitted now or is part of the prompt."""

    def row(self, first: int) -> tuple[int, ...]:
        """The row of the table, with the first row of its weights."""
        move = address_of(self.move, MOVE) if self.move else 0
        return self.name.value, first, self.lowest, -1, address_of(self.find, FIND), address_of(self.weigh, WEIGH), move


call_find, call_weigh, call_move = caller_of(FIND), caller_of(WEIGH), caller_of(MOVE)


@compiled
def record_array_at(at: int, number: int, count: int, kind: Any) -> Array:
    """The records of a source, by its number, or those at one of the other places of addresses."""
    return array_at(array_at(at, ADDRESSES, np.int64)[number], count, kind)


@compiled
def record_at(at: int, number: int, kind: Any) -> Any:
    return record_array_at(at, number, 1, kind)[0]


@compiled
def work_at(at: int) -> Any:
    return record_at(at, WORK_AT, WORKSPACE)


@compiled
def table_at(at: int) -> Array:
    """The rows of the sources."""
    return record_array_at(at, TABLE_AT, MAX_SOURCE_ROWS, SOURCE_ROW)


@compiled
def move_all(at: int, token: int, emitted: int) -> None:
    """Have all sources follow when the root moves on."""
    table = table_at(at)
    for row in range(work_at(at).rows):
        if table[row].move:
            call_move(table[row].move, (at, token, emitted))


EVIDENCE_SIZES = 8
ONE_TOKEN, FEW_TOKENS, MANY_TOKENS = range(3)
"""How far the evidence spreads: one token, at most a quarter as many tokens as occurrences, or more."""
PRIOR_OBSERVATIONS = 20.0
"""Observations that the prior is worth."""
WEIGHT_WINDOW = 100.0
"""Observations that a weight averages over: answers change with the questions."""
UNSEEN_SHARE = 1 / 32_000
"""The share of a single token in the probability that is left in the end; it suits vocabularies of any size."""
NEGLIGIBLE_PROB = 1e-6
RECENCY = (
    (0.42, 0.47, 0.37, 0.93),  # the token never occurred,
    (0.51, 0.72, 1.13, 1.13),  # it is the last token,
    (0.78, 0.74, 0.95, 1.04),  # it occurred 2 or 3 tokens ago,
    (0.74, 1.09, 1.90, 1.36),
    (0.79, 1.24, 2.44, 2.30),
    (0.87, 1.38, 2.31, 2.65),
    (0.85, 1.24, 1.88, 2.98),
    (0.67, 0.83, 1.53, 2.20),
    (0.55, 0.60, 1.06, 1.95),
    (0.61, 0.50, 0.94, 1.17),
    (0.70, 0.61, 0.68, 0.95),
    (0.70, 0.61, 0.68, 0.95),  # or 1,024 and more; conversations that long were too few to fit
)
"""Gains by distance and by probability; only their ratios matter (``tests/benchmarks/recency.py``)."""

WEIGHTS = np.dtype(
    [
        ("weight", np.float64, (MAX_WEIGHT_ROWS, 3 * EVIDENCE_SIZES)),
        ("credit", np.float64, (MAX_WEIGHT_ROWS, 3 * EVIDENCE_SIZES)),
        ("used", np.float64, (MAX_WEIGHT_ROWS, 3 * EVIDENCE_SIZES)),
        ("recency", np.float64, (len(RECENCY), len(RECENCY[0]))),  # gains of candidates; not learned
    ],
    align=True,
)


def rows_of_weights(sources: Sequence[CompiledSource]) -> dict[SourceName, slice]:
    """The rows of weights of each source, one for each n-gram order."""
    rows, free = dict[SourceName, slice](), 0
    for source in sources:
        if source.name not in rows:
            rows[source.name] = slice(free, free + source.prior.orders)
            free += source.prior.orders
    assert free <= MAX_WEIGHT_ROWS
    return rows


def new_weights(sources: Sequence[CompiledSource]) -> Array:
    """The weights that a drafter begins with."""
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
def weights_at(at: int) -> Any:
    return record_at(at, WEIGHTS_AT, WEIGHTS)


@compiled
def evidence_bucket(total: Any, spread: int) -> int:
    """How much evidence there is, in powers of two, and how far it spreads."""
    size, left = 0, total
    while left >= 2 and size < EVIDENCE_SIZES - 1:
        left >>= 1
        size += 1
    return 3 * size + spread


@compiled
def spread_of(total: Any, distinct: Any) -> int:
    return ONE_TOKEN if distinct <= 1 else FEW_TOKENS if distinct * 4 <= total else MANY_TOKENS


@compiled
def share_bucket(share: Any, total_probability: int) -> int:
    """For rankings, the share of the best token takes the place of the amount of evidence."""
    certainty: Any = EVIDENCE_SIZES * np.int64(share) // total_probability
    return 3 * min(EVIDENCE_SIZES - 1, certainty)  # type: ignore[no-any-return]


@compiled
def learn(weights: Any, work: Any) -> None:
    """Credit the orders that were used with their shares of the estimate of the emitted token."""
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
        fading = min(1.0, WEIGHT_WINDOW / weights.used[order, bucket])
        weights.credit[order, bucket] = weights.credit[order, bucket] * fading + credit
        weights.used[order, bucket] = weights.used[order, bucket] * fading + left
        weights.weight[order, bucket] = weights.credit[order, bucket] / weights.used[order, bucket]
        left -= credit
        if left < NEGLIGIBLE_PROB:
            break


DISTANCE_CLASSES = len(RECENCY)
"""Classes of distances: never, 1 token ago, 2 or 3, 4 to 7, and so on by doubling; the last one has no end."""
PROB_CLASS_BOUNDS = (0.1, 0.01, 0.001)
"""Bounds of the classes of probabilities."""
MIN_RACE_TIME = 1e-12
"""Least time of a token in the race: drawn times may be 0."""


@compiled
def contribute(
    at: int, source: int, row: int, tokens: Array, counts: Array, read: int, bucket: int, left: float
) -> float:
    """Give each token of an order its part of what is left, and return what is left then.

    ``row`` and ``bucket`` select the weight; ``tokens`` were counted among so many that were ``read``. When the
    estimate is to learn from an emitted token, that token's share is noted instead.
    """
    work = work_at(at)
    weight = weights_at(at).weight[row, bucket]
    if work.truth == DRAFTING:
        unit, floor = left * weight / read, work.floor
        # No count exceeds ``read``, so nothing of a weak order counts.
        for place in range(len(tokens) if left * weight >= floor else 0):
            part = unit * min(np.int64(counts[place]), read)
            # A damaged file may hold tokens outside the vocabulary.
            if part >= floor and 0 <= tokens[place] < work.vocabulary:
                add_probability(work, source, np.int64(tokens[place]), part)
    else:
        share = 0.0
        for place in range(len(tokens)):
            if tokens[place] == work.truth:
                count: Any = np.int64(counts[place])
                share = max(0, min(count, read)) / read
        work.orders[work.used], work.buckets[work.used], work.shares[work.used] = row, bucket, share
        work.used += 1
    return left * (1 - weight)  # type: ignore[no-any-return]


@compiled
def add_probability(work: Any, source: int, token: Any, part: float) -> None:
    """Add to the probability of a candidate."""
    slot = _slot_of(work, token)
    if _is_taken(work, slot):
        at = work.slots[slot] & (MAX_CANDIDATES - 1)
        work.chances[at] += part
        work.parts[at, source] += part
    elif work.size < MAX_CANDIDATES:
        at = work.size
        work.slots[slot] = work.round * MAX_CANDIDATES + at
        work.candidates[at], work.chances[at] = token, part
        work.parts[at, :] = 0.0
        work.parts[at, source] = part
        work.size += 1


@compiled
def candidate_index(work: Any, token: Any) -> int:
    """The index of a candidate, or -1."""
    slot = _slot_of(work, token)
    return int(work.slots[slot] & (MAX_CANDIDATES - 1)) if _is_taken(work, slot) else -1


@compiled
def total_probability(work: Any) -> float:
    """The sum of all probabilities."""
    sum_of_all = 0.0
    for at in range(work.size):
        sum_of_all += work.chances[at]
    return sum_of_all


@compiled
def rescale(work: Any, sum_of_all: float) -> None:
    """Multiply all probabilities by the same factor, so that this is their sum."""
    if work.size > 0:
        factor = sum_of_all / total_probability(work)
        for at in range(work.size):
            work.chances[at] *= factor


@compiled
def _slot_of(work: Any, token: Any) -> Any:
    """The slot of a candidate, or the free one where it would go."""
    slot = (token * 40503) & (CANDIDATE_SLOTS - 1)
    while _is_taken(work, slot) and work.candidates[work.slots[slot] & (MAX_CANDIDATES - 1)] != token:
        slot = (slot + 1) & (CANDIDATE_SLOTS - 1)
    return slot


@compiled
def _is_taken(work: Any, slot: Any) -> Any:
    """Return True if a slot has been filled in this round."""
    return work.slots[slot] >= work.round * MAX_CANDIDATES


@compiled
def weigh_recency(work: Any, gains: Any, table: Any, node: int) -> None:
    """Multiply the probability of each candidate after a node by the gain of its recency, and keep the sum.

    Small probabilities gain most, as few counts stand against it.
    """
    next_place = table.end + work.depths[node]
    for at in range(work.size):
        place = latest_place(table, work.candidates[at])
        work.recency[at] = 0 if place < 0 else distance_class(next_place - place)
    before = total_probability(work)
    for at in range(work.size):
        work.chances[at] *= gains[work.recency[at], prob_class(work.chances[at])]
    rescale(work, before)


@compiled
def distance_class(distance: int) -> int:
    """Its number of binary digits, as far as there are classes."""
    digits = 0
    while distance > 0 and digits < DISTANCE_CLASSES - 1:
        distance >>= 1
        digits += 1
    return digits


@compiled
def prob_class(prob: float) -> int:
    at = 0
    while at < len(PROB_CLASS_BOUNDS) and prob < PROB_CLASS_BOUNDS[at]:
        at += 1
    return at


@compiled
def weigh_draws(work: Any, node: int) -> None:
    """Divide the probability of each candidate after a node by the root of its time, and rescale.

    With exact probabilities the token with the shortest time would be known. Estimates are not exact: the inverse root
    fits best. All other tokens together have no time that is known: they keep the root of what is left to them.
    """
    start = stream_start(work.seed, work.position + work.depths[node])
    sum_of_all = np.sqrt(max(0.0, 1.0 - total_probability(work)))
    for at in range(work.size):
        work.chances[at] /= np.sqrt(max(MIN_RACE_TIME, time_of(start, work.candidates[at])))
        sum_of_all += work.chances[at]
    for at in range(work.size):
        work.chances[at] /= sum_of_all
