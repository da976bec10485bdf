"""Computes a whole pass in compiled code: embeddings, rotary positions, decoder layers, final norm and logits.

Only the trees and context lengths change from pass to pass. Everything else is in a record of addresses, which
``TreePass`` fills in again only if the KV cache, the number of threads or the weights have changed.
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
    THREAD_POOL,
    THREADS,
    TOTAL_ROWS,
    WOKEN,
    Numbers,
    compute_layer_inputs,
    layer_input_numbers,
)
from hdtool.runtime.engines.cpu.mixers.convolution import fill_origins, origins_at
from hdtool.runtime.engines.cpu.mixers.mix import accept
from hdtool.runtime.kernels.compiled import WORD_SIZE, Array, array_at, compiled, copy_numbers, float_of
from hdtool.runtime.kernels.gemm import MATMUL_ARGUMENTS, call_at
from hdtool.runtime.kernels.gemm_tiles import block_numbers, unpack_row
from hdtool.runtime.kernels.matrix_formats import MatrixKind
from hdtool.runtime.kernels.thread_pool import parallel_matmul
from hdtool.runtime.kernels.topk import FOLD, INFINITY, TOPK_BLOCK, fold, folded_size
from hdtool.runtime.kernels.vector_code import ITEM_SIZE, bound_in_place, norm_rows, scale_in_place
from hdtool.runtime.model.pass_inputs import fill_tree, hide_non_ancestors
from hdtool.runtime.sampling.walks import NOTHING_CERTAIN, walk_argmax
from hdtool.runtime.tree import LARGEST_TREE, UNDETERMINED, DraftTree

IDS, POSITIONS, EMBED, EMBEDDING, VOCABULARY, MULTIPLIER, KINDS, ROTARIES, KNOWN = range(9)
"""First fields of the record of what surrounds the layers.

IDS, POSITIONS: addresses of the rows' token ids and positions. EMBED, EMBEDDING, VOCABULARY: addresses of the
``embedding_of`` function and of the embedding matrix, and the number of its rows. MULTIPLIER: bits of the embeddings'
factor, 0 for none. KINDS: number of rotary types. ROTARIES, KNOWN: address of the cosines and sines ``[KINDS, 2, KNOWN,
width]``, and the number of positions they cover.
"""
NORM, LAST_EPSILON, NORMED, FIRST, PROJECT, PROJECTION, OUT_FEATURES, BIAS, LOGITS, MAXIMA, DIVISOR, CAP = range(9, 21)
"""NORM, LAST_EPSILON: address of the final norm's weight and bits of its epsilon. NORMED: address to which normed
hidden states are written. FIRST: first row with logits. PROJECT, PROJECTION, OUT_FEATURES, BIAS: addresses of the
output layer's matmul and matrix, number of its rows and address of its bias. LOGITS: address of the logits. MAXIMA:
address to which ``fold`` writes the logits' maxima, 0 for none. DIVISOR, CAP: bits of the divisor and of the softcap of
logits; a DIVISOR of 0 means neither."""
LAYER_INPUTS, PLACEHOLDERS, NUMBER_OF_PLACEHOLDERS, KEEPING = range(CAP + 1, CAP + 5)
"""LAYER_INPUTS: address of the record of the per-layer inputs, 0 for none. PLACEHOLDERS, NUMBER_OF_PLACEHOLDERS:
address and number of placeholder ids. KEEPING: number of layers up to the last one whose keys, values or states later
rows need. In a prefill, the layers after these compute only the rows with logits."""
END_FIELDS = KEEPING + 1
IN_CACHE = 1 << 17
"""Number of logits to compute at a time, so that they are still in L2 when their maxima are computed."""


@cache
def embedding_of(kind: MatrixKind, size: int) -> Any:
    """Return the C function that expands a format's embedding rows, to be kept alive while its address is used."""

    @cfunc(types.void(*[types.int64] * MATMUL_ARGUMENTS), cache=True)
    def embed(
        matrix: int, columns: int, ids_at: int, rows: int, written: int, _1: int, _2: int, _3: int, _4: int
    ) -> None:
        ids, stride = array_at(ids_at, (rows,), types.int64), columns // block_numbers(kind) * size
        for row in range(rows):
            unpack_row(matrix + ids[row] * stride, kind, columns, written + row * columns * ITEM_SIZE)

    return embed


