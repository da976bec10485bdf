"""Decoder layers of the Llama kind in compiled code: matmuls, and what lies between them.

Each row is computed by itself, in an order of operations that its own numbers determine, so its bits depend neither on
other rows nor on the number of threads.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import cfunc, types

from hdtool.runtime.engines.cpu.attention import attend, attention_numbers, query_blocks
from hdtool.runtime.kernels.compiled import compiled
from hdtool.runtime.kernels.elementwise import add_in_place, gate_in_place, norm_row, norm_rows, rotate_head
from hdtool.runtime.kernels.matmul_address import ARGUMENTS
from hdtool.runtime.kernels.memory.raw_memory import array_at, copy_numbers
from hdtool.runtime.kernels.team import LEAST_NUMBERS, WORD_SIZE, compute_together, multiply_together, parts_of
from hdtool.runtime.kernels.vector_code import ITEM_SIZE

TO_QUERIES, TO_KEYS, TO_VALUES, TO_OUTPUT, TO_GATE, TO_UP, TO_DOWN = range(7)
"""The matmuls of a layer."""
MATMUL_FIELDS = 5
"""Addresses of the compiled matmul and of the matrix, rows and columns of it, address of the bias."""
NORM_BEFORE, NORM_AFTER, NORM_Q, NORM_K, KEYS, VALUES = range(7 * MATMUL_FIELDS, 7 * MATMUL_FIELDS + 6)
"""Addresses of the weights of norms, 0 for none, and of the layer's keys and values."""
FIELDS = VALUES + 1

SLOTS, NEW, HEADS, GROUPS, WIDTH, HIDDEN, INNER, COS, SIN, SLOT_STRIDE, HEAD_STRIDE, MASK, MASK_SLOT, MASK_ROW = range(
    14
)
TEAM, THREADS, PART, SCALE, EPSILON = range(14, 19)
"""Of a pass: sequences and new rows of each; shapes; addresses of the rotary positions; and numbers from one sequence,
head or row of the mask to the next; then the open team of threads, 0 for none, and their number; the address of
``part_function``; and the bits of the factor of scores and of the epsilon of norms."""
PASS_FIELDS = EPSILON + 1

NORM, APPEND, ATTEND, ADD_AND_NORM, GATE, ADD = range(6)
"""The parts of a layer between its matmuls."""

Numbers = npt.NDArray[np.int64]


@cache
def part_function() -> Any:
    """All parts between matmuls as one C function; threads share its units, which are rows, or blocks of queries."""

    @cfunc(types.void(*[types.int64] * ARGUMENTS), cache=True)
    def compute_part(
        of_pass: int, of_layer: int, of_starts: int, part: int, one: int, two: int, three: int, first: int, end: int
    ) -> None:
        shape, layer = array_at(of_pass, (PASS_FIELDS,), types.int64), array_at(of_layer, (FIELDS,), types.int64)
        starts = array_at(of_starts, (shape[SLOTS],), types.int64)
        epsilon = _number_at(of_pass + EPSILON * WORD_SIZE)
        width, inner = shape[HIDDEN], shape[INNER]
        rows, at, at_inner = end - first, first * width * ITEM_SIZE, first * inner * ITEM_SIZE
        if part == NORM:
            norm_rows(one + at, rows, width, layer[NORM_BEFORE], epsilon, two + at)
        elif part == APPEND:
            _append(shape, layer, starts, epsilon, one, two, three, first, end)
        elif part == ATTEND:
            _attend(shape, layer, starts, one, two, three, first, end)
        elif part == ADD_AND_NORM:
            add_in_place(one + at, two + at, rows * width)
            norm_rows(one + at, rows, width, layer[NORM_AFTER], epsilon, three + at)
        elif part == GATE:
            gate_in_place(one + at_inner, two + at_inner, rows * inner)
        else:
            add_in_place(one + at, two + at, rows * width)

    return compute_part


@compiled
def _number_at(address: int) -> Any:
    return array_at(address, (1,), types.float32)[0]


@compiled
def _append(
    shape: Numbers,
    layer: Numbers,
    starts: Numbers,
    epsilon: Any,
    queries: int,
    keys: int,
    values: int,
    first: int,
    end: int,
) -> None:
    """Rotate queries and keys of some rows, and append keys and values to the cache after ``starts``.

    ``queries``, ``keys`` and ``values`` are the outputs of their matmuls; queries are changed in place.
    """
    new, heads, width = shape[NEW], shape[HEADS], shape[WIDTH]
    query_heads, size = heads * shape[GROUPS], width * ITEM_SIZE
    for row in range(first, end):
        slot, place = row // new, row % new
        kept_slot = slot * shape[SLOT_STRIDE]
        cos, sin = shape[COS] + row * size, shape[SIN] + row * size
        for head in range(query_heads):
            at = queries + (row * query_heads + head) * size
            if layer[NORM_Q]:
                norm_row(at, layer[NORM_Q], width, epsilon, at)
            rotate_head(at, cos, sin, width, at)
        for head in range(heads):
            at = (row * heads + head) * size
            kept = (kept_slot + head * shape[HEAD_STRIDE] + (starts[slot] + place) * width) * ITEM_SIZE
            if layer[NORM_K]:
                norm_row(keys + at, layer[NORM_K], width, epsilon, keys + at)
            rotate_head(keys + at, cos, sin, width, layer[KEYS] + kept)
            copy_numbers(values + at, width, layer[VALUES] + kept)


