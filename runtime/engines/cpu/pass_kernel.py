"""Computes a whole pass in compiled code: embeddings, rotary positions, decoder layers, final norm and logits.

Only the trees and context lengths change from pass to pass. Everything else is in a record of addresses, which
``TreePass`` fills in again only if the KV cache, the number of threads or the weights have changed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import types

from hdtool.runtime.core.tree import LARGEST_TREE, UNDETERMINED, DraftTree, mark_ancestors
from hdtool.runtime.core.tree_walks import NO_FORCED_TOKENS, walk_argmax
from hdtool.runtime.engines.cpu.convolution import fill_origins, origins_at
from hdtool.runtime.engines.cpu.layer_kernel import compute_layers, layers_scratch_size
from hdtool.runtime.engines.cpu.layer_record import (
    EMBED,
    LAYER,
    LAYER_INPUTS,
    NORM,
    PASS,
    apply_norm,
    call_embed,
    compute_layer_inputs,
    layer_inputs_size,
    multiply,
    offsets_of,
    starts_of,
)
from hdtool.runtime.engines.cpu.mixer_kernel import accept
from hdtool.runtime.kernels.compiled import (
    WORD_SIZE,
    Array,
    Ints,
    Record,
    array_at,
    c_function,
    compiled,
    copy_floats,
    struct_at,
    zeroed_records,
)
from hdtool.runtime.kernels.gemm_tiles import unpack_row
from hdtool.runtime.kernels.matmul import KERNELS, MATMUL, call_at
from hdtool.runtime.kernels.matrix_formats import BlockFormat
from hdtool.runtime.kernels.row_operations import bound_in_place, scale_in_place
from hdtool.runtime.kernels.topk import FOLD, INFINITY, TOPK_BLOCK, fold, folded_size
from hdtool.runtime.kernels.vector_code import ITEM_SIZE
from hdtool.runtime.model.pass_inputs import fill_tree

OUTER = np.dtype(
    [
        ("embed", np.int64),  # address of the ``embedding_of`` function
        ("embedding", np.int64),  # address of the embedding matrix
        ("vocabulary", np.int64),  # the embedding matrix's number of rows
        ("placeholders", np.int64),  # address of the placeholder ids
        ("placeholder_count", np.int64),
        ("multiplier", np.float32),  # factor of the embeddings, 0 for none
        ("layer_inputs", LAYER_INPUTS),
        ("rotary_types", np.int64),
        ("rotaries", np.int64),  # address of cosines and sines ``[rotary_types, 2, known_positions, width]``
        ("known_positions", np.int64),
        ("caching_layers", np.int64),  # layers up to the last one whose keys, values or states later rows need
        ("norm", NORM),  # the final norm
        ("epsilon", np.float32),  # of the final norm
        ("normed", np.int64),  # address to which normed hidden states are written
        ("first", np.int64),  # first row with logits
        ("head", MATMUL),  # the output layer
        ("logits", np.int64),  # address
        ("maxima", np.int64),  # address to which ``fold`` writes the logits' maxima, 0 for none
        ("divisor", np.float32),  # of the logits; 0 if these have neither a divisor nor a softcap
        ("softcap", np.float32),  # of the logits
    ],
    align=True,
)
"""The record of what a pass computes outside its layers: embeddings, rotary positions, final norm and logits."""
IN_CACHE = 1 << 17
"""Number of logits to compute at a time, so that they are still in L2 when their maxima are computed."""


@c_function(EMBED)
def embedding_of(format: BlockFormat) -> Any:
    """Return the C function that reads embeddings in a format."""
    name, block_size, block_bytes = format.name, format.block_size, format.bytes

    def embed(matrix: int, columns: int, ids_at: int, rows: int, written: int) -> None:
        ids, stride = array_at(ids_at, (rows,), types.int64), columns // block_size * block_bytes
        for row in range(rows):
            unpack_row(matrix + ids[row] * stride, name, columns, written + row * columns * ITEM_SIZE)

    return embed


@compiled
def pass_scratch_size(pass_record: Record, layers: Record, rotary_types: int, positions: int) -> int:
    """Return how many float32 values of scratch memory a pass needs."""
    before = rotary_types * _rotary_size(pass_record) + layer_inputs_size(
        pass_record.inputs_stride, pass_record.total_rows
    )
    if pass_record.has_side_blocks:
        before += pass_record.total_rows * pass_record.hidden
    return before + layers_scratch_size(pass_record, layers, positions)


@compiled
def _rotary_size(pass_record: Record) -> int:
    """Return the size of one rotary type's cosines and sines for all rows, in float32 values."""
    return 2 * pass_record.total_rows * pass_record.rotary_width  # type: ignore[no-any-return]


