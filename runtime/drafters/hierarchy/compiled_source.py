"""Sources of evidence that compiled code calls, and the records that it finds for them by their addresses.

A parameter ``records_at`` is the address of an array that holds the addresses of all records.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import types

from hdtool.runtime.core.tree import LARGEST_TREE
from hdtool.runtime.kernels.compiled import Array, address_of, array_at, caller_of, compiled
from hdtool.runtime.settings.draft_sources import SourceId
from hdtool.runtime.stores.suffix_ranges import MAX_SAMPLES, RANGE_ROWS
from hdtool.runtime.stores.token_log import MAX_MATCH_TOKENS

WORK_AT, WEIGHTS_AT, NEAR_AT, TABLE_AT = SourceId.NONE.value, *range(len(SourceId), len(SourceId) + 3)
"""Indices into the array of addresses, which holds the address of each source's record at the source's number."""
ADDRESSES = TABLE_AT + 1
MAX_CANDIDATES = 512
CANDIDATE_SLOTS = 2 * MAX_CANDIDATES
MAX_HASHED_TOKENS = 8
"""Largest number of a node's last tokens that are hashed."""
MAX_WEIGHT_ROWS, MAX_SOURCE_ROWS = 128, 32
"""Maximum number of rows of learned weights, and of rows in the table of sources."""
DRAFTING = RESTART = -1
"""Passed in place of an emitted token: ``DRAFTING`` if an estimate serves to grow a tree, ``RESTART`` if another
conversation begins."""

WORKSPACE = np.dtype(
    [
        # The nodes, one row each; row 0 is the root.
        ("tokens", np.int64, RANGE_ROWS),
        ("parents", np.int32, RANGE_ROWS),
        ("sources", np.uint8, RANGE_ROWS),
        ("probs", np.float64, RANGE_ROWS),  # probability that the whole path to the node is accepted
        ("depths", np.int64, RANGE_ROWS),
        ("tails", np.int64, (RANGE_ROWS, MAX_MATCH_TOKENS)),  # last tokens of the context and the path to the node
        ("known", np.int64, RANGE_ROWS),  # length of the longest match in the model store
        ("cut", np.int64, RANGE_ROWS),  # 1 if the estimate ended before the lowest orders
        ("tree_parents", np.int32, LARGEST_TREE),  # parents as in a ``DraftTree``, where the root is not counted
        # The calibration of the probabilities for an answer.
        ("grown", np.int64),  # number of nodes of the last tree, until its outcome is counted
        ("hits", np.float64, 1),  # how often the next token was drafted
        ("expected_hits", np.float64, 1),  # how often that was expected
        ("calibrated", np.float64, LARGEST_TREE),  # calibrated probabilities of the nodes
        # The best paths, most probable first: those that are nodes already, then those that may become nodes.
        ("best_probs", np.float64, LARGEST_TREE),
        ("best_keys", np.int64, LARGEST_TREE),  # source, parent and token, packed
        # A chain with which the tree begins, as it will almost surely be accepted.
        ("expected", np.int64),  # length of the chain
        ("chain", np.int64, LARGEST_TREE),
        # Candidates for the token after the current node.
        ("size", np.int64),  # number of candidates
        ("candidates", np.int64, MAX_CANDIDATES),
        ("chances", np.float64, MAX_CANDIDATES),
        ("recency", np.int64, MAX_CANDIDATES),  # class of the distance to the token's latest occurrence
        ("parts", np.float64, (MAX_CANDIDATES, len(SourceId))),  # contribution of each source to each chance
        ("round", np.int64),  # slots filled in earlier rounds count as empty
        ("slots", np.int64, CANDIDATE_SLOTS),  # hash table of the candidates
        ("hashed", np.int64),  # number of last tokens that are hashed
        ("suffix_hashes", np.uint64, MAX_HASHED_TOKENS + 1),  # hash of the last n tokens, by n
        # Evidence for the current n-gram order.
        ("corpus_evidence", np.int64, MAX_SAMPLES),
        ("corpus_counts", np.int64, MAX_SAMPLES),
        # Purpose of the estimate: growing a tree, or learning from an emitted token.
        ("truth", np.int64),  # the emitted token, or DRAFTING
        ("min_left", np.float64),  # the estimate ends once less probability is left
        ("floor", np.float64),  # smaller contributions are dropped
        # The evidence of each order for the emitted token.
        ("used", np.int64),  # number of orders with evidence
        ("orders", np.int64, MAX_WEIGHT_ROWS),
        ("buckets", np.int64, MAX_WEIGHT_ROWS),
        ("shares", np.float64, MAX_WEIGHT_ROWS),
        ("explained", np.float64, MAX_WEIGHT_ROWS),
        # Inputs of the random draws.
        ("is_sampled", np.int64),
        ("seed", np.uint64),
        ("position", np.int64),  # of the token after the root
        # Settings.
        ("vocabulary", np.int64),  # number of token ids that may be drafted
        ("rows", np.int64),  # number of rows in use in the table of sources
        ("has_context", np.int64),
        # Nanoseconds spent per source in a timed draft; NONE is the tree itself.
        ("timed", np.int64),
        ("laps", np.int64, len(SourceId)),
        ("since", np.int64),
        ("instant", np.int64, 2),  # seconds and nanoseconds, as returned by the clock
        ("instant_at", np.int64),  # address of ``instant``
    ],
    align=True,
)
SOURCE_ROW = np.dtype([(name, np.int64) for name in ("source", "first", "lowest", "highest", "find", "weigh", "move")])
"""A row in the table of sources: the source's number, its first row of weights, the lowest and highest n-gram order
that may have evidence at the current node, and the addresses of the source's functions (``move`` is 0 without one)."""
FIND, MOVE = types.int64(types.int64, types.int64), types.void(types.int64, types.int64, types.int64)
WEIGH = types.float64(*[types.int64] * 4, types.float64)