@compiled
def _attend(
    shape: Numbers, layer: Numbers, starts: Numbers, queries: int, scratch: int, written: int, first: int, end: int
) -> None:
    """Attention of some blocks of queries, numbered sequence by sequence."""
    new, heads, groups, width = shape[NEW], shape[HEADS], shape[GROUPS], shape[WIDTH]
    scale = _number_at(shape.ctypes.data + SCALE * WORD_SIZE)
    blocks, memory = heads * query_blocks(new, groups), attention_numbers(starts.max() + new, width)
    # Rounded up, this is the number of the part: each of them has memory of its own.
    own = scratch + -(-first * _attention_parts(shape) // (shape[SLOTS] * blocks)) * memory * ITEM_SIZE
    for slot in range(first // blocks, (end + blocks - 1) // blocks):
        at = slot * new * heads * groups * width * ITEM_SIZE
        kept = slot * shape[SLOT_STRIDE] * ITEM_SIZE
        mask = shape[MASK] + slot * shape[MASK_SLOT] * ITEM_SIZE if shape[MASK] else 0
        attend(
            queries + at,
            new,
            heads,
            groups,
            width,
            layer[KEYS] + kept,
            layer[VALUES] + kept,
            shape[HEAD_STRIDE],
            starts[slot] + new,
            mask,
            shape[MASK_ROW],
            scale,
            own,
            written + at,
            max(first - slot * blocks, 0),
            min(end - slot * blocks, blocks),
        )


@compiled
def _attention_parts(shape: Numbers) -> int:
    """The parts into which the attention of a layer is divided for several threads."""
    return parts_of(shape[THREADS], shape[SLOTS] * shape[HEADS] * query_blocks(shape[NEW], shape[GROUPS]), 1)


@compiled
def scratch_numbers(shape: Numbers, positions: int) -> int:
    """The float32 numbers of scratch memory that ``compute_layers`` needs."""
    rows, width = shape[SLOTS] * shape[NEW], shape[WIDTH]
    of_row = shape[HIDDEN] + 2 * shape[HEADS] * (shape[GROUPS] + 1) * width + 2 * shape[INNER]
    return rows * of_row + _attention_parts(shape) * attention_numbers(positions, width)  # type: ignore[no-any-return]


@compiled
def _multiply(shape: Numbers, layer: Numbers, which: int, inputs: int, rows: int, outputs: int) -> None:
    matmul, matrix, out_features, columns, bias = layer[which * MATMUL_FIELDS : (which + 1) * MATMUL_FIELDS]
    multiply_together(shape[TEAM], shape[THREADS], matmul, matrix, out_features, columns, inputs, rows, outputs, bias)


@compiled
def _compute(
    shape: Numbers, layer: Numbers, starts: Numbers, part: int, one: int, two: int, three: int, units: int, work: int
) -> None:
    """Compute a part between matmuls, with the other threads if there is enough work."""
    team = shape[TEAM] if work >= LEAST_NUMBERS else 0
    of_layer = shape.ctypes.data, layer.ctypes.data, starts.ctypes.data
    compute_together(team, shape[THREADS], shape[PART], *of_layer, part, one, two, three, units, 1)


@compiled
def compute_layers(shape: Numbers, layers: npt.NDArray[np.int64], starts: Numbers, hidden: int, scratch: int) -> None:
    """Compute all layers; ``hidden`` is changed in place."""
    rows, heads, width = shape[SLOTS] * shape[NEW], shape[HEADS], shape[WIDTH]
    query_numbers, key_numbers = rows * heads * shape[GROUPS] * width, rows * heads * width
    numbers, inner_numbers = rows * shape[HIDDEN], rows * shape[INNER]
    normed = scratch
    queries = normed + numbers * ITEM_SIZE
    keys = queries + query_numbers * ITEM_SIZE
    values = keys + key_numbers * ITEM_SIZE
    attended = values + key_numbers * ITEM_SIZE
    gate = attended + query_numbers * ITEM_SIZE
    up = gate + inner_numbers * ITEM_SIZE
    rest = up + inner_numbers * ITEM_SIZE
    blocks = shape[SLOTS] * heads * query_blocks(shape[NEW], shape[GROUPS])
    work = query_numbers * (starts.max() + shape[NEW])
    for number in range(len(layers)):
        layer = layers[number]
        _compute(shape, layer, starts, NORM, hidden, normed, 0, rows, numbers)
        _multiply(shape, layer, TO_QUERIES, normed, rows, queries)
        _multiply(shape, layer, TO_KEYS, normed, rows, keys)
        _multiply(shape, layer, TO_VALUES, normed, rows, values)
        _compute(shape, layer, starts, APPEND, queries, keys, values, rows, query_numbers)
        _compute(shape, layer, starts, ATTEND, queries, rest, attended, blocks, work)
        _multiply(shape, layer, TO_OUTPUT, attended, rows, normed)
        _compute(shape, layer, starts, ADD_AND_NORM, hidden, normed, normed, rows, numbers)
        _multiply(shape, layer, TO_GATE, normed, rows, gate)
        _multiply(shape, layer, TO_UP, normed, rows, up)
        _compute(shape, layer, starts, GATE, gate, up, 0, rows, inner_numbers)
        _multiply(shape, layer, TO_DOWN, gate, rows, normed)
        _compute(shape, layer, starts, ADD, hidden, normed, 0, rows, numbers)


def compile_layers() -> None:
    """Compile all of this ahead: a first pass would wait for it."""
    shape, layer, starts = (np.zeros(size, np.int64) for size in (PASS_FIELDS, FIELDS, 1))
    part_function()
    scratch_numbers(shape, 0)
    compute_layers(shape, layer.reshape(1, -1)[:0], starts, 0, 0)