@compiled
def _compute_pass(record: Any, thread_pool: int, slots: int, rows: int, forced_tokens: Array, ranks: bool) -> bool:
    """Compute the pass over the trees that ``_place_tree`` wrote, of which the largest has ``rows`` rows.

    Write normalized hidden states and logits; return False for unsupported ids or positions, such as placeholders.
    ``forced_tokens`` is empty or holds, for each row, the only token that can follow the row, or a negative number if
    several tokens can.
    """
    pass_record, outer, hidden, scratch = record.pass_record, record.outer_record, record.hidden, record.scratch
    pass_record.slots, pass_record.new, pass_record.thread_pool = slots, rows, thread_pool
    pass_record.starts, pass_record.row_offsets = record.starts, record.offsets
    pass_record.mask, pass_record.mask_row_stride = record.mask if rows > 1 else 0, record.mask_width
    pass_record.mask_slot_stride = record.rows * record.mask_width
    pass_record.row_positions, pass_record.rotary_tables = record.positions, scratch
    rows, outer.maxima = offsets_of(pass_record)[slots], record.maxima if ranks else 0
    pass_record.total_rows, pass_record.active_experts = rows, 0
    ids, positions = array_at(record.ids, (rows,), types.int64), array_at(record.positions, (rows,), types.int64)
    for row in range(rows):
        if not (0 <= ids[row] < outer.vocabulary and 0 <= positions[row] < outer.known_positions):
            return False
    placeholders = array_at(outer.placeholders, (outer.placeholder_count,), types.int64)
    for placeholder in placeholders:
        for row in range(rows):
            if ids[row] == placeholder:
                return False
    call_embed(outer.embed, (outer.embedding, pass_record.hidden, record.ids, rows, hidden))
    if outer.multiplier:
        scale_in_place(hidden, rows * pass_record.hidden, outer.multiplier)
    _copy_rotary(pass_record, outer, positions)
    rest = scratch + outer.rotary_types * _rotary_size(pass_record) * ITEM_SIZE
    if outer.layer_inputs.projection.kernels:
        pass_record.inputs = rest
        compute_layer_inputs(pass_record, outer.layer_inputs, record.ids, rows, hidden, rest)
        rest += layer_inputs_size(pass_record.inputs_stride, rows) * ITEM_SIZE
    if pass_record.has_side_blocks:
        pass_record.embedded = rest
        copy_floats(hidden, rows * pass_record.hidden, rest)
        rest += rows * pass_record.hidden * ITEM_SIZE
    layers = array_at(record.layers, record.layer_count, LAYER)
    leaves = outer.first and pass_record.advances and pass_record.slots == 1
    keeping = min(outer.caching_layers, len(layers)) if leaves else len(layers)
    compute_layers(pass_record, layers[:keeping], hidden, rest)
    if keeping < len(layers):
        _leave_rows(pass_record, outer, positions)
        kept_at = hidden + outer.first * pass_record.hidden * ITEM_SIZE
        compute_layers(pass_record, layers[keeping:], kept_at, rest)
    apply_norm(pass_record, outer.norm, outer.epsilon, hidden, rows, pass_record.hidden, outer.normed)
    if len(forced_tokens) > 0:
        _write_open_logits(pass_record, outer, forced_tokens, hidden, scratch)
    else:
        first = outer.first
        _project(pass_record, outer, rows - first, outer.normed + first * pass_record.hidden * ITEM_SIZE)
    return True


@compiled
def _leave_rows(pass_record: Record, outer: Record, positions: Ints) -> None:
    """For the remaining layers, drop all rows before the first with logits, as if an earlier pass had computed them.

    The rows must form a chain, because attention reads no mask if only one row remains.
    """
    first = outer.first
    pass_record.new -= first
    pass_record.total_rows -= first
    offsets_of(pass_record)[1] -= first
    starts_of(pass_record)[0] += first
    pass_record.row_positions += first * WORD_SIZE
    pass_record.embedded += first * pass_record.hidden * ITEM_SIZE
    pass_record.inputs += first * pass_record.inputs_stride * ITEM_SIZE
    if pass_record.mask:
        pass_record.mask += first * pass_record.mask_row_stride * ITEM_SIZE
    _copy_rotary(pass_record, outer, positions[first:])


