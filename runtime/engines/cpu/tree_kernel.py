"""Passes over draft trees and prompts as one compiled call: ids, positions and masks are made where they are read.

Only the nodes of the trees and the lengths of their contexts differ from one pass to the next. Everything else is an
address in a record that is filled when an answer begins.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hdtool.runtime.engines.cpu.layer_record import (
    ADVANCES,
    FIELDS,
    MASK,
    MASK_ROW,
    MASK_SLOT,
    MIXER_ROW,
    NEW,
    PASS_FIELDS,
    ROW_OFFSETS,
    SLOTS,
    TEAM,
    TOTAL_ROWS,
)
from hdtool.runtime.engines.cpu.mixers.mix import accept
from hdtool.runtime.engines.cpu.mixers.row_origins import fill_origins, origins_at
from hdtool.runtime.engines.cpu.pass_kernel import (
    END_FIELDS,
    FIRST,
    IDS,
    LOGITS,
    MAXIMA,
    OUT_FEATURES,
    POSITIONS,
    compute_pass,
)
from hdtool.runtime.kernels.argmax import INFINITY
from hdtool.runtime.kernels.compiled import Array, compiled
from hdtool.runtime.kernels.memory.raw_memory import array_at
from hdtool.runtime.kernels.vector_code import ITEM_SIZE
from hdtool.runtime.model.attention_masks import hide_non_ancestors
from hdtool.runtime.model.step_input import fill_tree
from hdtool.runtime.sampling.walks import NOTHING_CERTAIN, walk_argmax
from hdtool.runtime.tree import LARGEST_TREE, OPEN, DraftTree

ROWS = LARGEST_TREE + 1
"""Of a pass over a tree."""
FLOAT32_INFINITY = INFINITY[torch.float32]
HIDDEN_VALUE = float(np.finfo(np.float32).min)
"""What the mask holds for positions that a row does not attend to."""

TREE_PASS = np.dtype(
    [
        ("shape", np.int64, PASS_FIELDS),
        ("ends", np.int64, END_FIELDS),
        ("rows", np.int64),  # that each slot has memory for
        ("used", np.int64),  # layers
        ("mask_width", np.int64),
        # Addresses of memory.
        ("layers", np.int64),
        ("hidden", np.int64),
        ("scratch", np.int64),
        ("mask", np.int64),
        ("shown", np.int64),  # the square of the last mask of each slot: its size, and where it begins
        ("starts", np.int64),
        ("offsets", np.int64),  # where the rows of each slot begin, and where they end
        ("ids", np.int64),
        ("positions", np.int64),
        ("certain", np.int64),
        ("maxima", np.int64),  # what top-k needs of each row
        ("origins", np.int64),  # from where mixers compute each row
        ("journal", np.int64),  # what mixers keep of the rows
        ("walked", np.int64),  # the tokens of each slot's walk by arg-max, and the nodes that drafted them
    ],
    align=True,
)
NODES, LENGTH, WALKS = 1, 2, 3
"""Where the description of a batch's tree, which begins with its root, has the number of nodes, the length of the
context and whether to walk."""


@compiled
def compute_tree(
    at: int,
    team: int,
    root: int,
    tokens: Array,
    parents: Array,
    certain: Array,
    length: int,
    first: int,
    walks: bool,
    ranks: bool,
    advances: bool,
) -> tuple[int, bool]:
    """Compute a pass by the record at an address; logits are those of the rows from ``first`` on.

    States of mixers become those after the last row if it ``advances``.

    Returns the tokens of the walk by arg-max, if it ``walks``, and whether their logits are finite; -1 for a token or a
    position that the model does not have. No logits are computed after a row with a ``certain`` token; there is an
    entry for each row or none.
    """
    own, rows = array_at(at, 1, TREE_PASS)[0], len(tokens) + 1
    own.ends[FIRST], own.shape[ADVANCES] = first, advances
    _place_tree(own, 0, root, tokens, parents, length, rows)
    if not _compute(own, team, 1, rows, certain, ranks):
        return -1, False
    return _walk(own, 0, certain, tokens, parents) if walks else (0, True)


@compiled
def compute_trees(
    at: int,
    team: int,
    heads: Array,
    tokens: Array,
    parents: Array,
    certain: Array,
    least: int,
    ranks: bool,
    found: Array,
) -> bool:
    """Compute a pass over a tree in each slot, of at least so many rows; ``found`` gets the walks that are wanted.

    No logits are computed after padding.
    """
    own, slots, first, skips = array_at(at, 1, TREE_PASS)[0], len(heads), 0, False
    own.ends[FIRST] = own.shape[ADVANCES] = 0
    offsets = array_at(own.offsets, (slots + 1,), np.int64)
    of_rows = array_at(own.certain, (slots * own.rows,), np.int64)
    largest = 1
    for slot in range(slots):
        nodes = heads[slot, NODES]
        drafted, above = tokens[first : first + nodes], parents[first : first + nodes]
        rows = max(nodes + 1, least)
        largest = max(largest, rows)
        _place_tree(own, slot, heads[slot, 0], drafted, above, heads[slot, LENGTH], rows)
        for row in range(rows):
            only = OPEN if row <= nodes else 0
            if row <= nodes and len(certain) > 0:
                only = certain[first + slot + row]
            of_rows[offsets[slot] + row] = only
            skips |= only != OPEN
        first += nodes
    if not _compute(own, team, slots, largest, of_rows[: offsets[slots]] if skips else of_rows[:0], ranks):
        return False
    first = 0
    for slot in range(slots):
        nodes = heads[slot, NODES]
        found[slot] = 0
        if heads[slot, WALKS]:
            drafted, above = tokens[first : first + nodes], parents[first : first + nodes]
            found[slot, 0], found[slot, 1] = _walk(own, slot, of_rows[offsets[slot] :], drafted, above)
        first += nodes
    return True


@compiled
def _place_tree(own: Any, slot: int, root: int, tokens: Array, parents: Array, length: int, rows: int) -> None:
    """Write the ids, the positions and the mask of a tree, padded to so many rows."""
    offsets, nodes = array_at(own.offsets, slot + 2, np.int64), len(tokens)
    first = offsets[slot]
    offsets[slot + 1] = first + rows
    ids, positions = array_at(own.ids, first + rows, np.int64), array_at(own.positions, first + rows, np.int64)
    fill_tree(ids[first:], positions[first:], root, tokens, parents, length)
    for row in range(first + nodes + 1, first + rows):
        ids[row], positions[row] = root, length
    array_at(own.starts, slot + 1, np.int64)[slot] = length
    if own.shape[MIXER_ROW]:
        fill_origins(origins_at(own.origins, slot, rows), parents)
    if rows > 1:
        shown = array_at(own.shown, (slot + 1, 2), np.int64)[slot]
        mask = array_at(own.mask, (slot + 1, own.rows, own.mask_width), np.float32)[slot]
        hide_non_ancestors(mask, shown[0], shown[1], parents, length, HIDDEN_VALUE)
        for row in range(nodes + 1):
            for column in range(length + nodes + 1, length + rows):
                mask[row, column] = HIDDEN_VALUE
        shown[0], shown[1] = rows, length


@compiled
def _compute(own: Any, team: int, slots: int, rows: int, certain: Array, ranks: bool) -> bool:
    """Compute the pass over the trees that were placed, the largest of so many rows."""
    shape = own.shape
    shape[ROW_OFFSETS], shape[TOTAL_ROWS] = own.offsets, array_at(own.offsets, slots + 1, np.int64)[slots]
    own.ends[MAXIMA] = own.maxima if ranks else 0
    shape[SLOTS], shape[NEW], shape[TEAM] = slots, rows, team
    shape[MASK], shape[MASK_SLOT], shape[MASK_ROW] = (
        own.mask if rows > 1 else 0,
        own.rows * own.mask_width,
        own.mask_width,
    )
    layers, starts = array_at(own.layers, (own.used, FIELDS), np.int64), array_at(own.starts, slots, np.int64)
    return compute_pass(shape, layers, starts, own.ends, certain, own.hidden, own.scratch)


@compiled
def accept_path(at: int, team: int, path: Array) -> None:
    """Turn the states that a pass by the record began with into those after a path of its rows."""
    own = array_at(at, 1, TREE_PASS)[0]
    own.shape[TEAM] = team
    layers, starts = array_at(own.layers, (own.used, FIELDS), np.int64), array_at(own.starts, 1, np.int64)
    accept(own.shape, layers, starts, path, own.scratch)


@compiled
def _walk(own: Any, slot: int, certain: Array, tokens: Array, parents: Array) -> tuple[int, bool]:
    vocabulary, walked = own.ends[OUT_FEATURES], array_at(own.walked, (slot + 1, 2, ROWS), np.int64)[slot]
    first = array_at(own.offsets, slot + 1, np.int64)[slot]
    logits = own.ends[LOGITS] + first * vocabulary * ITEM_SIZE
    return walk_argmax(
        logits, vocabulary, vocabulary, FLOAT32_INFINITY, certain, tokens, parents, len(tokens) + 1, walked
    )


def compile_tree_passes() -> None:
    """Compile them ahead, for a token that no model has."""
    numbers, record, bare = np.zeros(4, np.int64), np.zeros(1, TREE_PASS), DraftTree.bare(-1)
    for name in ("starts", "ids", "positions", "certain"):
        record[name] = numbers.ctypes.data
    offsets = np.zeros(2, np.int64)
    record["offsets"] = offsets.ctypes.data
    record["ends"][0, IDS] = record["ends"][0, POSITIONS] = numbers.ctypes.data
    nodes, at = (bare.tokens, bare.parents), record.ctypes.data
    compute_tree(at, 0, bare.root, *nodes, NOTHING_CERTAIN, 0, 0, True, False, False)
    compute_trees(at, 0, np.array([[-1, 0, 0, 1]]), *nodes, NOTHING_CERTAIN, 1, False, np.zeros((1, 2), np.int64))
    accept_path(at, 0, numbers)