@compiled
def pass_numbers(shape: Numbers, layers: Numbers, kinds: int, positions: int) -> int:
    """Return the scratch memory that ``compute_pass`` needs, in float32 values."""
    before = kinds * _rotary_numbers(shape) + layer_input_numbers(shape[INPUTS_STRIDE], shape[TOTAL_ROWS])
    return before + scratch_numbers(shape, layers, positions)


@compiled
def _rotary_numbers(shape: Numbers) -> int:
    """Return the size of one rotary type's cosines and sines for all rows, in float32 values."""
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
    """Compute the layers, and write normed hidden states and logits; return False for unknown ids or positions.

    Placeholder ids count as unknown. ``certain`` is empty or has, for each row, the only token that can follow it, or a
    negative number if several tokens can.
    """
    rows, shape[WOKEN] = shape[TOTAL_ROWS], 0
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
        kept_at = hidden + ends[FIRST] * shape[HIDDEN] * ITEM_SIZE
        compute_layers(shape, layers[keeping:], starts, kept_at, rest)
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
    """Restrict the pass to the rows with logits, as if a previous pass had computed the rows before.

    The rows must form a chain, because attention reads no mask if only one row remains.
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
    """Copy the cosines and then the sines of all rows' positions, for each rotary type."""
    rows, size = len(positions), shape[ROTARY_WIDTH] * ITEM_SIZE
    for table in range(2 * ends[KINDS]):
        table_at, written = ends[ROTARIES] + table * ends[KNOWN] * size, shape[ROTATED] + table * rows * size
        for row in range(rows):
            copy_numbers(table_at + positions[row] * size, shape[ROTARY_WIDTH], written + row * size)


@compiled
def _bound(ends: Numbers, logits: int, count: int) -> None:
    if ends[DIVISOR]:
        bound_in_place(logits, count, float_of(ends, DIVISOR), float_of(ends, CAP))