@compiled
def _copy_rotary(pass_record: Record, outer: Record, positions: Ints) -> None:
    """Copy the cosines and then the sines of all rows' positions, for each rotary type."""
    rows, size = len(positions), pass_record.rotary_width * ITEM_SIZE
    for table in range(2 * outer.rotary_types):
        table_at = outer.rotaries + table * outer.known_positions * size
        written = pass_record.rotary_tables + table * rows * size
        for row in range(rows):
            copy_floats(table_at + positions[row] * size, pass_record.rotary_width, written + row * size)


@compiled
def _bound(outer: Record, logits: int, count: int) -> None:
    if outer.divisor:
        bound_in_place(logits, count, outer.divisor, outer.softcap)


@compiled
def _project(pass_record: Record, outer: Record, rows: int, normed: int) -> None:
    """Write the logits of normalized rows, and the maxima that ``fold`` computes from them if ``maxima`` isn't 0."""
    head, out_features = outer.head, outer.head.out_features
    if not rows:
        return
    logits = array_at(outer.logits, (rows, out_features), types.float32)
    if pass_record.thread_pool or not outer.maxima:
        multiply(pass_record, head, normed, rows, outer.logits)
        for row in range(rows):
            _bound(outer, logits[row].ctypes.data, out_features)
    if not outer.maxima:
        return
    maxima = array_at(outer.maxima, (rows, folded_size(out_features)), types.float32)
    if pass_record.thread_pool:
        for row in range(rows):
            fold(logits[row], maxima[row])
        return
    size = max(1, IN_CACHE // (rows * TOPK_BLOCK)) * TOPK_BLOCK
    for first in range(0, out_features, size):
        end = min(out_features, first + size)
        computed = head.matrix, out_features, head.columns, normed, rows, outer.logits, head.bias, first, end
        call_at(struct_at(head.kernels, KERNELS).multiply, (head.kernels, *computed))
        for row in range(rows):
            _bound(outer, logits[row, first:end].ctypes.data, end - first)
            fold(logits[row, first:end], maxima[row, first // FOLD : first // FOLD + folded_size(end - first)])


@compiled
def _write_open_logits(pass_record: Record, outer: Record, forced_tokens: Ints, hidden: int, scratch: int) -> None:
    """Compute all logits of rows that several tokens can follow; for other rows, write only the forced token's logit.

    The matmul writes the computed rows of logits without gaps. These are then moved to their final positions from last
    to first, because a final position is never before the position where the matmul wrote the row.
    """
    width, out_features, rows, count = pass_record.hidden, outer.head.out_features, len(forced_tokens), 0
    for row in range(rows):
        if forced_tokens[row] < 0:
            copy_floats(outer.normed + row * width * ITEM_SIZE, width, scratch + count * width * ITEM_SIZE)
            count += 1
    _project(pass_record, outer, count, scratch)
    folded = folded_size(out_features)
    for row in range(rows - 1, -1, -1):
        if forced_tokens[row] < 0:
            count -= 1
            if count < row:
                copy_floats(
                    outer.logits + count * out_features * ITEM_SIZE,
                    out_features,
                    outer.logits + row * out_features * ITEM_SIZE,
                )
            if count < row and outer.maxima:
                maxima_of_row = outer.maxima + row * folded * ITEM_SIZE
                copy_floats(outer.maxima + count * folded * ITEM_SIZE, folded, maxima_of_row)
    states = array_at(hidden, (rows, width), types.float32)
    logits = array_at(outer.logits, (rows, out_features), types.float32)
    for row in range(rows):
        if forced_tokens[row] >= 0:
            total = np.float32(0)
            for column in range(width):
                total += states[row, column]
            # The logit is NaN if the row overflowed, so that the acceptance check notices it.
            logits[row, forced_tokens[row]] = np.float32(0) * total


TREE_ROWS = LARGEST_TREE + 1
"""Maximum number of rows in a pass over a tree: its nodes and the root."""
FLOAT32_INFINITY = INFINITY[torch.float32]
MASK_VALUE = float(np.finfo(np.float32).min)
"""Mask value of positions that a row doesn't attend to."""

TREE_PASS = np.dtype(
    [
        ("pass_record", PASS),
        ("outer_record", OUTER),
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
        ("tree_headers", np.int64),  # root, nodes, context length and 1 if an argmax walk is wanted, for each slot
        ("walk_results", np.int64),  # length of each slot's argmax walk, and 1 if the walk's logits are finite
        ("argmax_walks", np.int64),  # tokens of each slot's argmax walk, and the nodes that drafted them
    ],
    align=True,
)
NODES, LENGTH, WALKS, HEADER = range(1, 5)
"""Fields of a tree's header after the root, and the number of all fields."""


@compiled
def compute_trees(
    pass_at: int,
    thread_pool: int,
    slots: int,
    tokens: Array,
    parents: Array,
    forced_tokens: Array,
    min_rows: int,
    first_logits: int,
    ranks: bool,
    advances: bool,
) -> bool:
    """Compute a pass over one tree in each of the first slots, padded to ``min_rows``, given the record at ``pass_at``.

    The trees' headers are in the record, and so are the results of their argmax walks, which are zeros if no walk is
    wanted. Rows before ``first_logits`` and padding rows get no logits, and a row with a forced token gets only that
    token's; see ``_compute_pass`` for ``forced_tokens``. With ``ranks``, maxima for top-k are written as well. With
    ``advances``, mixers' states advance past the last row. Return False for unsupported ids or positions.
    """
    record, first, skips = array_at(pass_at, 1, TREE_PASS)[0], 0, False
    tree_headers = array_at(record.tree_headers, (slots, HEADER), np.int64)
    walk_results = array_at(record.walk_results, (slots, 2), np.int64)
    record.outer_record.first, record.pass_record.advances = first_logits, advances
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
    if not _compute_pass(
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
    if record.pass_record.mixer_row:
        fill_origins(origins_at(record.origins, slot, rows), parents)
    if rows > 1:
        last_mask = array_at(record.last_masks, (slot + 1, 2), np.int64)[slot]
        mask = array_at(record.mask, (slot + 1, record.rows, record.mask_width), np.float32)[slot]
        for row in range(last_mask[0]):
            for column in range(last_mask[1], last_mask[1] + last_mask[0]):
                mask[row, column] = 0.0
        mark_ancestors(mask, length, parents, 0.0, MASK_VALUE)
        for row in range(nodes + 1):
            for column in range(length + nodes + 1, length + rows):
                mask[row, column] = MASK_VALUE
        last_mask[0], last_mask[1] = rows, length


@compiled
def accept_path(pass_at: int, thread_pool: int, path: Array) -> None:
    """Advance the mixers' states along a path of the last pass's rows.

    The states must still be those before that pass.
    """
    record = array_at(pass_at, 1, TREE_PASS)[0]
    record.pass_record.thread_pool = thread_pool
    accept(record.pass_record, array_at(record.layers, record.layer_count, LAYER), path, record.scratch)


@compiled
def _walk(record: Any, slot: int, forced_tokens: Array, tokens: Array, parents: Array) -> tuple[int, bool]:
    vocabulary = record.outer_record.head.out_features
    argmax_walk = array_at(record.argmax_walks, (slot + 1, 2, TREE_ROWS), np.int64)[slot]
    first = array_at(record.offsets, slot + 1, np.int64)[slot]
    logits = record.outer_record.logits + first * vocabulary * ITEM_SIZE
    return walk_argmax(
        logits, vocabulary, vocabulary, FLOAT32_INFINITY, forced_tokens, tokens, parents, len(tokens) + 1, argmax_walk
    )


def compile_passes() -> None:
    """Compile the passes ahead of the first one, by calling them with a token id that no model has."""
    zeros, record, bare = np.zeros(4, np.int64), zeroed_records(TREE_PASS), DraftTree.bare(-1)
    for name in ("starts", "ids", "positions", "forced_tokens", "walk_results"):
        record[name] = zeros.ctypes.data
    offsets, header = np.zeros(2, np.int64), np.array([bare.root, 0, 0, 1])
    record["offsets"], record["tree_headers"] = offsets.ctypes.data, header.ctypes.data
    pass_scratch_size(record[0].pass_record, zeroed_records(LAYER, 0), 0, 0)
    compute_trees(record.ctypes.data, 0, 1, bare.tokens, bare.parents, NO_FORCED_TOKENS, 1, 0, False, False)
    accept_path(record.ctypes.data, 0, zeros)
