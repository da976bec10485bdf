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

from hdtool.runtime.core.tree import LARGEST_TREE, UNDETERMINED, DraftTree
from hdtool.runtime.core.walks import NO_FORCED_TOKENS, walk_argmax
from hdtool.runtime.engines.cpu.convolution import fill_origins, origins_at
from hdtool.runtime.engines.cpu.layer_kernel import compute_layers, layers_scratch_size
from hdtool.runtime.engines.cpu.layer_record import (
    ACTIVE_EXPERTS,
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
    ROTARY_TABLES,
    ROTARY_WIDTH,
    ROW_OFFSETS,
    ROW_POSITIONS,
    SLOTS,
    THREAD_POOL,
    THREADS,
    TOTAL_ROWS,
    Record,
    compute_layer_inputs,
    layer_inputs_size,
)
from hdtool.runtime.engines.cpu.mix import accept
from hdtool.runtime.kernels.compiled import WORD_SIZE, Array, Ints, array_at, compiled, copy_floats, float_of
from hdtool.runtime.kernels.gemm import MATMUL_ARGUMENTS, call_at
from hdtool.runtime.kernels.gemm_tiles import block_size_of, call_unpack, unpack_address, unpack_of
from hdtool.runtime.kernels.matrix_formats import MatrixKind
from hdtool.runtime.kernels.thread_pool import parallel_matmul
from hdtool.runtime.kernels.topk import FOLD, INFINITY, TOPK_BLOCK, fold, folded_size
from hdtool.runtime.kernels.vector_code import ITEM_SIZE, bound_in_place, norm_rows, scale_in_place
from hdtool.runtime.model.pass_inputs import fill_tree, hide_non_ancestors

IDS, POSITIONS, EMBED, EMBEDDING, VOCABULARY, MULTIPLIER, ROTARY_TYPES, ROTARIES, KNOWN_POSITIONS = range(9)
"""First fields of the record that describes everything outside the layers.

IDS, POSITIONS: addresses of the rows' token ids and positions. EMBED, EMBEDDING, VOCABULARY: addresses of the
``embedding_of`` function and the embedding matrix, and the matrix's number of rows. MULTIPLIER: bits of the embeddings'
factor, 0 for none. ROTARY_TYPES: number of rotary types. ROTARIES, KNOWN_POSITIONS: address of the cosines and sines
``[ROTARY_TYPES, 2, KNOWN_POSITIONS, width]``, and the number of positions that these cover.
"""
NORM, LAST_EPSILON, NORMED, FIRST, PROJECT, PROJECTION, OUT_FEATURES, BIAS, LOGITS, MAXIMA, DIVISOR, CAP = range(9, 21)
"""NORM, LAST_EPSILON: address of the final norm's weight and bits of its epsilon. NORMED: address to which normed
hidden states are written. FIRST: first row with logits. PROJECT, PROJECTION, OUT_FEATURES, BIAS: addresses of the
output layer's matmul and matrix, number of its rows and address of its bias. LOGITS: address of the logits. MAXIMA:
address to which ``fold`` writes the logits' maxima, 0 for none. DIVISOR, CAP: bits of the divisor and of the softcap of
logits; a DIVISOR of 0 means neither."""
LAYER_INPUTS, PLACEHOLDERS, NUMBER_OF_PLACEHOLDERS, CACHING_LAYERS = range(CAP + 1, CAP + 5)
"""LAYER_INPUTS: address of the record of the per-layer inputs, 0 for none. PLACEHOLDERS, NUMBER_OF_PLACEHOLDERS:
address and number of placeholder ids. CACHING_LAYERS: number of layers up to the last one whose keys, values or states
later rows need. In a prefill, all further layers compute only the rows with logits."""
OUTER_FIELDS = CACHING_LAYERS + 1
IN_CACHE = 1 << 17
"""Number of logits to compute at a time, so that they are still in L2 when their maxima are computed."""


