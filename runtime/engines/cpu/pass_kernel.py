"""A whole pass in compiled code: embeddings, rotary positions, decoder layers, the last norm and the logits."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cfunc, types

from hdtool.runtime.engines.cpu.layer_inputs import compute_layer_inputs, layer_input_numbers
from hdtool.runtime.engines.cpu.layer_kernel import compute_layers, scratch_numbers
from hdtool.runtime.engines.cpu.layer_record import (
    ADVANCES,
    FIELDS,
    HIDDEN,
    INPUTS,
    INPUTS_STRIDE,
    MASK,
    MASK_ROW,
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
)
from hdtool.runtime.kernels.compiled import compiled
from hdtool.runtime.kernels.elementwise import bound_in_place, norm_rows, scale_in_place
from hdtool.runtime.kernels.gemm_tiles import block_numbers, unpack_row
from hdtool.runtime.kernels.matmul_address import ARGUMENTS, call_at
from hdtool.runtime.kernels.matrix_kind import MatrixKind
from hdtool.runtime.kernels.memory.raw_memory import WORD_SIZE, array_at, copy_numbers, float_of
from hdtool.runtime.kernels.team import multiply_together
from hdtool.runtime.kernels.topk import BLOCK, FOLD, fold, folded_size
from hdtool.runtime.kernels.vector_code import ITEM_SIZE

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
