"""The memory that a tree grows in: nodes, the best paths so far, and the candidates behind one node.

All of it is one record of fixed size, so that compiled code takes it as one pointer: each array that
Python hands over costs a fifth of a microsecond, each one that a compiled function passes on costs a
dozen words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from hdtool.runtime.memory import array_at
from hdtool.runtime.model_store import KEY_WIDTH
from hdtool.runtime.sources import SourceName
from hdtool.runtime.sources.context_table import LONGEST_MATCH, PLACES, TABLE
from hdtool.runtime.sources.corpus_levels import LONGEST_RANGE, SAMPLES, Ranges
from hdtool.runtime.sources.model_levels import ModelArrays
from hdtool.runtime.suffixes import Shards, shards_at
from hdtool.runtime.weights import LEVELS, WEIGHTS

LARGEST_TREE = 64
ROWS = LARGEST_TREE + 1
"""Of a tree's arrays: row 0 is the last emitted token."""
CANDIDATES = 512
SLOTS = 2 * CANDIDATES

WORK = np.dtype(
    [
        # The nodes, a row each.
        ("tokens", np.int64, ROWS),
        ("parents", np.int32, ROWS),
        ("sources", np.uint8, ROWS),
        ("odds", np.float64, ROWS),  # that the target takes the whole path
        ("depths", np.int64, ROWS),
        ("tails", np.int64, (ROWS, LONGEST_MATCH)),  # the last tokens down to the node
        ("known", np.int64, ROWS),  # the most last tokens that the model store knows
        # The best paths, likeliest first: those that are nodes already, and those that may become nodes.
        ("best_odds", np.float64, LARGEST_TREE),
        ("best_keys", np.int64, LARGEST_TREE),  # source, parent and token in one number
        # What may follow one node.
        ("size", np.int64),
        ("candidates", np.int64, CANDIDATES),
        ("chances", np.float64, CANDIDATES),
        ("parts", np.float64, (CANDIDATES, len(SourceName))),  # of each chance, by source
        ("round", np.int64),  # slots of earlier rounds are empty
        ("slots", np.int64, SLOTS),  # a hash table of candidates
        ("marks", np.uint64, LONGEST_MATCH + 1),  # hashes of so many last tokens
        # Evidence of the level that is asked.
        ("followers", np.int64, PLACES),
        ("lengths", np.int64, PLACES),
        ("evidence", np.int64, PLACES),  # of the context: different tokens
        ("counts", np.int64, PLACES),
        ("corpus_evidence", np.int64, SAMPLES),
        ("corpus_counts", np.int64, SAMPLES),
        # What the levels said about a token that has come.
        ("asked", np.int64),
        ("levels", np.int64, LEVELS),
        ("buckets", np.int64, LEVELS),
        ("shares", np.float64, LEVELS),
        ("explained", np.float64, LEVELS),
        # Which sources there are.
        ("has", np.int64, len(SourceName)),
    ],
    align=True,
)

Array = npt.NDArray[Any]


class Memory(NamedTuple):
    """All that compiled code reads and writes while it drafts."""

    work: Any
    weights: Any
    table: Any
    model: ModelArrays
    shards: Shards
    ranges: Ranges
    vocabulary: Any


def addresses_of(
    work: Array, weights: Array, table: Array, model: ModelArrays, shards: Shards, ranges: Ranges, vocabulary: int
) -> Array:
    """Where everything is, for ``memory_at``; the arrays must outlive it."""
    rows = [*shards.addresses().tolist()]
    rows += [_place(array) for array in (work, weights, table, *model, *ranges)]
    rows.append([vocabulary, len(shards.places), 0])
    return np.array(rows, np.int64)


def _place(array: Array) -> Sequence[int]:
    assert array.flags.c_contiguous and array.flags.aligned
    return array.ctypes.data, len(array), 0


@njit(cache=True, nogil=True)
def memory_at(tokens: Array, at: Array) -> Memory:
    """The memory at these addresses; ``tokens`` are the corpus's, which come in two widths."""
    nodes, shards = at[11, 1], at[15, 1]
    orders = LONGEST_RANGE + 1
    return Memory(
        array_at(at[5, 0], 1, WORK),
        array_at(at[6, 0], 1, WEIGHTS),
        array_at(at[7, 0], 1, TABLE),
        ModelArrays(
            array_at(at[8, 0], at[8, 1], np.int32),
            array_at(at[9, 0], (at[9, 1], KEY_WIDTH), np.int32),
            array_at(at[10, 0], (at[10, 1], 2), np.int32),
        ),
        shards_at(tokens, at),
        Ranges(
            array_at(at[11, 0], (nodes, orders, shards, 2), np.int64),
            array_at(at[12, 0], (nodes, orders, SAMPLES), np.int32),
            array_at(at[13, 0], (nodes, orders), np.int64),
            array_at(at[14, 0], nodes, np.int64),
        ),
        at[15, 0],
    )