@cache
def embedding_of(kind: MatrixKind, size: int) -> Any:
    """Return the C function that reads a format's embeddings; callers must keep it alive while using its address."""
    unpack_of(kind)

    @cfunc(types.void(*[types.int64] * MATMUL_ARGUMENTS), cache=True)
    def embed(
        matrix: int, columns: int, ids_at: int, rows: int, written: int, _1: int, _2: int, _3: int, _4: int
    ) -> None:
        ids, stride = array_at(ids_at, (rows,), types.int64), columns // block_size_of(kind) * size
        for row in range(rows):
            target = written + row * columns * ITEM_SIZE
            call_unpack(unpack_address(kind), (matrix + ids[row] * stride, stride, 1, columns, target))

    return embed


@compiled
def pass_scratch_size(pass_record: Record, layers: Record, rotary_types: int, positions: int) -> int:
    """Return how many float32 values of scratch memory ``compute_pass`` needs."""
    before = rotary_types * _rotary_size(pass_record) + layer_inputs_size(
        pass_record[INPUTS_STRIDE], pass_record[TOTAL_ROWS]
    )
    return before + layers_scratch_size(pass_record, layers, positions)


@compiled
def _rotary_size(pass_record: Record) -> int:
    """Return the size of one rotary type's cosines and sines for all rows, in float32 values."""
    return 2 * pass_record[TOTAL_ROWS] * pass_record[ROTARY_WIDTH]  # type: ignore[no-any-return]


@compiled
def compute_pass(
    pass_record: Record,
    layers: Record,
    starts: Ints,
    outer: Record,
    forced_tokens: Ints,
    hidden: int,
    scratch: int,
) -> bool:
    """Compute a pass and write normalized hidden states and logits; return False for unsupported ids or positions.

    Placeholder ids are unsupported. ``forced_tokens`` is empty or holds, for each row, the only token that can follow
    the row, or a negative number if several tokens can.
    """
    rows, pass_record[ACTIVE_EXPERTS] = pass_record[TOTAL_ROWS], 0
    ids, positions = (
        array_at(outer[IDS], (rows,), types.int64),
        array_at(outer[POSITIONS], (rows,), types.int64),
    )
    for row in range(rows):
        if not (0 <= ids[row] < outer[VOCABULARY] and 0 <= positions[row] < outer[KNOWN_POSITIONS]):
            return False
    placeholders = array_at(outer[PLACEHOLDERS], (outer[NUMBER_OF_PLACEHOLDERS],), types.int64)
    for placeholder in placeholders:
        for row in range(rows):
            if ids[row] == placeholder:
                return False
    if rows:
        call_at(
            outer[EMBED],
            outer[EMBEDDING],
            pass_record[HIDDEN],
            outer[IDS],
            rows,
            hidden,
            0,
            0,
            0,
            0,
        )
        if outer[MULTIPLIER]:
            scale_in_place(hidden, rows * pass_record[HIDDEN], float_of(outer, MULTIPLIER))
    pass_record[ROW_POSITIONS], pass_record[ROTARY_TABLES] = outer[POSITIONS], scratch
    _copy_rotary(pass_record, outer, positions)
    rest = scratch + outer[ROTARY_TYPES] * _rotary_size(pass_record) * ITEM_SIZE
    if outer[LAYER_INPUTS]:
        pass_record[INPUTS] = rest
        compute_layer_inputs(pass_record, outer[LAYER_INPUTS], outer[IDS], rows, hidden, rest)
        rest += layer_inputs_size(pass_record[INPUTS_STRIDE], rows) * ITEM_SIZE
    leaves = outer[FIRST] and pass_record[ADVANCES] and pass_record[SLOTS] == 1
    keeping = min(outer[CACHING_LAYERS], len(layers)) if leaves else len(layers)
    compute_layers(pass_record, layers[:keeping], starts, hidden, rest)
    if keeping < len(layers):
        _leave_rows(pass_record, outer, starts, positions)
        kept_at = hidden + outer[FIRST] * pass_record[HIDDEN] * ITEM_SIZE
        compute_layers(pass_record, layers[keeping:], starts, kept_at, rest)
    epsilon, offset = float_of(outer, LAST_EPSILON), float_of(pass_record, OFFSET)
    norm_rows(hidden, rows, pass_record[HIDDEN], outer[NORM], offset, epsilon, outer[NORMED])
    if len(forced_tokens) > 0:
        _write_open_logits(pass_record, outer, forced_tokens, hidden, scratch)
    else:
        first = outer[FIRST]
        _project(pass_record, outer, rows - first, outer[NORMED] + first * pass_record[HIDDEN] * ITEM_SIZE)
    return True


