"""Computes the steps around latent attention: storing latent vectors, absorbing queries and expanding outputs.

``compute_layers`` calls this code by its address, so that it is compiled only for models with latent attention.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from hdtool.runtime.engines.cpu.attention import BLOCK_QUERIES, add_weighted_sums, chunk_positions, write_scores
from hdtool.runtime.engines.cpu.layer_record import LAYER, PASS, apply_norm, offsets_of, rotate, starts_of
from hdtool.runtime.kernels.compiled import Record, array_at, c_function, compiled, copy_floats, struct_at
from hdtool.runtime.kernels.matmul import STEP
from hdtool.runtime.kernels.row_operations import scale_in_place
from hdtool.runtime.kernels.thread_pool import parts_of
from hdtool.runtime.kernels.vector_code import ITEM_SIZE, LANES

STORE, ABSORB, EXPAND = range(3)
"""Steps of a latent attention between its matmuls, for ``latent_function``."""


@compiled
def absorbed_scratch_size(rank: int) -> int:
    """Return how many float32 values of scratch memory each part of the ``ABSORB`` step needs."""
    return BLOCK_QUERIES * (rank + rank // LANES)


@compiled
def turned_at(pass_record: Record, attention: Record, absorbed: int) -> int:
    """Return the address of the rotated parts of all queries, which follow the absorbed queries."""
    return absorbed + pass_record.total_rows * attention.groups * attention.width * ITEM_SIZE  # type: ignore[no-any-return]


@compiled
def _rotate(pass_record: Record, attention: Record, row: int, read: int, written: int) -> None:
    """Write the rotary part of a query or key, rotated unless the layer has no rotary positions."""
    width = attention.latents.rotated
    if attention.rotary < 0:
        copy_floats(read, width, written)
        return
    if pass_record.splits_pairs:
        pairs = array_at(read, (width // 2, 2), types.float32)
        halves = array_at(written, (2, width // 2), types.float32)
        halves[0], halves[1] = pairs[:, 0], pairs[:, 1]
        read = written
    rotate(pass_record, attention, row, read, width, written)


@compiled
def _store(
    pass_record: Record, attention: Record, queries: int, latents: int, turned: int, first: int, end: int
) -> None:
    """Cache the latent vectors and keys of rows ``first`` to ``end - 1``, and write rotated queries to ``turned``.

    ``latents`` is the address of each row's latent vector and key before norm and rotation.
    """
    record, rank, heads = attention.latents, attention.width, attention.groups
    rotated, query_width = record.rotated, record.plain + record.rotated
    offsets, starts, slot = offsets_of(pass_record), starts_of(pass_record), 0
    for row in range(first, end):
        while row >= offsets[slot + 1]:
            slot += 1
        position, read = starts[slot] + row - offsets[slot], latents + row * (rank + rotated) * ITEM_SIZE
        latent = attention.cached_keys + (slot * attention.slot_stride + position * rank) * ITEM_SIZE
        key = attention.cached_values + (slot * record.key_slot_stride + position * rotated) * ITEM_SIZE
        apply_norm(pass_record, record.norm, record.epsilon, read, 1, rank, latent)
        _rotate(pass_record, attention, row, read + rank * ITEM_SIZE, key)
        for query in range(row * heads, (row + 1) * heads):
            at = queries + (query * query_width + record.plain) * ITEM_SIZE
            _rotate(pass_record, attention, row, at, turned + query * rotated * ITEM_SIZE)


@compiled
def _absorb(
    pass_record: Record, attention: Record, queries: int, scratch: int, absorbed: int, first: int, end: int
) -> None:
    """Multiply the plain parts of queries of heads ``first`` to ``end - 1`` by the expansion to plain keys."""
    record, rank, heads, rows = attention.latents, attention.width, attention.groups, pass_record.total_rows
    stride = heads * (record.plain + record.rotated)
    part = -(-first * parts_of(pass_record.threads, heads, 1) // heads)
    sums = scratch + part * absorbed_scratch_size(rank) * ITEM_SIZE
    totals, chunk = sums + BLOCK_QUERIES * rank * ITEM_SIZE, chunk_positions(rank)
    for head in range(first, end):
        matrix = record.expansion + head * (record.plain + record.values) * rank * ITEM_SIZE
        for row in range(0, rows, BLOCK_QUERIES):
            count = min(BLOCK_QUERIES, rows - row)
            array_at(sums, (absorbed_scratch_size(rank),), types.float32)[:] = 0.0
            read = queries + (row * stride + head * (record.plain + record.rotated)) * ITEM_SIZE
            for column in range(0, record.plain, chunk):
                chunk_matrix, weights = matrix + column * rank * ITEM_SIZE, read + column * ITEM_SIZE
                positions = min(chunk, record.plain - column)
                add_weighted_sums(chunk_matrix, positions, rank, weights, stride, count, BLOCK_QUERIES, sums, totals)
            for query in range(count):
                written = absorbed + ((row + query) * heads + head) * rank * ITEM_SIZE
                copy_floats(sums + query * rank * ITEM_SIZE, rank, written)


@compiled
def _expand(
    pass_record: Record, attention: Record, attended: int, written: int, gates: int, first: int, end: int
) -> None:
    """Expand the attended latent vectors of heads ``first`` to ``end - 1`` to values.

    The sigmoids of ``gates``, the address of a number per row and head, scale the values unless the address is 0.
    """
    record, rank, heads = attention.latents, attention.width, attention.groups
    rows = pass_record.total_rows
    for head in range(first, end):
        matrix = record.expansion + (head * (record.plain + record.values) + record.plain) * rank * ITEM_SIZE
        read, to = attended + head * rank * ITEM_SIZE, written + head * record.values * ITEM_SIZE
        stride, chunk = heads * record.values, chunk_positions(rank)
        for column in range(0, record.values, chunk):
            values, chunk_matrix = min(chunk, record.values - column), matrix + column * rank * ITEM_SIZE
            at = to + column * ITEM_SIZE
            write_scores(chunk_matrix, values, rank, read, heads * rank, 1, 0, rows, at, stride, False)
        if gates:
            numbers = array_at(gates, (rows, heads), types.float32)
            for row in range(rows):
                scale = np.float32(1) / (np.float32(1) + np.float32(np.exp(-numbers[row, head])))
                scale_in_place(to + row * stride * ITEM_SIZE, record.values, scale)


@c_function(STEP)
def latent_function() -> Any:
    """Return the C function that computes any step of a latent attention between its matmuls.

    A call computes the units from ``first`` to ``end``: rows for ``STORE`` and heads otherwise.
    """

    def compute_latents(
        pass_at: int,
        layer_at: int,
        step: int,
        one: int,
        two: int,
        three: int,
        _: int,
        __: int,
        first: int,
        end: int,
    ) -> None:
        pass_record, attention = struct_at(pass_at, PASS), struct_at(layer_at, LAYER).attention
        if step == STORE:
            _store(pass_record, attention, one, two, turned_at(pass_record, attention, three), first, end)
        elif step == ABSORB:
            _absorb(pass_record, attention, one, two, three, first, end)
        else:
            _expand(pass_record, attention, one, two, three, first, end)

    return compute_latents
