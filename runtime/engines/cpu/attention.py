"""Computes attention of a few rows over a KV cache, with grouped queries and an additive mask.

Values are added in the order of their positions, and a masked position adds exactly 0. A row's result therefore depends
only on the positions it attends to, not on other rows or the number of cached positions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from hdtool.runtime.engines.cpu.layer_record import offsets_of, starts_of
from hdtool.runtime.kernels.compiled import WORD_SIZE, Record, array_at, compiled, copy_floats, generated
from hdtool.runtime.kernels.matrix_formats import cases
from hdtool.runtime.kernels.row_operations import elementwise, exponentiate, multiply_by_sigmoid
from hdtool.runtime.kernels.vector_code import FLOAT, INDEX, ITEM_SIZE, LANES, FloatCode

BLOCK_QUERIES, MAX_BLOCK_QUERIES = 16, 48
"""Usual and maximum number of queries per block, which share keys and values while these are in the L1 cache.

``block_queries`` uses the maximum if the threads can share the heads evenly. With 8,000 positions, whose keys and
values exceed L2, eight rows of nine heads then took 0.81 times as long as with blocks of 16.
"""
MASKED_SCORE = np.float32(-3e38)
"""Added to the score of a position that a row doesn't attend to."""
CHUNK_POSITIONS, WIDE_CHUNK_POSITIONS = 64, 16
"""Number of positions whose keys or values are read by all queries of a block before the next positions are.

The smaller number is for heads wider than 256, so that the keys stay in L1.
"""


def _scores(known_width: int = 0, *, adds: bool = False) -> Any:
    """Return an intrinsic that writes the dot products of one query with the keys of ``LANES`` positions.

    With ``adds``, the intrinsic adds them to the numbers in memory.

    With a ``known_width``, which replaces the argument ``width``, loads need no computed addresses. With 64 numbers per
    head, that took 0.72 times as long.
    """

    @generated(*[types.int64] * 4)
    def score(builder: Any, keys: Any, width: Any, query: Any, written: Any) -> None:
        code = FloatCode(builder)
        size = INDEX(known_width) if known_width else width

        def add(index: Any, sums: list[Any]) -> list[Any]:
            numbers, first = code.read(code.at(query, index)), code.at(keys, index)
            rows = [code.at(first, builder.mul(size, INDEX(lane))) for lane in range(LANES)]
            return [code.multiply_add(code.read(row), numbers, sum_) for row, sum_ in zip(rows, sums, strict=True)]

        sums = code.loop(size, [code.number(0.0)] * LANES, add)
        products = code.sums_of(sums)
        code.store(builder.fadd(code.read(written), products) if adds else products, written)

    return score


_score, _score_64, _score_128, _add_scores = _scores(), _scores(64), _scores(128), _scores(adds=True)


def _masked(caps: bool) -> Any:
    """Return an intrinsic that computes ``scores = scores * scale + mask`` in place and returns the largest score.

    With ``caps``, the intrinsic applies the softcap ``cap`` to the scaled scores.
    """

    @generated(types.int64, types.int64, types.float32, types.float32, types.int64, returns=types.float32)
    def mask_scores(builder: Any, scores: Any, count: Any, scale: Any, cap: Any, mask: Any) -> Any:
        code = FloatCode(builder)
        factor, bound = code.splat(scale), code.splat(cap)

        def apply(index: Any, tops: list[Any]) -> list[Any]:
            address = code.at(scores, index)
            score = builder.fmul(code.read(address), factor)
            if caps:
                score = builder.fmul(code.tanh(builder.fdiv(score, bound)), bound)
            score = builder.fadd(score, code.read(code.at(mask, index)))
            code.store(score, address)
            return [builder.select(builder.fcmp_ordered(">", score, tops[0]), score, tops[0])]

        (tops,) = code.loop(count, [code.number(float("-inf"))], apply)
        return code.reduce(
            tops, lambda first, second: builder.select(builder.fcmp_ordered(">", second, first), second, first)
        )

    return mask_scores


_mask, _bound_and_mask = _masked(caps=False), _masked(caps=True)


VALUE_QUERIES = 2 if LANES == 8 else 4
"""Number of queries whose sums are in registers together; with AVX, four took 1.6 to 1.7 times as long as two."""
VALUE_VECTORS = 4
"""Number of vectors of a value that are read together, if at least that many are left."""


