"""The memory that compiled code drafts with, and the table of sources that it calls.

Every function gets ``at``, the address of one array of addresses, and reaches all records by it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import types

from hdtool.runtime.kernels.calls import address_of, caller_of
from hdtool.runtime.kernels.compiled import Array, compiled
from hdtool.runtime.kernels.memory.raw_memory import array_at
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.stores.corpus_ranges import ROWS, SAMPLES
from hdtool.runtime.stores.history.log_search import LONGEST_MATCH
from hdtool.runtime.tree import LARGEST_TREE

WORK_AT, WEIGHTS_AT, NEAR_AT, TABLE_AT = SourceName.NONE.value, *range(len(SourceName), len(SourceName) + 3)
"""Places of addresses; the record of a source has the number of the source."""
ADDRESSES = TABLE_AT + 1
CANDIDATES = 512
SLOTS = 2 * CANDIDATES
LONGEST_HASH = 8
"""Most last tokens of a node that are hashed."""
MOST_ROWS, MOST_EVIDENCE = 128, 32
"""Rows of learned weights, and rows of the table of sources, at most."""
DRAFTING = RESTART = -1
"""In place of an emitted token: an estimate is for a tree, or another conversation begins."""

WORK = np.dtype(
    [
        # The nodes, a row each; row 0 is the last emitted token.
        ("tokens", np.int64, ROWS),
        ("parents", np.int32, ROWS),
        ("sources", np.uint8, ROWS),
        ("probs", np.float64, ROWS),  # that the target takes the whole path
        ("depths", np.int64, ROWS),
        ("tails", np.int64, (ROWS, LONGEST_MATCH)),  # the last tokens down to the node
        ("known", np.int64, ROWS),  # the longest match in the model store
        ("cut", np.int64, ROWS),  # whether too little was left for the shortest orders
        ("above", np.int32, LARGEST_TREE),  # parents as a tree has them: the root is not counted
        # The best paths, most probable first: those that are nodes already, and those that may become nodes.
        ("best_probs", np.float64, LARGEST_TREE),
        ("best_keys", np.int64, LARGEST_TREE),  # source, parent and token in one number
        # Tokens that the tree begins with, as they are almost certain.
        ("expected", np.int64),
        ("chain", np.int64, LARGEST_TREE),
        # What may follow one node.
        ("size", np.int64),
        ("candidates", np.int64, CANDIDATES),
        ("chances", np.float64, CANDIDATES),
        ("recency", np.int64, CANDIDATES),  # the class of its distance from its latest place in the conversation
        ("parts", np.float64, (CANDIDATES, len(SourceName))),  # of each chance, by source
        ("round", np.int64),  # slots of earlier rounds are empty
        ("slots", np.int64, SLOTS),  # a hash table of candidates
        ("hashed", np.int64),  # how many last tokens are hashed
        ("marks", np.uint64, LONGEST_HASH + 1),  # hashes of so many last tokens
        # Evidence of the order in use.
        ("corpus_evidence", np.int64, SAMPLES),
        ("corpus_counts", np.int64, SAMPLES),
        # What an estimate is for: a tree, or learning from an emitted token.
        ("truth", np.int64),  # the emitted token, or DRAFTING
        ("least", np.float64),  # evidence is used while so much probability is left
        ("floor", np.float64),  # smaller contributions are left out
        # The evidence of each order for the emitted token.
        ("used", np.int64),
        ("orders", np.int64, MOST_ROWS),
        ("buckets", np.int64, MOST_ROWS),
        ("shares", np.float64, MOST_ROWS),
        ("explained", np.float64, MOST_ROWS),
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
ROW = np.dtype([(name, np.int64) for name in ("source", "first", "lowest", "highest", "find", "weigh", "move")])
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


class Source(NamedTuple):
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
def records_at(at: int, number: int, count: int, kind: Any) -> Array:
    """The records of a source, by its number, or those at one of the other places of addresses."""
    return array_at(array_at(at, ADDRESSES, np.int64)[number], count, kind)


@compiled
def record_at(at: int, number: int, kind: Any) -> Any:
    return records_at(at, number, 1, kind)[0]


@compiled
def work_at(at: int) -> Any:
    return record_at(at, WORK_AT, WORK)


@compiled
def table_at(at: int) -> Array:
    """The rows of the sources."""
    return records_at(at, TABLE_AT, MOST_EVIDENCE, ROW)


@compiled
def move_all(at: int, token: int, emitted: int) -> None:
    """Have all sources follow when the root moves on."""
    table = table_at(at)
    for row in range(work_at(at).rows):
        if table[row].move:
            call_move(table[row].move, (at, token, emitted))
