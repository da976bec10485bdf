"""Decoder layers of the Llama kind in compiled code: the parts between the products, and whole layers.

Both ways compute with the same compiled parts, so their results differ only if their products do.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import cfunc, types

from hdtool.runtime.kernels.compiled import compiled
from hdtool.runtime.kernels.fused.attention import attend, attention_numbers, query_blocks
from hdtool.runtime.kernels.fused.elementwise import (
    add_in_place,
    gate_in_place,
    norm_row,
    norm_rows,
    rotate_head,
)
from hdtool.runtime.kernels.memory.raw_memory import array_at, copy_numbers
from hdtool.runtime.kernels.product_address import ARGUMENTS
from hdtool.runtime.kernels.team import LEAST_NUMBERS, WORD_SIZE, compute_together, multiply_together, parts_of
from hdtool.runtime.kernels.vector_code import ITEM_SIZE

TO_QUERIES, TO_KEYS, TO_VALUES, TO_OUTPUT, TO_GATE, TO_UP, TO_DOWN = range(7)
"""The products of a layer."""
PRODUCT_FIELDS = 5
"""Addresses of the compiled product and of the matrix, rows and columns of it, address of the bias."""
NORM_BEFORE, NORM_AFTER, NORM_Q, NORM_K, KEYS, VALUES = range(7 * PRODUCT_FIELDS, 7 * PRODUCT_FIELDS + 6)
"""Addresses of the weights of norms, 0 for none, and of the layer's keys and values."""
FIELDS = VALUES + 1

SLOTS, NEW, HEADS, GROUPS, WIDTH, HIDDEN, INNER, COS, SIN, SLOT_APART, HEAD_APART, MASK, MASK_SLOT, MASK_ROW = range(14)
TEAM, THREADS, ATTENTION, SCALE = range(14, 18)
"""Of a pass: sequences and new rows of each; shapes; addresses of the rotary positions; and numbers from one sequence,
head or row of the mask to the next; then the open team of threads, 0 for none, and their number; the address of
``attention_function``; and the bits of the factor of scores."""
PASS_FIELDS = SCALE + 1

Numbers = npt.NDArray[np.int64]


@compiled
def product(shape: Numbers, layer: Numbers, which: int, inputs: int, rows: int, outputs: int) -> None:
    """One of the seven products of a layer: all weights are read here."""
    compiled, matrix, outs, columns, bias = layer[which * PRODUCT_FIELDS : (which + 1) * PRODUCT_FIELDS]
    multiply_together(shape[TEAM], shape[THREADS], compiled, matrix, outs, columns, inputs, rows, outputs, bias)


@compiled
def norm_before(shape: Numbers, layer: Numbers, epsilon: Any, hidden: int, written: int) -> None:
    norm_rows(hidden, shape[SLOTS] * shape[NEW], shape[HIDDEN], layer[NORM_BEFORE], epsilon, written)