@generated(*[types.int64] * 9)
def _add_weighted(
    builder: Any,
    values: Any,
    width: Any,
    weights: Any,
    weights_stride: Any,
    count: Any,
    sums: Any,
    totals: Any,
    queries: Any,
    vectors: Any,
) -> None:
    """Add the weighted values of ``count`` positions to ``sums``, and each query's weights to ``totals``.

    ``queries`` and ``vectors`` are the numbers of queries and of each value's vectors.
    """
    code = FloatCode(builder)

    def generate(queries: int, vectors: int) -> None:
        sum_addresses = [
            code.at(sums, builder.add(builder.mul(width, INDEX(query)), INDEX(vector * LANES)))
            for query in range(queries)
            for vector in range(vectors)
        ]
        total_addresses = [code.at(totals, INDEX(query)) for query in range(queries)]
        first = [*map(code.read, sum_addresses), *(code.read(address, FLOAT) for address in total_addresses)]

        def add(index: Any, carried: list[Any]) -> list[Any]:
            row = code.at(values, builder.mul(index, width))
            numbers = [code.read(code.at(row, INDEX(vector * LANES))) for vector in range(vectors)]
            added, summed = [], []
            for query in range(queries):
                at = code.at(weights, builder.add(index, builder.mul(weights_stride, INDEX(query))))
                weight = code.read(at, FLOAT)
                spread = code.splat(weight)
                for vector in range(vectors):
                    added.append(code.multiply_add(numbers[vector], spread, carried[query * vectors + vector]))
                summed.append(builder.fadd(carried[queries * vectors + query], weight))
            return [*added, *summed]

        results = code.loop(count, first, add, 1)
        for value, address in zip(results, [*sum_addresses, *total_addresses], strict=True):
            code.store(value, address)

    shapes = {most * 8 + wide: (most, wide) for most in (VALUE_QUERIES, 1) for wide in (VALUE_VECTORS, 1)}
    for _, shape in cases(builder, builder.add(builder.mul(queries, INDEX(8)), vectors), shapes):
        generate(*shape)


_divide = elementwise(
    lambda code, sum_, total: code.builder.fmul(sum_, code.builder.fdiv(code.number(1.0), total)), 1, 1, in_place=False
)
"""Writes ``sums / total``."""


@compiled
def block_queries(heads: int, threads: int) -> int:
    """Return the number of queries per block; ``heads`` is the number of key heads times the number of sequences."""
    return MAX_BLOCK_QUERIES if threads < 2 or heads % threads == 0 or heads >= 4 * threads else BLOCK_QUERIES


@compiled
def query_blocks(rows: int, groups: int, block_size: int) -> int:
    """Return the number of query blocks per key head."""
    return (rows * groups + block_size - 1) // block_size


@compiled
def chunk_positions(width: int) -> int:
    return CHUNK_POSITIONS if width <= 256 else WIDE_CHUNK_POSITIONS


