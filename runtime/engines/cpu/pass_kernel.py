"""A whole pass in compiled code: embeddings, rotary positions, decoder layers, the last norm and the logits.

Only the nodes of the trees and the lengths of their contexts differ from one pass to the next. Everything else is an
address in a record that is filled when an answer begins.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import cfunc, types

from hdtool.runtime.engines.cpu.layer_kernel import compute_layers, scratch_numbers
from hdtool.runtime.engines.cpu.layer_record import (
    ADVANCES,
    FIELDS,
    HIDDEN,
    INPUTS,
    INPUTS_STRIDE,
    MASK,
    MASK_ROW,
    MASK_SLOT,
    MIXER_ROW,
    NEW,
    OFFSET,
    PASS_FIELDS,
    PLACES,
    ROTARY_WIDTH,
    ROTATED,
    ROW_OFFSETS,
    SLOTS,
    TEAM,
    THREADS,
    TOTAL_ROWS,
    Numbers,
    compute_layer_inputs,
    layer_input_numbers,
)
from hdtool.runtime.engines.cpu.mixers.convolution import fill_origins, origins_at
from hdtool.runtime.engines.cpu.mixers.mix import accept
from hdtool.runtime.kernels.compiled import WORD_SIZE, Array, array_at, compiled, copy_numbers, float_of
from hdtool.runtime.kernels.gemm import ARGUMENTS, call_at
from hdtool.runtime.kernels.gemm_tiles import block_numbers, unpack_row
from hdtool.runtime.kernels.matrix_kind import MatrixKind
from hdtool.runtime.kernels.thread_pool import multiply_together
from hdtool.runtime.kernels.topk import BLOCK, FOLD, INFINITY, fold, folded_size
from hdtool.runtime.kernels.vector_code import ITEM_SIZE, bound_in_place, norm_rows, scale_in_place
from hdtool.runtime.model.pass_inputs import fill_tree, hide_non_ancestors
from hdtool.runtime.sampling.walks import NOTHING_CERTAIN, walk_argmax
from hdtool.runtime.tree import LARGEST_TREE, UNDETERMINED, DraftTree

IDS, POSITIONS, EMBED, EMBEDDING, VOCABULARY, MULTIPLIER, KINDS, ROTARIES, KNOWN = range(9)
"""Addresses of the token ids and positions; of ``embedding_of`` a format, and of the matrix of embeddings, with its
rows; the bits of their factor; the kinds of rotary positions, and the address of the tables of cosines and sines of
each, with their rows."""
NORM, LAST_EPSILON, NORMED, FIRST, PROJECT, PROJECTION, OUT_FEATURES, BIAS, LOGITS, MAXIMA, DIVISOR, CAP = range(9, 21)
"""The address of the last norm's weight and the bits of its epsilon; where normed hidden states are written; the first
row whose logits are computed; of the output layer, the addresses of the matmul and the matrix, the rows of it, and the
address of its bias; the addresses of the logits and of the maxima that ``fold`` writes for them, 0 if these are not
wanted. Logits are divided by the divisor and bounded by the cap, unless they are 0."""
LAYER_INPUTS, PLACEHOLDERS, NUMBER_OF_PLACEHOLDERS, KEEPING = range(CAP + 1, CAP + 5)
"""The address of the record of the inputs that layers have beside hidden states, 0 for none; that of the ids that stand
for something else than text, with their number; and the layers up to the last one whose result other rows need: later
ones compute rows with logits alone where a prompt is read."""
END_FIELDS = KEEPING + 1
IN_CACHE = 1 << 17
"""Logits that are folded before they are evicted from L2."""


@cache
def embedding_of(kind: MatrixKind, size: int) -> Any:
    """The function that writes rows of a matrix in a format; it must be kept as long as its address is used."""

    @cfunc(types.void(*[types.int64] * ARGUMENTS), cache=True)
    def embed(
        matrix: int, columns: int, of_ids: int, rows: int, written: int, _1: int, _2: int, _3: int, _4: int
    ) -> None:
        ids, stride = array_at(of_ids, (rows,), types.int64), columns // block_numbers(kind) * size
        for row in range(rows):
            unpack_row(matrix + ids[row] * stride, kind, columns, written + row * columns * ITEM_SIZE)

    return embed


@compiled
def pass_numbers(shape: Numbers, layers: Numbers, kinds: int, positions: int) -> int:
    """The float32 numbers of scratch memory that ``compute_pass`` needs."""
    before = kinds * _rotary_numbers(shape) + layer_input_numbers(shape[INPUTS_STRIDE], shape[TOTAL_ROWS])
    return before + scratch_numbers(shape, layers, positions)


@compiled
def _rotary_numbers(shape: Numbers) -> int:
    """Cosines and sines of one kind for all rows."""
    return 2 * shape[TOTAL_ROWS] * shape[ROTARY_WIDTH]  # type: ignore[no-any-return]


@compiled
def compute_pass(
    shape: Numbers,
    layers: Numbers,
    starts: Numbers,
    ends: Numbers,
    certain: Numbers,
    hidden: int,
    scratch: int,
) -> bool:
    """Write the normed hidden states after all layers, and the logits; False for ids or positions that are not known.

    Ids that stand for something else than text are not.

    ``certain`` may state the only token that may follow each row of all sequences, -1 where there are several.
    """
    rows = shape[TOTAL_ROWS]
    ids, positions = array_at(ends[IDS], (rows,), types.int64), array_at(ends[POSITIONS], (rows,), types.int64)
    for row in range(rows):
        if not (0 <= ids[row] < ends[VOCABULARY] and 0 <= positions[row] < ends[KNOWN]):
            return False
    placeholders = array_at(ends[PLACEHOLDERS], (ends[NUMBER_OF_PLACEHOLDERS],), types.int64)
    for placeholder in placeholders:
        for row in range(rows):
            if ids[row] == placeholder:
                return False
    if rows:
        call_at(ends[EMBED], ends[EMBEDDING], shape[HIDDEN], ends[IDS], rows, hidden, 0, 0, 0, 0)
        if ends[MULTIPLIER]:
            scale_in_place(hidden, rows * shape[HIDDEN], float_of(ends, MULTIPLIER))
    shape[PLACES], shape[ROTATED] = ends[POSITIONS], scratch
    _copy_rotary(shape, ends, positions)
    rest = scratch + ends[KINDS] * _rotary_numbers(shape) * ITEM_SIZE
    if ends[LAYER_INPUTS]:
        shape[INPUTS] = rest
        compute_layer_inputs(shape, ends[LAYER_INPUTS], ends[IDS], rows, hidden, rest)
        rest += layer_input_numbers(shape[INPUTS_STRIDE], rows) * ITEM_SIZE
    leaves = ends[FIRST] and shape[ADVANCES] and shape[SLOTS] == 1
    keeping = min(ends[KEEPING], len(layers)) if leaves else len(layers)
    compute_layers(shape, layers[:keeping], starts, hidden, rest)
    if keeping < len(layers):
        _leave_rows(shape, ends, starts, positions)
        at = hidden + ends[FIRST] * shape[HIDDEN] * ITEM_SIZE
        compute_layers(shape, layers[keeping:], starts, at, rest)
    epsilon, offset = float_of(ends, LAST_EPSILON), float_of(shape, OFFSET)
    norm_rows(hidden, rows, shape[HIDDEN], ends[NORM], offset, epsilon, ends[NORMED])
    if len(certain) > 0:
        _write_open_logits(shape, ends, certain, hidden, scratch)
    else:
        first = ends[FIRST]
        _project(shape, ends, rows - first, ends[NORMED] + first * shape[HIDDEN] * ITEM_SIZE)
    return True


@compiled
def _leave_rows(shape: Numbers, ends: Numbers, starts: Numbers, positions: Numbers) -> None:
    """Go on with the rows of a sequence that have logits, as if those before were of an earlier pass.

    Each row follows the one before: attention reads no mask for a sequence with one row.
    """
    first = ends[FIRST]
    shape[NEW] -= first
    shape[TOTAL_ROWS] -= first
    array_at(shape[ROW_OFFSETS], (2,), types.int64)[1] -= first
    starts[0] += first
    shape[PLACES] += first * WORD_SIZE
    shape[INPUTS] += first * shape[INPUTS_STRIDE] * ITEM_SIZE
    if shape[MASK]:
        shape[MASK] += first * shape[MASK_ROW] * ITEM_SIZE
    _copy_rotary(shape, ends, positions[first:])


@compiled
def _copy_rotary(shape: Numbers, ends: Numbers, positions: Numbers) -> None:
    """The cosines, then the sines of all rows, for each kind."""
    rows, size = len(positions), shape[ROTARY_WIDTH] * ITEM_SIZE
    for table in range(2 * ends[KINDS]):
        of_table, written = ends[ROTARIES] + table * ends[KNOWN] * size, shape[ROTATED] + table * rows * size
        for row in range(rows):
            copy_numbers(of_table + positions[row] * size, shape[ROTARY_WIDTH], written + row * size)


@compiled
def _bound(ends: Numbers, logits: int, count: int) -> None:
    if ends[DIVISOR]:
        bound_in_place(logits, count, float_of(ends, DIVISOR), float_of(ends, CAP))


@compiled
def _project(shape: Numbers, ends: Numbers, rows: int, normed: int) -> None:
    """Write the logits of normed rows, and their maxima if these are wanted."""
    width, outs = shape[HIDDEN], ends[OUT_FEATURES]
    layer = ends[PROJECT], ends[PROJECTION], outs, width, normed, rows, ends[LOGITS], ends[BIAS]
    if not rows:
        return
    logits = array_at(ends[LOGITS], (rows, outs), types.float32)
    if shape[TEAM] or not ends[MAXIMA]:
        multiply_together(shape[TEAM], shape[THREADS], *layer)
        for row in range(rows):
            _bound(ends, logits[row].ctypes.data, outs)
    if not ends[MAXIMA]:
        return
    maxima = array_at(ends[MAXIMA], (rows, folded_size(outs)), types.float32)
    if shape[TEAM]:
        for row in range(rows):
            fold(logits[row], maxima[row])
        return
    size = max(1, IN_CACHE // (rows * BLOCK)) * BLOCK
    for first in range(0, outs, size):
        end = min(outs, first + size)
        call_at(*layer, first, end)
        for row in range(rows):
            _bound(ends, logits[row, first:end].ctypes.data, end - first)
            fold(logits[row, first:end], maxima[row, first // FOLD : first // FOLD + folded_size(end - first)])


@compiled
def _write_open_logits(shape: Numbers, ends: Numbers, certain: Numbers, hidden: int, scratch: int) -> None:
    """Project the rows after which several tokens may follow; after others, write the logit of the one.

    The matmul writes the logits of the open rows one after another. They are moved to their places from the last one
    on, since none of them lies before its place.
    """
    width, outs, rows, count = shape[HIDDEN], ends[OUT_FEATURES], len(certain), 0
    for row in range(rows):
        if certain[row] < 0:
            copy_numbers(ends[NORMED] + row * width * ITEM_SIZE, width, scratch + count * width * ITEM_SIZE)
            count += 1
    _project(shape, ends, count, scratch)
    folded = folded_size(outs)
    for row in range(rows - 1, -1, -1):
        if certain[row] < 0:
            count -= 1
            if count < row:
                copy_numbers(ends[LOGITS] + count * outs * ITEM_SIZE, outs, ends[LOGITS] + row * outs * ITEM_SIZE)
            if count < row and ends[MAXIMA]:
                of_row = ends[MAXIMA] + row * folded * ITEM_SIZE
                copy_numbers(ends[MAXIMA] + count * folded * ITEM_SIZE, folded, of_row)
    states = array_at(hidden, (rows, width), types.float32)
    logits = array_at(ends[LOGITS], (rows, outs), types.float32)
    for row in range(rows):
        if certain[row] >= 0:
            total = np.float32(0)
            for place in range(width):
                total += states[row, place]
            # Not a number where the row overflowed, which acceptance must see.
            logits[row, certain[row]] = np.float32(0) * total


def compile_passes() -> None:
    """Compile all of this ahead, for no rows and no layers: a first pass would wait for it."""
    shape, layers, starts, ends = (np.zeros(size, np.int64) for size in (PASS_FIELDS, FIELDS, 1, END_FIELDS))
    pass_numbers(shape, layers.reshape(1, -1), 0, 0)
    compute_pass(shape, layers.reshape(1, -1)[:0], starts, ends, starts[:0], 0, 0)


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
            only = UNDETERMINED if row <= nodes else 0
            if row <= nodes and len(certain) > 0:
                only = certain[first + slot + row]
            of_rows[offsets[slot] + row] = only
            skips |= only != UNDETERMINED
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