class Prior(NamedTuple):
    """Initial weights of a source, equal for all of its n-gram orders.

    Evidence for a single token leaves the share ``remainder`` to lower orders; each doubling of the evidence multiplies
    this share by ``decay``. ``few`` and ``many`` are the weights of evidence for few and for many tokens.
    """

    orders: int
    remainder: float = 1.0
    decay: float = 1.0
    few: float = 0.0
    many: float = 0.0


class CompiledSource(NamedTuple):
    """A source of evidence: functions that compiled code calls by their addresses."""

    name: SourceId
    lowest: int
    """Lowest n-gram order of the source."""
    prior: Prior
    find: Callable[[int, int], int]
    """``find(records_at, node)``: begin with a node, and return the highest order that may have evidence, else -1."""
    weigh: Callable[[int, int, int, int, float], float]
    """``weigh(records_at, node, order, first, left)``: add the evidence for an order to the candidates, out of the
    remaining probability ``left``, and return the probability that remains. ``first`` is the source's first row of
    weights."""
    move: Callable[[int, int, int], None] | None = None
    """``move(records_at, token, emitted)``: update the source's records when the root advances by a token.

    ``token`` is ``RESTART`` if another conversation begins; ``emitted`` is 0 in a prompt, else 1.
    """

    def row(self, first: int) -> tuple[int, ...]:
        """Return this source's row in the table of sources; ``first`` is the index of its first row of weights."""
        move = address_of(self.move, MOVE) if self.move else 0
        return self.name.value, first, self.lowest, -1, address_of(self.find, FIND), address_of(self.weigh, WEIGH), move


call_find, call_weigh, call_move = caller_of(FIND), caller_of(WEIGH), caller_of(MOVE)


@compiled
def record_array_at(records_at: int, number: int, count: int, kind: Any) -> Array:
    """Return the ``count`` records that start at the address stored at index ``number`` of the address array.

    The index is the number of a source, or a constant such as ``WORK_AT``.
    """
    return array_at(array_at(records_at, ADDRESSES, np.int64)[number], count, kind)


@compiled
def record_at(records_at: int, number: int, kind: Any) -> Any:
    return record_array_at(records_at, number, 1, kind)[0]


@compiled
def work_at(records_at: int) -> Any:
    return record_at(records_at, WORK_AT, WORKSPACE)


@compiled
def table_at(records_at: int) -> Array:
    return record_array_at(records_at, TABLE_AT, MAX_SOURCE_ROWS, SOURCE_ROW)


@compiled
def move_all(records_at: int, token: int, emitted: int) -> None:
    """Call the ``move`` functions of all sources when the root advances by a token."""
    table = table_at(records_at)
    for row in range(work_at(records_at).rows):
        if table[row].move:
            call_move(table[row].move, (records_at, token, emitted))