@compiled
def attention_scratch_size(positions: int, width: int, block_size: int) -> int:
    """Return how many float32 values of scratch memory ``attend`` needs."""
    padded = (positions + LANES - 1) // LANES * LANES
    return block_size * (padded + width + width // LANES + 2) + CHUNK_POSITIONS


@compiled
def attend(
    pass_record: Record,
    attention: Record,
    slot: int,
    queries: int,
    turned: int,
    scratch: int,
    written: int,
    block_size: int,
    first: int,
    end: int,
) -> None:
    """Compute attention for blocks ``first`` to ``end - 1`` of one sequence's queries.

    ``queries`` and ``written`` are the addresses of ``[rows, heads * groups, width]`` for all sequences' rows, and
    ``turned`` of the queries' second parts in a latent attention. There are
    ``heads * query_blocks(rows, groups, block_size)`` blocks, which are numbered head by head. ``scratch`` needs room
    for ``attention_scratch_size`` values. The number of positions in the cache must be a multiple of ``LANES``.
    """
    heads, groups, width, rotated = attention.heads, attention.groups, attention.width, attention.latents.rotated
    offset, head_stride, mask = offsets_of(pass_record)[slot], attention.head_stride, 0
    rows, length = offsets_of(pass_record)[slot + 1] - offset, starts_of(pass_record)[slot]
    keys, values = attention.cached_keys + slot * attention.slot_stride * ITEM_SIZE, attention.cached_values
    rotated_keys = values + slot * attention.latents.key_slot_stride * ITEM_SIZE
    values = keys if rotated else values + slot * attention.slot_stride * ITEM_SIZE
    if pass_record.mask and rows > 1:
        mask = pass_record.mask + slot * pass_record.mask_slot_stride * ITEM_SIZE
    mask_stride, cap, window = pass_record.mask_row_stride, pass_record.softcap, attention.window
    queries += offset * heads * groups * width * ITEM_SIZE
    written += offset * heads * groups * width * ITEM_SIZE
    turned += offset * groups * rotated * ITEM_SIZE
    positions = length + rows
    padded = (positions + LANES - 1) // LANES * LANES
    sums = scratch + block_size * padded * ITEM_SIZE
    totals = sums + block_size * width * ITEM_SIZE
    largest = totals + block_size * (width // LANES) * ITEM_SIZE
    tops = array_at(largest, (block_size,), types.float32)
    sink_weights = array_at(largest + block_size * ITEM_SIZE, (block_size,), types.float32)
    chunk_mask = largest + 2 * block_size * ITEM_SIZE
    number, row_size = rows * groups, heads * groups * width
    row_positions = array_at(pass_record.row_positions + offset * WORD_SIZE, (rows,), types.int64)
    blocks, chunk_size = query_blocks(rows, groups, block_size), chunk_positions(width)
    for block in range(first, end):
        head, start = block // blocks, block % blocks * block_size
        key, value = keys + head * head_stride * ITEM_SIZE, values + head * head_stride * ITEM_SIZE
        count = min(block_size, number - start)
        first_row, first_group = start // groups, start % groups
        begin = _first_visible(row_positions, first_row, (start + count - 1) // groups + 1, window, length)
        head_queries = queries + (first_row * row_size + head * groups * width) * ITEM_SIZE
        tops[:] = -np.inf
        for column in range(begin, padded, chunk_size):
            chunk, scores = min(chunk_size, padded - column), scratch + column * ITEM_SIZE
            chunk_keys = key + column * width * ITEM_SIZE
            write_scores(
                chunk_keys, chunk, width, head_queries, row_size, groups, first_group, count, scores, padded, False
            )
            if rotated:
                more_keys = rotated_keys + column * rotated * ITEM_SIZE
                more = turned + first_row * groups * rotated * ITEM_SIZE
                write_scores(
                    more_keys, chunk, rotated, more, groups * rotated, groups, first_group, count, scores, padded, True
                )
            row, group, added = first_row, first_group, 0
            for query in range(count):
                if not added:
                    row_mask = mask + row * mask_stride * ITEM_SIZE if mask else 0
                    lowest = row_positions[row] - window + 1 if window else 0
                    added = _mask_of(row_mask, column, chunk, length, row_positions, lowest, chunk_mask)
                if cap:
                    top = _bound_and_mask(scores, chunk, pass_record.scale, cap, added)
                else:
                    top = _mask(scores, chunk, pass_record.scale, cap, added)
                tops[query] = max(tops[query], top)
                scores, group = scores + padded * ITEM_SIZE, group + 1
                if group == groups:
                    row, group, added = row + 1, 0, 0
        if attention.sinks:
            for query in range(count):
                sink = array_at(attention.sinks, (heads * groups,), types.float32)[
                    head * groups + (start + query) % groups
                ]
                tops[query] = max(tops[query], sink)
                sink_weights[query] = np.exp(np.float32(sink - tops[query]))
        array_at(sums, (block_size * width + block_size * (width // LANES),), types.float32)[:] = 0.0
        for column in range(begin, padded, chunk_size):
            chunk, weights = min(chunk_size, padded - column), scratch + column * ITEM_SIZE
            for query in range(count):
                exponentiate(weights + query * padded * ITEM_SIZE, chunk, tops[query])
            seen, chunk_values = min(chunk, positions - column), value + column * width * ITEM_SIZE
            add_weighted_sums(chunk_values, seen, width, weights, padded, count, block_size, sums, totals)
        for query in range(count):
            query_index = start + query
            at = query_index // groups * row_size + (head * groups + query_index % groups) * width
            total = array_at(totals + query * ITEM_SIZE, (1,), types.float32)[0]
            if attention.sinks:
                total += sink_weights[query]
            _divide(sums + query * width * ITEM_SIZE, width, total, written + at * ITEM_SIZE)


@compiled
def _first_visible(row_positions: Any, first: int, end: int, window: int, length: int) -> int:
    """Return the first position visible to rows ``first`` to ``end - 1``, rounded down to a multiple of ``LANES``."""
    if not window:
        return 0
    lowest = length
    for row in range(first, end):
        lowest = min(lowest, row_positions[row] - window + 1)
    return max(0, lowest) // LANES * LANES


@compiled
def write_scores(
    keys: int,
    chunk: int,
    width: int,
    queries: int,
    row_size: int,
    groups: int,
    group: int,
    count: int,
    scores: int,
    scores_stride: int,
    adds: bool,
) -> None:
    """Write the scores of ``count`` queries for ``chunk`` positions, or add them to the scores in memory with ``adds``.

    ``queries`` is the address of the first row's first query for the key head, and ``group`` the index of the query to
    begin with. Addresses are advanced rather than computed, as divisions took a fifth of the time.
    """
    query = queries + group * width * ITEM_SIZE
    for _ in range(count):
        for tile in range(0, chunk, LANES):
            read, into = keys + tile * width * ITEM_SIZE, scores + tile * ITEM_SIZE
            if adds:
                _add_scores(read, width, query, into)
            elif width == 64:
                _score_64(read, width, query, into)
            elif width == 128:
                _score_128(read, width, query, into)
            else:
                _score(read, width, query, into)
        scores += scores_stride * ITEM_SIZE
        query += width * ITEM_SIZE
        group += 1
        if group == groups:
            group, query = 0, query + (row_size - groups * width) * ITEM_SIZE


@compiled
def _mask_of(
    row_mask: int, column: int, chunk: int, length: int, row_positions: Any, lowest: int, chunk_mask: int
) -> int:
    """Return the address of what is added to a row's scores for ``chunk`` positions from ``column`` on.

    If the row has a mask (``row_mask`` isn't 0) and nothing else is hidden, it is a part of the mask; otherwise, it is
    ``chunk_mask``, which is overwritten. Positions below ``lowest``, and those without keys, are hidden.
    """
    end = length + len(row_positions)
    all_visible = column + chunk <= end if lowest <= 0 else lowest <= column and column + chunk <= length
    if row_mask and all_visible:
        return row_mask + column * ITEM_SIZE
    found = array_at(chunk_mask, (chunk,), types.float32)
    found[:] = 0.0
    if row_mask:
        copy_floats(row_mask + column * ITEM_SIZE, min(chunk, end - column), chunk_mask)
    if not all_visible:
        for at in range(column, column + chunk):
            if at >= end or (lowest > 0 and (at if at < length else row_positions[at - length]) < lowest):
                found[at - column] = MASKED_SCORE
    return chunk_mask


@compiled
def add_weighted_sums(
    values: int,
    positions: int,
    width: int,
    weights: int,
    weights_stride: int,
    count: int,
    block_size: int,
    sums: int,
    totals: int,
) -> None:
    """Add each query's weighted values of some positions to its sums, and the weights to its totals."""
    query = 0
    while query < count:
        size = VALUE_QUERIES if count - query >= VALUE_QUERIES else 1
        read = weights + query * weights_stride * ITEM_SIZE
        column, part = 0, 0
        while column < width:
            value = values + column * ITEM_SIZE
            target = sums + (query * width + column) * ITEM_SIZE
            total = totals + (part * block_size + query) * ITEM_SIZE
            vectors = VALUE_VECTORS if width - column >= VALUE_VECTORS * LANES else 1
            _add_weighted(value, width, read, weights_stride, positions, target, total, size, vectors)
            column += vectors * LANES
            part += 1
        query += size


@compiled
def split_gates(joined: int, queries: int, attention: Record, first: int, end: int) -> None:
    """Copy the queries of rows ``first`` to ``end - 1`` from ``joined``, where each head's gates follow its queries."""
    heads, width = attention.heads * attention.groups, attention.width
    size = width * ITEM_SIZE
    for head in range(first * heads, end * heads):
        copy_floats(joined + 2 * head * size, width, queries + head * size)


@compiled
def gate_heads(joined: int, attended: int, attention: Record, first: int, end: int) -> None:
    """Multiply the attention outputs of rows ``first`` to ``end - 1`` by the sigmoid of their gates, in place."""
    heads, width = attention.heads * attention.groups, attention.width
    size = width * ITEM_SIZE
    for head in range(first * heads, end * heads):
        multiply_by_sigmoid(attended + head * size, joined + (2 * head + 1) * size, width)