@compiled
def _leave_rows(pass_record: Record, outer: Record, starts: Ints, positions: Ints) -> None:
    """For the remaining layers, drop all rows before the first with logits, as if an earlier pass had computed them.

    The rows must form a chain, because attention reads no mask if only one row remains.
    """
    first = outer[FIRST]
    pass_record[NEW] -= first
    pass_record[TOTAL_ROWS] -= first
    array_at(pass_record[ROW_OFFSETS], (2,), types.int64)[1] -= first
    starts[0] += first
    pass_record[ROW_POSITIONS] += first * WORD_SIZE
    pass_record[INPUTS] += first * pass_record[INPUTS_STRIDE] * ITEM_SIZE
    if pass_record[MASK]:
        pass_record[MASK] += first * pass_record[MASK_ROW] * ITEM_SIZE
    _copy_rotary(pass_record, outer, positions[first:])


@compiled
def _copy_rotary(pass_record: Record, outer: Record, positions: Ints) -> None:
    """Copy the cosines and then the sines of all rows' positions, for each rotary type."""
    rows, size = len(positions), pass_record[ROTARY_WIDTH] * ITEM_SIZE
    for table in range(2 * outer[ROTARY_TYPES]):
        table_at, written = (
            outer[ROTARIES] + table * outer[KNOWN_POSITIONS] * size,
            pass_record[ROTARY_TABLES] + table * rows * size,
        )
        for row in range(rows):
            copy_floats(table_at + positions[row] * size, pass_record[ROTARY_WIDTH], written + row * size)


@compiled
def _bound(outer: Record, logits: int, count: int) -> None:
    if outer[DIVISOR]:
        bound_in_place(logits, count, float_of(outer, DIVISOR), float_of(outer, CAP))