@cache
def attention_function() -> Any:
    """The attention of a layer as a C function, whose units are blocks of queries, sequence by sequence."""

    @cfunc(types.void(*[types.int64] * ARGUMENTS), cache=True)
    def attend_blocks(
        of_pass: int,
        of_layer: int,
        of_starts: int,
        queries: int,
        scratch: int,
        memory: int,
        written: int,
        first: int,
        end: int,
    ) -> None:
        shape, layer = array_at(of_pass, (PASS_FIELDS,), types.int64), array_at(of_layer, (FIELDS,), types.int64)
        starts = array_at(of_starts, (shape[SLOTS],), types.int64)
        new, heads, groups, width = shape[NEW], shape[HEADS], shape[GROUPS], shape[WIDTH]
        scale = array_at(of_pass + SCALE * WORD_SIZE, (1,), types.float32)[0]
        blocks = heads * query_blocks(new, groups)
        # Rounded up, this is the number of the part: each of them has memory of its own.
        own = scratch + -(-first * _attention_parts(shape) // (shape[SLOTS] * blocks)) * memory * ITEM_SIZE
        for slot in range(first // blocks, (end + blocks - 1) // blocks):
            at = slot * new * heads * groups * width * ITEM_SIZE
            kept = slot * shape[SLOT_APART] * ITEM_SIZE
            mask = shape[MASK] + slot * shape[MASK_SLOT] * ITEM_SIZE if shape[MASK] else 0
            attend(
                queries + at,
                new,
                heads,
                groups,
                width,
                layer[KEYS] + kept,
                layer[VALUES] + kept,
                shape[HEAD_APART],
                starts[slot] + new,
                mask,
                shape[MASK_ROW],
                scale,
                own,
                written + at,
                max(first - slot * blocks, 0),
                min(end - slot * blocks, blocks),
            )

    return attend_blocks


@compiled
def _attention_parts(shape: Numbers) -> int:
    """The parts into which the attention of a layer is divided for several threads."""
    return parts_of(shape[THREADS], shape[SLOTS] * shape[HEADS] * query_blocks(shape[NEW], shape[GROUPS]), 1)


@compiled
def attend_layer(
    shape: Numbers,
    layer: Numbers,
    starts: Numbers,
    epsilon: Any,
    queries: int,
    keys: int,
    values: int,
    scratch: int,
    written: int,
) -> None:
    """Rotate queries and keys, append keys and values to the cache after ``starts``, and attend.

    ``queries``, ``keys`` and ``values`` are the outputs of their products; queries are changed in place.
    """
    new, heads, width = shape[NEW], shape[HEADS], shape[WIDTH]
    query_heads = heads * shape[GROUPS]
    size = width * ITEM_SIZE
    for slot in range(shape[SLOTS]):
        own_keys = layer[KEYS] + slot * shape[SLOT_APART] * ITEM_SIZE
        own_values = layer[VALUES] + slot * shape[SLOT_APART] * ITEM_SIZE
        for place in range(new):
            row = slot * new + place
            cos, sin = shape[COS] + row * size, shape[SIN] + row * size
            for head in range(query_heads):
                at = queries + (row * query_heads + head) * size
                if layer[NORM_Q]:
                    norm_row(at, layer[NORM_Q], width, epsilon, at)
                rotate_head(at, cos, sin, width, at)
            for head in range(heads):
                at = (row * heads + head) * size
                kept = (head * shape[HEAD_APART] + (starts[slot] + place) * width) * ITEM_SIZE
                if layer[NORM_K]:
                    norm_row(keys + at, layer[NORM_K], width, epsilon, keys + at)
                rotate_head(keys + at, cos, sin, width, own_keys + kept)
                copy_numbers(values + at, width, own_values + kept)
    positions = starts.max() + new
    work = shape[SLOTS] * new * query_heads * width * positions
    compute_together(
        shape[TEAM] if work >= LEAST_NUMBERS else 0,
        shape[THREADS],
        shape[ATTENTION],
        shape.ctypes.data,
        layer.ctypes.data,
        starts.ctypes.data,
        queries,
        scratch,
        attention_numbers(positions, width),
        written,
        shape[SLOTS] * heads * query_blocks(new, shape[GROUPS]),
        1,
    )


@compiled
def norm_after(shape: Numbers, layer: Numbers, epsilon: Any, hidden: int, attended: int, written: int) -> None:
    """Add the output of the attention to the hidden states, in place, and write their norm."""
    rows = shape[SLOTS] * shape[NEW]
    add_in_place(hidden, attended, rows * shape[HIDDEN])
    norm_rows(hidden, rows, shape[HIDDEN], layer[NORM_AFTER], epsilon, written)


@compiled
def gate_rows(shape: Numbers, gate: int, up: int) -> None:
    gate_in_place(gate, up, shape[SLOTS] * shape[NEW] * shape[INNER])


@compiled
def add_rows(shape: Numbers, hidden: int, added: int) -> None:
    add_in_place(hidden, added, shape[SLOTS] * shape[NEW] * shape[HIDDEN])


@compiled
def scratch_numbers(shape: Numbers, positions: int) -> int:
    """The float32 numbers of scratch memory that ``compute_layers`` needs."""
    rows, width = shape[SLOTS] * shape[NEW], shape[WIDTH]
    outs = shape[HIDDEN] + 2 * shape[HEADS] * (shape[GROUPS] + 1) * width + 2 * shape[INNER]
    return rows * outs + _attention_parts(shape) * attention_numbers(positions, width)  # type: ignore[no-any-return]


@compiled
def compute_layers(
    shape: Numbers, layers: npt.NDArray[np.int64], starts: Numbers, epsilon: Any, hidden: int, scratch: int
) -> None:
    """All layers with compiled products; ``hidden`` is changed in place."""
    rows, heads, width = shape[SLOTS] * shape[NEW], shape[HEADS], shape[WIDTH]
    normed = scratch
    queries = normed + rows * shape[HIDDEN] * ITEM_SIZE
    keys = queries + rows * heads * shape[GROUPS] * width * ITEM_SIZE
    values = keys + rows * heads * width * ITEM_SIZE
    attended = values + rows * heads * width * ITEM_SIZE
    gate = attended + rows * heads * shape[GROUPS] * width * ITEM_SIZE
    up = gate + rows * shape[INNER] * ITEM_SIZE
    rest = up + rows * shape[INNER] * ITEM_SIZE
    for number in range(len(layers)):
        layer = layers[number]
        norm_before(shape, layer, epsilon, hidden, normed)
        product(shape, layer, TO_QUERIES, normed, rows, queries)
        product(shape, layer, TO_KEYS, normed, rows, keys)
        product(shape, layer, TO_VALUES, normed, rows, values)
        attend_layer(shape, layer, starts, epsilon, queries, keys, values, rest, attended)
        product(shape, layer, TO_OUTPUT, attended, rows, normed)
        norm_after(shape, layer, epsilon, hidden, normed, normed)
        product(shape, layer, TO_GATE, normed, rows, gate)
        product(shape, layer, TO_UP, normed, rows, up)
        gate_rows(shape, gate, up)
        product(shape, layer, TO_DOWN, gate, rows, normed)
        add_rows(shape, hidden, normed)


def compile_layers() -> None:
    """Compile all of this ahead, for no rows and no layers: a first pass would wait for it."""
    shape, layer, starts = (np.zeros(size, np.int64) for size in (PASS_FIELDS, FIELDS, 1))
    shape[ATTENTION] = attention_function().address
    one = np.float32(1)
    scratch_numbers(shape, 0)
    compute_layers(shape, layer.reshape(1, -1)[:0], starts, one, 0, 0)
    norm_before(shape, layer, one, 0, 0)
    attend_layer(shape, layer, starts, one, 0, 0, 0, 0, 0)
    norm_after(shape, layer, one, 0, 0, 0)
    gate_rows(shape, 0, 0)
    add_rows(shape, 0, 0)
