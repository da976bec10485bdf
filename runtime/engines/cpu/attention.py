"""Attention of few rows over a KV cache, with grouped queries and an additive mask.

Scores of a query are made position by position, and values are added in the order of the positions; a hidden position
adds exactly 0. So the result of a row depends on what it attends to only: not on other rows, nor on how far the cache
reaches.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from hdtool.runtime.kernels.compiled import array_at, compiled, copy_numbers, generated
from hdtool.runtime.kernels.vector_code import FLOAT, INDEX, ITEM_SIZE, LANES, FloatCode, exponentiate

QUERIES, MOST_QUERIES = 16, 48
"""Queries of a block, which read the same keys and values together, while these are in the first cache: more of them
where threads share the heads evenly. With 8,000 positions, which L2 does not hold, eight rows of nine heads took 0.81
of the time of blocks of 16."""
HIDDEN = np.float32(-3e38)
"""Added to the score of a position that a row does not see."""
POSITIONS = 64
"""Positions whose values are read together. The capacity of a cache is a multiple of the lanes of a vector."""


@generated(*[types.int64] * 4)
def _score(builder: Any, keys: Any, width: Any, query: Any, written: Any) -> None:
    """The products of one query with the keys of as many positions as a vector has lanes."""
    code = FloatCode(builder)
    rows = [code.at(keys, builder.mul(width, INDEX(lane))) for lane in range(LANES)]

    def add(index: Any, sums: list[Any]) -> list[Any]:
        numbers = code.read(code.at(query, index))
        pairs = zip(rows, sums, strict=True)
        return [code.multiply_add(code.read(code.at(row, index)), numbers, sum_) for row, sum_ in pairs]

    sums = code.loop(width, [code.number(0.0)] * LANES, add)
    code.store(code.sums_of(sums), written)


def _masked(caps: bool) -> Any:
    """An intrinsic: ``scores = scores * scale + mask``, and the largest of them; scores may be bounded before."""

    @generated(types.int64, types.int64, types.float32, types.float32, types.int64, returns=types.float32)
    def mask_scores(builder: Any, scores: Any, count: Any, scale: Any, cap: Any, mask: Any) -> Any:
        code = FloatCode(builder)
        factor, bound = code.splat(scale), code.splat(cap)

        def apply(index: Any, tops: list[Any]) -> list[Any]:
            place = code.at(scores, index)
            found = builder.fmul(code.read(place), factor)
            if caps:
                found = builder.fmul(code.tanh(builder.fdiv(found, bound)), bound)
            found = builder.fadd(found, code.read(code.at(mask, index)))
            code.store(found, place)
            return [builder.select(builder.fcmp_ordered(">", found, tops[0]), found, tops[0])]

        (tops,) = code.loop(count, [code.number(float("-inf"))], apply)
        return code.folded(tops, lambda one, two: builder.select(builder.fcmp_ordered(">", two, one), two, one))

    return mask_scores


_mask, _bound_and_mask = _masked(caps=False), _masked(caps=True)


def _weighed(queries: int, vectors: int) -> Any:
    """An intrinsic that adds the values of some positions, times their weights, to sums of several queries.

    It takes ``vectors`` vectors of a value. ``totals`` are the sums of the weights of each query.
    """

    @generated(*[types.int64] * 7)
    def add_weighed(
        builder: Any, values: Any, width: Any, weights: Any, apart: Any, count: Any, sums: Any, totals: Any
    ) -> None:
        code = FloatCode(builder)
        places = [
            code.at(sums, builder.add(builder.mul(width, INDEX(query)), INDEX(vector * LANES)))
            for query in range(queries)
            for vector in range(vectors)
        ]
        kept = [code.at(totals, INDEX(query)) for query in range(queries)]
        first = [*map(code.read, places), *(code.read(place, FLOAT) for place in kept)]

        def add(index: Any, carried: list[Any]) -> list[Any]:
            row = code.at(values, builder.mul(index, width))
            numbers = [code.read(code.at(row, INDEX(vector * LANES))) for vector in range(vectors)]
            added, summed = [], []
            for query in range(queries):
                at = code.at(weights, builder.add(index, builder.mul(apart, INDEX(query))))
                weight = code.read(at, FLOAT)
                spread = code.splat(weight)
                for vector in range(vectors):
                    added.append(code.multiply_add(numbers[vector], spread, carried[query * vectors + vector]))
                summed.append(builder.fadd(carried[queries * vectors + query], weight))
            return [*added, *summed]

        found = code.loop(count, first, add, 1)
        for value, place in zip(found, [*places, *kept], strict=True):
            code.store(value, place)

    return add_weighed


@generated(types.int64, types.int64, types.float32, types.int64)
def _divide(builder: Any, sums: Any, width: Any, total: Any, written: Any) -> None:
    """``written = sums / total``"""
    code = FloatCode(builder)
    factor = code.splat(builder.fdiv(FLOAT(1.0), total))

    def apply(index: Any, _: list[Any]) -> list[Any]:
        code.store(builder.fmul(code.read(code.at(sums, index)), factor), code.at(written, index))
        return []

    code.loop(width, [], apply)


WEIGHED = 2 if LANES == 8 else 4
"""Queries whose sums are in registers together: AVX has 16, and four by four vectors took 1.6 to 1.7 times as long there."""
_several_wide, _one_wide = _weighed(WEIGHED, 4), _weighed(1, 4)
_several_narrow, _one_narrow = _weighed(WEIGHED, 1), _weighed(1, 1)
WIDE = 4 * LANES


@compiled
def block_queries(heads: int, threads: int) -> int:
    """The queries of a block, by the heads of keys of all sequences together."""
    return MOST_QUERIES if threads < 2 or heads % threads == 0 or heads >= 4 * threads else QUERIES


@compiled
def query_blocks(rows: int, groups: int, together: int) -> int:
    """The blocks of queries of each head, with so many queries ``together``."""
    return (rows * groups + together - 1) // together


@compiled
def attention_numbers(positions: int, width: int, together: int) -> int:
    """The float32 numbers of scratch memory that ``attend`` needs."""
    padded = (positions + LANES - 1) // LANES * LANES
    return together * (padded + width + width // LANES + 1) + padded


@compiled
def attend(
    queries: int,
    rows: int,
    heads: int,
    groups: int,
    width: int,
    keys: int,
    values: int,
    head_apart: int,
    length: int,
    mask: int,
    mask_apart: int,
    scale: Any,
    cap: Any,
    window: int,
    of_positions: int,
    sinks: int,
    scratch: int,
    written: int,
    together: int,
    first: int,
    end: int,
) -> None:
    """Attention of one sequence, given by addresses of float32 numbers.

    ``queries`` and ``written`` are ``[rows, heads * groups, width]``; ``keys`` and ``values`` of each of the ``heads``
    are ``head_apart`` numbers apart, those of the rows after ``length`` earlier ones; rows of ``mask`` are
    ``mask_apart`` numbers apart, and address 0 means no mask. Scores are bounded by a ``cap``, and rows see so many
    ``window`` positions, if these are not 0; ``of_positions`` are those of the rows. Each query has a score among the
    ``sinks`` that takes weight and has no value, unless their address is 0. ``scratch`` has room for
    ``attention_numbers``. Blocks of ``together`` queries from ``first`` to ``end`` are computed, of ``heads *
    query_blocks(rows, groups, together)`` that are numbered head by head.
    """
    positions = length + rows
    padded = (positions + LANES - 1) // LANES * LANES
    mask_row = scratch + together * padded * ITEM_SIZE
    sums = mask_row + padded * ITEM_SIZE
    totals = sums + together * width * ITEM_SIZE
    drained = array_at(totals + together * (width // LANES) * ITEM_SIZE, (together,), types.float32)
    number, row_size = rows * groups, heads * groups * width
    places = array_at(of_positions, (rows,), types.int64)
    hidden = array_at(mask_row, (padded,), types.float32)
    for column in range(positions):
        hidden[column] = 0
    for column in range(positions, padded):
        hidden[column] = HIDDEN
    blocks = query_blocks(rows, groups, together)
    for block in range(first, end):
        head, start = block // blocks, block % blocks * together
        key, value = keys + head * head_apart * ITEM_SIZE, values + head * head_apart * ITEM_SIZE
        count = min(together, number - start)
        begin = _first_seen(places, start // groups, (start + count - 1) // groups + 1, window, length)
        for column in range(begin, padded, LANES):
            for query in range(count):
                place = start + query
                at = place // groups * row_size + (head * groups + place % groups) * width
                into = scratch + (query * padded + column) * ITEM_SIZE
                _score(key + column * width * ITEM_SIZE, width, queries + at * ITEM_SIZE, into)
        shown = -1
        seen, added = padded - begin, mask_row + begin * ITEM_SIZE
        for query in range(count):
            row = (start + query) // groups
            if row != shown:
                shown = row
                if mask != 0:
                    copy_numbers(mask + row * mask_apart * ITEM_SIZE, positions, mask_row)
                if window:
                    _hide_before(hidden, places, places[row] - window + 1, begin, length)
            scores = scratch + (query * padded + begin) * ITEM_SIZE
            top = _bound_and_mask(scores, seen, scale, cap, added) if cap else _mask(scores, seen, scale, cap, added)
            if sinks:
                sink = array_at(sinks, (heads * groups,), types.float32)[head * groups + (start + query) % groups]
                top = max(top, sink)
                drained[query] = np.exp(np.float32(sink - top))
            exponentiate(scores, seen, top)
        _weigh(value, width, scratch, padded, begin, positions, count, together, sums, totals)
        for query in range(count):
            place = start + query
            at = place // groups * row_size + (head * groups + place % groups) * width
            total = array_at(totals + query * ITEM_SIZE, (1,), types.float32)[0]
            if sinks:
                total += drained[query]
            _divide(sums + query * width * ITEM_SIZE, width, total, written + at * ITEM_SIZE)


@compiled
def _first_seen(places: Any, first: int, end: int, window: int, length: int) -> int:
    """A position before which none of some rows sees anything; a multiple of the lanes of a vector."""
    if not window:
        return 0
    lowest = length
    for row in range(first, end):
        lowest = min(lowest, places[row] - window + 1)
    return max(0, lowest) // LANES * LANES


@compiled
def _hide_before(hidden: Any, places: Any, lowest: int, begin: int, length: int) -> None:
    """Show the window that begins at a position, of what the mask shows."""
    for column in range(begin, min(lowest, length)):
        hidden[column] = HIDDEN
    if lowest > length:
        for row in range(len(places)):
            if places[row] < lowest:
                hidden[length + row] = HIDDEN


@compiled
def _weigh(
    values: int,
    width: int,
    weights: int,
    apart: int,
    begin: int,
    positions: int,
    count: int,
    together: int,
    sums: int,
    totals: int,
) -> None:
    """The sums of the values from ``begin`` on, times the weights of each query, and of the weights."""
    array_at(sums, (together * width + together * (width // LANES),), types.float32)[:] = 0.0
    for first in range(begin, positions, POSITIONS):
        many = min(POSITIONS, positions - first)
        query = 0
        while query < count:
            size = WEIGHED if count - query >= WEIGHED else 1
            read = weights + (query * apart + first) * ITEM_SIZE
            column, part = 0, 0
            while column < width:
                value = values + (first * width + column) * ITEM_SIZE
                into = sums + (query * width + column) * ITEM_SIZE
                total = totals + (part * together + query) * ITEM_SIZE
                if width - column >= WIDE:
                    if size == WEIGHED:
                        _several_wide(value, width, read, apart, many, into, total)
                    else:
                        _one_wide(value, width, read, apart, many, into, total)
                    column += WIDE
                else:
                    if size == WEIGHED:
                        _several_narrow(value, width, read, apart, many, into, total)
                    else:
                        _one_narrow(value, width, read, apart, many, into, total)
                    column += LANES
                part += 1
            query += size