@compiled
def _project(pass_record: Record, outer: Record, rows: int, normed: int) -> None:
    """Write the logits of normalized rows, and the maxima that ``fold`` computes from them if ``MAXIMA`` isn't 0."""
    width, out_features = pass_record[HIDDEN], outer[OUT_FEATURES]
    matmul = (
        outer[PROJECT],
        outer[PROJECTION],
        out_features,
        width,
        normed,
        rows,
        outer[LOGITS],
        outer[BIAS],
    )
    if not rows:
        return
    logits = array_at(outer[LOGITS], (rows, out_features), types.float32)
    if pass_record[THREAD_POOL] or not outer[MAXIMA]:
        parallel_matmul(pass_record[THREAD_POOL], pass_record[THREADS], *matmul)
        for row in range(rows):
            _bound(outer, logits[row].ctypes.data, out_features)
    if not outer[MAXIMA]:
        return
    maxima = array_at(outer[MAXIMA], (rows, folded_size(out_features)), types.float32)
    if pass_record[THREAD_POOL]:
        for row in range(rows):
            fold(logits[row], maxima[row])
        return
    size = max(1, IN_CACHE // (rows * TOPK_BLOCK)) * TOPK_BLOCK
    for first in range(0, out_features, size):
        end = min(out_features, first + size)
        call_at(*matmul, first, end)
        for row in range(rows):
            _bound(outer, logits[row, first:end].ctypes.data, end - first)
            fold(logits[row, first:end], maxima[row, first // FOLD : first // FOLD + folded_size(end - first)])


@compiled
def _write_open_logits(pass_record: Record, outer: Record, forced_tokens: Ints, hidden: int, scratch: int) -> None:
    """Compute all logits of rows that several tokens can follow; for other rows, write only the forced token's logit.

    The matmul writes the computed rows of logits without gaps. These are then moved to their final positions from last
    to first, because a final position is never before the position where the matmul wrote the row.
    """
    width, out_features, rows, count = pass_record[HIDDEN], outer[OUT_FEATURES], len(forced_tokens), 0
    for row in range(rows):
        if forced_tokens[row] < 0:
            copy_floats(outer[NORMED] + row * width * ITEM_SIZE, width, scratch + count * width * ITEM_SIZE)
            count += 1
    _project(pass_record, outer, count, scratch)
    folded = folded_size(out_features)
    for row in range(rows - 1, -1, -1):
        if forced_tokens[row] < 0:
            count -= 1
            if count < row:
                copy_floats(
                    outer[LOGITS] + count * out_features * ITEM_SIZE,
                    out_features,
                    outer[LOGITS] + row * out_features * ITEM_SIZE,
                )
            if count < row and outer[MAXIMA]:
                maxima_of_row = outer[MAXIMA] + row * folded * ITEM_SIZE
                copy_floats(outer[MAXIMA] + count * folded * ITEM_SIZE, folded, maxima_of_row)
    states = array_at(hidden, (rows, width), types.float32)
    logits = array_at(outer[LOGITS], (rows, out_features), types.float32)
    for row in range(rows):
        if forced_tokens[row] >= 0:
            total = np.float32(0)
            for column in range(width):
                total += states[row, column]
            # The logit is NaN if the row overflowed, so that the acceptance check notices it.
            logits[row, forced_tokens[row]] = np.float32(0) * total


def compile_passes() -> None:
    """Compile ``compute_pass`` by calling it without rows or layers, so that the first pass doesn't have to."""
    pass_record, layers, starts, outer = (np.zeros(size, np.int64) for size in (PASS_FIELDS, FIELDS, 1, OUTER_FIELDS))
    pass_scratch_size(pass_record, layers.reshape(1, -1), 0, 0)
    compute_pass(pass_record, layers.reshape(1, -1)[:0], starts, outer, starts[:0], 0, 0)


TREE_ROWS = LARGEST_TREE + 1
"""Maximum number of rows in a pass over a tree: its nodes and the root."""
FLOAT32_INFINITY = INFINITY[torch.float32]
MASK_VALUE = float(np.finfo(np.float32).min)
"""Mask value of positions that a row doesn't attend to."""

TREE_PASS = np.dtype(
    [
        ("pass_record", np.int64, PASS_FIELDS),
        ("outer_record", np.int64, OUTER_FIELDS),
        ("rows", np.int64),  # number of rows that each slot has memory for
        ("layer_count", np.int64),  # number of layers that the pass computes
        ("mask_width", np.int64),
        # Addresses of buffers.
        ("layers", np.int64),
        ("hidden", np.int64),
        ("scratch", np.int64),
        ("mask", np.int64),
        ("last_masks", np.int64),  # number of rows and context length of each slot's last mask
        ("starts", np.int64),
        ("offsets", np.int64),  # first row of each slot, followed by the total number of rows
        ("ids", np.int64),
        ("positions", np.int64),
        ("forced_tokens", np.int64),
        ("maxima", np.int64),  # folded maxima of each row's logits, which top-k reads
        ("origins", np.int64),  # origin of each row, see ``convolution``
        ("journal", np.int64),  # values that mixers keep of the rows
        ("argmax_walks", np.int64),  # tokens of each slot's argmax walk, and the nodes that drafted them
    ],
    align=True,
)
NODES, LENGTH, WALKS = 1, 2, 3
"""Fields of a tree's header after the root: number of nodes, context length, and 1 if an argmax walk is wanted."""


@compiled
def compute_tree(
    at: int,
    thread_pool: int,
    root: int,
    tokens: Array,
    parents: Array,
    forced_tokens: Array,
    length: int,
    first: int,
    walks: bool,
    ranks: bool,
    advances: bool,
) -> tuple[int, bool]:
    """Compute a pass over one tree, given the record at ``at``, and write the logits of the rows from ``first`` on.

    A row with a forced token gets only that token's logit; see ``compute_pass`` for ``forced_tokens``. With ``ranks``,
    maxima for top-k are written as well. With ``advances``, mixers' states advance past the last row.

    Return ``(length, is_finite)``: the length of the argmax walk, and True if the walk's logits are finite. Without
    ``walks``, return ``(0, True)``; for unsupported ids or positions, ``(-1, False)``.
    """
    record, rows = array_at(at, 1, TREE_PASS)[0], len(tokens) + 1
    record.outer_record[FIRST], record.pass_record[ADVANCES] = first, advances
    _place_tree(record, 0, root, tokens, parents, length, rows)
    if not _compute(record, thread_pool, 1, rows, forced_tokens, ranks):
        return -1, False
    return _walk(record, 0, forced_tokens, tokens, parents) if walks else (0, True)


@compiled
def compute_trees(
    at: int,
    thread_pool: int,
    tree_headers: Array,
    tokens: Array,
    parents: Array,
    forced_tokens: Array,
    min_rows: int,
    ranks: bool,
    walk_results: Array,
) -> bool:
    """Compute a pass over one tree in each slot, padded to ``min_rows``; return False for unsupported ids or positions.

    ``tree_headers`` has a header for each tree. Each tree's row of ``walk_results`` is set to the length of the walk
    and 1 if the walk's logits are finite, or to zeros if no walk is wanted. Padding rows get no logits. See
    ``compute_tree`` for the other arguments.
    """
    record, slots, first, skips = array_at(at, 1, TREE_PASS)[0], len(tree_headers), 0, False
    record.outer_record[FIRST] = record.pass_record[ADVANCES] = 0
    offsets = array_at(record.offsets, (slots + 1,), np.int64)
    forced_tokens_of_rows = array_at(record.forced_tokens, (slots * record.rows,), np.int64)
    largest = 1
    for slot in range(slots):
        nodes = tree_headers[slot, NODES]
        tree_tokens, tree_parents = tokens[first : first + nodes], parents[first : first + nodes]
        rows = max(nodes + 1, min_rows)
        largest = max(largest, rows)
        _place_tree(record, slot, tree_headers[slot, 0], tree_tokens, tree_parents, tree_headers[slot, LENGTH], rows)
        for row in range(rows):
            forced_token = UNDETERMINED if row <= nodes else 0
            if row <= nodes and len(forced_tokens) > 0:
                forced_token = forced_tokens[first + slot + row]
            forced_tokens_of_rows[offsets[slot] + row] = forced_token
            skips |= forced_token != UNDETERMINED
        first += nodes
    if not _compute(
        record,
        thread_pool,
        slots,
        largest,
        forced_tokens_of_rows[: offsets[slots]] if skips else forced_tokens_of_rows[:0],
        ranks,
    ):
        return False
    first = 0
    for slot in range(slots):
        nodes = tree_headers[slot, NODES]
        walk_results[slot] = 0
        if tree_headers[slot, WALKS]:
            tree_tokens, tree_parents = tokens[first : first + nodes], parents[first : first + nodes]
            walk_results[slot, 0], walk_results[slot, 1] = _walk(
                record, slot, forced_tokens_of_rows[offsets[slot] :], tree_tokens, tree_parents
            )
        first += nodes
    return True


@compiled
def _place_tree(record: Any, slot: int, root: int, tokens: Array, parents: Array, length: int, rows: int) -> None:
    """Write a tree's ids, positions and mask, padded to ``rows`` rows."""
    offsets, nodes = array_at(record.offsets, slot + 2, np.int64), len(tokens)
    first = offsets[slot]
    offsets[slot + 1] = first + rows
    ids, positions = array_at(record.ids, first + rows, np.int64), array_at(record.positions, first + rows, np.int64)
    fill_tree(ids[first:], positions[first:], root, tokens, parents, length)
    for row in range(first + nodes + 1, first + rows):
        ids[row], positions[row] = root, length
    array_at(record.starts, slot + 1, np.int64)[slot] = length
    if record.pass_record[MIXER_ROW]:
        fill_origins(origins_at(record.origins, slot, rows), parents)
    if rows > 1:
        last_mask = array_at(record.last_masks, (slot + 1, 2), np.int64)[slot]
        mask = array_at(record.mask, (slot + 1, record.rows, record.mask_width), np.float32)[slot]
        hide_non_ancestors(mask, last_mask[0], last_mask[1], parents, length, MASK_VALUE)
        for row in range(nodes + 1):
            for column in range(length + nodes + 1, length + rows):
                mask[row, column] = MASK_VALUE
        last_mask[0], last_mask[1] = rows, length


@compiled
def _records_of(record: Any) -> tuple[Record, Record]:
    """Return the pass record and the outer record, which are nested in a tree pass's record, as ordinary arrays.

    Nested arrays have their own type in numba, so numba would compile the pass again for them.
    """
    return (
        array_at(record.pass_record.ctypes.data, (PASS_FIELDS,), np.int64),
        array_at(record.outer_record.ctypes.data, (OUTER_FIELDS,), np.int64),
    )


@compiled
def _compute(record: Any, thread_pool: int, slots: int, rows: int, forced_tokens: Array, ranks: bool) -> bool:
    """Compute the pass over the trees that ``_place_tree`` wrote, of which the largest has ``rows`` rows.

    Return False for unsupported ids or positions.
    """
    pass_record, outer_record = _records_of(record)
    pass_record[ROW_OFFSETS], pass_record[TOTAL_ROWS] = (
        record.offsets,
        array_at(record.offsets, slots + 1, np.int64)[slots],
    )
    outer_record[MAXIMA] = record.maxima if ranks else 0
    pass_record[SLOTS], pass_record[NEW], pass_record[THREAD_POOL] = slots, rows, thread_pool
    pass_record[MASK], pass_record[MASK_SLOT], pass_record[MASK_ROW] = (
        record.mask if rows > 1 else 0,
        record.rows * record.mask_width,
        record.mask_width,
    )
    layers, starts = (
        array_at(record.layers, (record.layer_count, FIELDS), np.int64),
        array_at(record.starts, slots, np.int64),
    )
    return compute_pass(pass_record, layers, starts, outer_record, forced_tokens, record.hidden, record.scratch)


@compiled
def accept_path(at: int, thread_pool: int, path: Array) -> None:
    """Advance the mixers' states along a path of the last pass's rows.

    The states must still be those before that pass.
    """
    record = array_at(at, 1, TREE_PASS)[0]
    pass_record, _ = _records_of(record)
    pass_record[THREAD_POOL] = thread_pool
    layers, starts = (
        array_at(record.layers, (record.layer_count, FIELDS), np.int64),
        array_at(record.starts, 1, np.int64),
    )
    accept(pass_record, layers, starts, path, record.scratch)


@compiled
def _walk(record: Any, slot: int, forced_tokens: Array, tokens: Array, parents: Array) -> tuple[int, bool]:
    vocabulary, argmax_walk = (
        record.outer_record[OUT_FEATURES],
        array_at(record.argmax_walks, (slot + 1, 2, TREE_ROWS), np.int64)[slot],
    )
    first = array_at(record.offsets, slot + 1, np.int64)[slot]
    logits = record.outer_record[LOGITS] + first * vocabulary * ITEM_SIZE
    return walk_argmax(
        logits, vocabulary, vocabulary, FLOAT32_INFINITY, forced_tokens, tokens, parents, len(tokens) + 1, argmax_walk
    )


def compile_tree_passes() -> None:
    """Compile the passes over trees by calling them with a token id that no model has."""
    zeros, record, bare = np.zeros(4, np.int64), np.zeros(1, TREE_PASS), DraftTree.bare(-1)
    for name in ("starts", "ids", "positions", "forced_tokens"):
        record[name] = zeros.ctypes.data
    offsets = np.zeros(2, np.int64)
    record["offsets"] = offsets.ctypes.data
    record["outer_record"][0, IDS] = record["outer_record"][0, POSITIONS] = zeros.ctypes.data
    nodes, at = (bare.tokens, bare.parents), record.ctypes.data
    compute_tree(at, 0, bare.root, *nodes, NO_FORCED_TOKENS, 0, 0, True, False, False)
    compute_trees(at, 0, np.array([[-1, 0, 0, 1]]), *nodes, NO_FORCED_TOKENS, 1, False, np.zeros((1, 2), np.int64))
    accept_path(at, 0, zeros)