@compiled
def _project(shape: Numbers, ends: Numbers, rows: int, normed: int) -> None:
    """Write the logits of normed rows, and their folded maxima if ``MAXIMA`` isn't 0."""
    width, out_features = shape[HIDDEN], ends[OUT_FEATURES]
    matmul = ends[PROJECT], ends[PROJECTION], out_features, width, normed, rows, ends[LOGITS], ends[BIAS]
    if not rows:
        return
    logits = array_at(ends[LOGITS], (rows, out_features), types.float32)
    if shape[THREAD_POOL] or not ends[MAXIMA]:
        parallel_matmul(shape[THREAD_POOL], shape[THREADS], *matmul)
        for row in range(rows):
            _bound(ends, logits[row].ctypes.data, out_features)
    if not ends[MAXIMA]:
        return
    maxima = array_at(ends[MAXIMA], (rows, folded_size(out_features)), types.float32)
    if shape[THREAD_POOL]:
        for row in range(rows):
            fold(logits[row], maxima[row])
        return
    size = max(1, IN_CACHE // (rows * TOPK_BLOCK)) * TOPK_BLOCK
    for first in range(0, out_features, size):
        end = min(out_features, first + size)
        call_at(*matmul, first, end)
        for row in range(rows):
            _bound(ends, logits[row, first:end].ctypes.data, end - first)
            fold(logits[row, first:end], maxima[row, first // FOLD : first // FOLD + folded_size(end - first)])


@compiled
def _write_open_logits(shape: Numbers, ends: Numbers, certain: Numbers, hidden: int, scratch: int) -> None:
    """Compute logits only for rows that several tokens can follow, and write a single logit for the others.

    The matmul writes the logits of these rows without gaps. They are then moved to their places from last to first,
    because no row's place is before where the matmul wrote it.
    """
    width, out_features, rows, count = shape[HIDDEN], ends[OUT_FEATURES], len(certain), 0
    for row in range(rows):
        if certain[row] < 0:
            copy_numbers(ends[NORMED] + row * width * ITEM_SIZE, width, scratch + count * width * ITEM_SIZE)
            count += 1
    _project(shape, ends, count, scratch)
    folded = folded_size(out_features)
    for row in range(rows - 1, -1, -1):
        if certain[row] < 0:
            count -= 1
            if count < row:
                copy_numbers(
                    ends[LOGITS] + count * out_features * ITEM_SIZE,
                    out_features,
                    ends[LOGITS] + row * out_features * ITEM_SIZE,
                )
            if count < row and ends[MAXIMA]:
                maxima_of_row = ends[MAXIMA] + row * folded * ITEM_SIZE
                copy_numbers(ends[MAXIMA] + count * folded * ITEM_SIZE, folded, maxima_of_row)
    states = array_at(hidden, (rows, width), types.float32)
    logits = array_at(ends[LOGITS], (rows, out_features), types.float32)
    for row in range(rows):
        if certain[row] >= 0:
            total = np.float32(0)
            for column in range(width):
                total += states[row, column]
            # The logit is NaN if the row overflowed, so that the acceptance check notices it.
            logits[row, certain[row]] = np.float32(0) * total


def compile_passes() -> None:
    """Compile ``compute_pass`` now, by a call without rows and layers, so that the first pass doesn't have to."""
    shape, layers, starts, ends = (np.zeros(size, np.int64) for size in (PASS_FIELDS, FIELDS, 1, END_FIELDS))
    pass_numbers(shape, layers.reshape(1, -1), 0, 0)
    compute_pass(shape, layers.reshape(1, -1)[:0], starts, ends, starts[:0], 0, 0)


TREE_ROWS = LARGEST_TREE + 1
"""Maximum number of rows in a pass over a tree: its nodes and the root."""
FLOAT32_INFINITY = INFINITY[torch.float32]
HIDDEN_VALUE = float(np.finfo(np.float32).min)
"""Mask value of positions that a row doesn't attend to."""

TREE_PASS = np.dtype(
    [
        ("shape", np.int64, PASS_FIELDS),
        ("ends", np.int64, END_FIELDS),
        ("rows", np.int64),  # number of rows that each slot has memory for
        ("used", np.int64),  # number of layers that the pass computes
        ("mask_width", np.int64),
        # Addresses of buffers.
        ("layers", np.int64),
        ("hidden", np.int64),
        ("scratch", np.int64),
        ("mask", np.int64),
        ("shown", np.int64),  # number of rows and context length of each slot's last mask
        ("starts", np.int64),
        ("offsets", np.int64),  # first row of each slot, and the end of the last one
        ("ids", np.int64),
        ("positions", np.int64),
        ("certain", np.int64),
        ("maxima", np.int64),  # folded maxima of each row's logits, which top-k reads
        ("origins", np.int64),  # origin of each row, see ``convolution``
        ("journal", np.int64),  # values that mixers keep of the rows
        ("walked", np.int64),  # tokens of each slot's argmax walk, and the nodes that drafted them
    ],
    align=True,
)
NODES, LENGTH, WALKS = 1, 2, 3
"""Fields of a tree's header in a batch, after its root: number of nodes, context length, and 1 to walk the tree."""


@compiled
def compute_tree(
    at: int,
    thread_pool: int,
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
    """Compute a pass over one tree, with the record at address ``at``, and write logits of the rows from ``first`` on.

    ``certain`` is empty or has, for each row, the only token that can follow it, whose logit is then the only one
    written. With ``ranks``, maxima for top-k are written as well. With ``advances``, mixers' states advance past the
    last row.

    Return the length of the argmax walk, 0 unless ``walks``, and True if the walk's logits are finite. The length is -1
    for unknown tokens or positions.
    """
    record, rows = array_at(at, 1, TREE_PASS)[0], len(tokens) + 1
    record.ends[FIRST], record.shape[ADVANCES] = first, advances
    _place_tree(record, 0, root, tokens, parents, length, rows)
    if not _compute(record, thread_pool, 1, rows, certain, ranks):
        return -1, False
    return _walk(record, 0, certain, tokens, parents) if walks else (0, True)


@compiled
def compute_trees(
    at: int,
    thread_pool: int,
    heads: Array,
    tokens: Array,
    parents: Array,
    certain: Array,
    min_rows: int,
    ranks: bool,
    walk_results: Array,
) -> bool:
    """Compute a pass over one tree in each slot, padded to ``min_rows``; return False for unknown tokens or positions.

    ``heads`` has a header for each tree. The length of each wanted walk, and 1 if its logits are finite, are written to
    ``walk_results``. Padding rows get no logits. See ``compute_tree`` for the other arguments.
    """
    record, slots, first, skips = array_at(at, 1, TREE_PASS)[0], len(heads), 0, False
    record.ends[FIRST] = record.shape[ADVANCES] = 0
    offsets = array_at(record.offsets, (slots + 1,), np.int64)
    certain_of_rows = array_at(record.certain, (slots * record.rows,), np.int64)
    largest = 1
    for slot in range(slots):
        nodes = heads[slot, NODES]
        drafted, above = tokens[first : first + nodes], parents[first : first + nodes]
        rows = max(nodes + 1, min_rows)
        largest = max(largest, rows)
        _place_tree(record, slot, heads[slot, 0], drafted, above, heads[slot, LENGTH], rows)
        for row in range(rows):
            certain_token = UNDETERMINED if row <= nodes else 0
            if row <= nodes and len(certain) > 0:
                certain_token = certain[first + slot + row]
            certain_of_rows[offsets[slot] + row] = certain_token
            skips |= certain_token != UNDETERMINED
        first += nodes
    if not _compute(
        record, thread_pool, slots, largest, certain_of_rows[: offsets[slots]] if skips else certain_of_rows[:0], ranks
    ):
        return False
    first = 0
    for slot in range(slots):
        nodes = heads[slot, NODES]
        walk_results[slot] = 0
        if heads[slot, WALKS]:
            drafted, above = tokens[first : first + nodes], parents[first : first + nodes]
            walk_results[slot, 0], walk_results[slot, 1] = _walk(
                record, slot, certain_of_rows[offsets[slot] :], drafted, above
            )
        first += nodes
    return True


@compiled
def _place_tree(record: Any, slot: int, root: int, tokens: Array, parents: Array, length: int, rows: int) -> None:
    """Write a tree's ids, positions and mask, padded to ``rows``."""
    offsets, nodes = array_at(record.offsets, slot + 2, np.int64), len(tokens)
    first = offsets[slot]
    offsets[slot + 1] = first + rows
    ids, positions = array_at(record.ids, first + rows, np.int64), array_at(record.positions, first + rows, np.int64)
    fill_tree(ids[first:], positions[first:], root, tokens, parents, length)
    for row in range(first + nodes + 1, first + rows):
        ids[row], positions[row] = root, length
    array_at(record.starts, slot + 1, np.int64)[slot] = length
    if record.shape[MIXER_ROW]:
        fill_origins(origins_at(record.origins, slot, rows), parents)
    if rows > 1:
        shown = array_at(record.shown, (slot + 1, 2), np.int64)[slot]
        mask = array_at(record.mask, (slot + 1, record.rows, record.mask_width), np.float32)[slot]
        hide_non_ancestors(mask, shown[0], shown[1], parents, length, HIDDEN_VALUE)
        for row in range(nodes + 1):
            for column in range(length + nodes + 1, length + rows):
                mask[row, column] = HIDDEN_VALUE
        shown[0], shown[1] = rows, length


@compiled
def _compute(record: Any, thread_pool: int, slots: int, rows: int, certain: Array, ranks: bool) -> bool:
    """Compute the pass over the trees that ``_place_tree`` wrote; the largest has ``rows`` rows."""
    shape = record.shape
    shape[ROW_OFFSETS], shape[TOTAL_ROWS] = record.offsets, array_at(record.offsets, slots + 1, np.int64)[slots]
    record.ends[MAXIMA] = record.maxima if ranks else 0
    shape[SLOTS], shape[NEW], shape[THREAD_POOL] = slots, rows, thread_pool
    shape[MASK], shape[MASK_SLOT], shape[MASK_ROW] = (
        record.mask if rows > 1 else 0,
        record.rows * record.mask_width,
        record.mask_width,
    )
    layers, starts = array_at(record.layers, (record.used, FIELDS), np.int64), array_at(record.starts, slots, np.int64)
    return compute_pass(shape, layers, starts, record.ends, certain, record.hidden, record.scratch)


@compiled
def accept_path(at: int, thread_pool: int, path: Array) -> None:
    """Advance the mixers' states from before the last pass along a path of its rows."""
    record = array_at(at, 1, TREE_PASS)[0]
    record.shape[THREAD_POOL] = thread_pool
    layers, starts = array_at(record.layers, (record.used, FIELDS), np.int64), array_at(record.starts, 1, np.int64)
    accept(record.shape, layers, starts, path, record.scratch)


@compiled
def _walk(record: Any, slot: int, certain: Array, tokens: Array, parents: Array) -> tuple[int, bool]:
    vocabulary, walked = record.ends[OUT_FEATURES], array_at(record.walked, (slot + 1, 2, TREE_ROWS), np.int64)[slot]
    first = array_at(record.offsets, slot + 1, np.int64)[slot]
    logits = record.ends[LOGITS] + first * vocabulary * ITEM_SIZE
    return walk_argmax(
        logits, vocabulary, vocabulary, FLOAT32_INFINITY, certain, tokens, parents, len(tokens) + 1, walked
    )


def compile_tree_passes() -> None:
    """Compile the passes over trees now, by calls with a token id that no model has."""
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
