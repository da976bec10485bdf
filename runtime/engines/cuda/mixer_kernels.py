"""Triton kernels of recurrent mixers and short convolutions over draft trees.

A row reads its ancestors: the root, and the nodes whose bits are set in its ancestor mask. Rows follow their parents.
Each kernel rounds where the corresponding Transformers module rounds, and accumulates in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hdtool.runtime.engines.cuda.triton_kernels import NODES, activated

EPSILON = tl.constexpr(1e-6)
"""Added to the sum of squares of each query and key of a delta rule."""


@triton.jit
def convolve_kernel(
    inputs, state, weight, bias, columns, convolved, ancestors,
    rows, width, step, input_stride, state_stride,
    BEFORE: tl.constexpr, TAPS: tl.constexpr, BIAS: tl.constexpr, ACTIVATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute a short convolution of one row: ``TAPS`` taps over the row, its ancestors and then the state's columns.

    ``columns [slots, BEFORE + rows, width]`` gets what the convolution reads: the state, and the rows after it.
    """
    token = tl.program_id(0)
    slot, row = token // rows, token % rows
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < width
    state += slot.to(tl.int64) * state_stride + channel.to(tl.int64) * BEFORE
    kept = columns + slot.to(tl.int64) * (BEFORE + rows) * width + channel
    if row == 0:
        for column in tl.static_range(BEFORE):
            tl.store(kept + column * width, tl.load(state + column, mask=inside, other=0.0), mask=inside)
    kind = state.dtype.element_ty
    own = tl.load(inputs + token.to(tl.int64) * input_stride + channel, mask=inside, other=0.0).to(kind)
    tl.store(kept + (BEFORE + row) * width, own, mask=inside)
    bits = tl.load(ancestors + slot * step + row)
    node = tl.arange(0, NODES).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    at = BEFORE + 1
    for back in tl.static_range(TAPS):
        nearest = tl.max(tl.where((bits >> node) & 1 == 1, node.to(tl.int32), -1), 0)
        bits = tl.where(nearest >= 0, bits ^ (tl.full([], 1, tl.int64) << tl.maximum(nearest, 0)), bits)
        at = tl.where(nearest >= 0, BEFORE + 1 + nearest, tl.minimum(at - 1, BEFORE))
        in_rows = tl.where(at >= BEFORE, width, 0)  # either all channels or none
        ancestor = (slot * rows + tl.maximum(at - BEFORE, 0)).to(tl.int64)
        value = tl.load(inputs + ancestor * input_stride + channel, mask=channel < in_rows, other=0.0)
        of_state = tl.load(state + at, mask=inside & (channel >= in_rows), other=0.0)
        value = value.to(kind).to(tl.float32) + of_state.to(tl.float32)
        total += value * tl.load(weight + channel * TAPS + TAPS - 1 - back, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    total = total.to(weight.dtype.element_ty)
    if ACTIVATES:
        total = activated(total.to(tl.float32), "silu").to(weight.dtype.element_ty)
    tl.store(convolved + token.to(tl.int64) * width + channel, total.to(kind), mask=inside)


@triton.jit
def softplus(number):
    """Return ``log(1 + exp(number))``, accurately even if the exponential is much less than 1."""
    small = tl.exp(-tl.abs(number))
    sum = 1.0 + small
    log = tl.where(sum == 1.0, small, tl.log(sum) * (small / tl.where(sum == 1.0, 1.0, sum - 1.0)))
    return tl.maximum(number, 0.0) + log


@triton.jit
def decays(log_decay, ancestors, row, rows):
    """Return the logarithm of the decay from the state to each row, and the decay between each row and its ancestors.

    The latter is 0 for rows that are no ancestors.
    """
    bits = tl.load(ancestors + row, mask=row < rows, other=0)
    node = tl.maximum(row - 1, 0).to(tl.int64)
    reads = (((bits[:, None] >> node[None, :]) & 1) == 1) & (row > 0)[None, :] | (row == 0)[None, :]
    total = tl.sum(tl.where(reads, log_decay[None, :], 0.0), 1)
    return total, tl.where(reads, tl.exp(tl.where(reads, total[:, None] - total[None, :], 0.0)), 0.0)


@triton.jit
def rows_of(tensor, first, stride, row, column, used, there):
    """Load the columns ``column`` of a slot's rows; those not ``used`` or not ``there`` are 0."""
    at = (first + row).to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(tensor + at, mask=used[:, None] & there[None, :], other=0.0)


@triton.jit
def delta_rule_kernel(
    convolved, strengths, steps, rates, biases, state, output, left, right, totals, ancestors,
    rows, step, key_heads, stride, strength_stride, step_stride, state_stride,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, PRECISION: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Compute the gated delta rule for ``BLOCK`` value columns of one head, over all rows of a slot's tree.

    A row writes the difference between its value and what the state before it holds for its key, times its strength.
    Rows are solved in order, because a row's state holds what its ancestors wrote. What the state gets from a row is
    kept: its normalized key in ``left``, what it writes in ``right``, and the logarithm of the decay in ``totals``.
    """
    head, slot, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(0)
    key_head = head // (heads // key_heads)
    row, chunk = tl.arange(0, ROWS), tl.arange(0, CHUNK)
    column = part * BLOCK + tl.arange(0, BLOCK)
    used, inside = row < rows, column < VALUES
    first = slot * rows
    state += slot.to(tl.int64) * state_stride + head.to(tl.int64) * WIDTH * VALUES
    of_queries, of_keys = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    scores, system = tl.zeros([ROWS, ROWS], tl.float32), tl.zeros([ROWS, ROWS], tl.float32)
    read, held = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
    for begin in range(0, WIDTH, CHUNK):
        inner = begin + chunk
        there = inner < WIDTH
        query = rows_of(convolved, first, stride, row, key_head * WIDTH + inner, used, there)
        key = rows_of(convolved, first, stride, row, (key_heads + key_head) * WIDTH + inner, used, there)
        transposed = tl.trans(key)
        scores = tl.dot(query, transposed, scores, input_precision=PRECISION)
        system = tl.dot(key, transposed, system, input_precision=PRECISION)
        query, key = query.to(tl.float32), key.to(tl.float32)
        of_queries += tl.sum(query * query, 1)
        of_keys += tl.sum(key * key, 1)
        held_at = inner[:, None] * VALUES + column[None, :]
        part_held = tl.load(state + held_at, mask=there[:, None] & inside[None, :], other=0.0).to(tl.float32)
        read = tl.dot(query, part_held, read, input_precision=PRECISION)
        held = tl.dot(key, part_held, held, input_precision=PRECISION)
    of_queries, of_keys = tl.rsqrt(of_queries + EPSILON) * WIDTH**-0.5, tl.rsqrt(of_keys + EPSILON)
    strength = tl.load(strengths + (first + row) * strength_stride + head, mask=used, other=0.0)
    strength = (1.0 / (1.0 + tl.exp(-strength.to(tl.float32)))).to(strengths.dtype.element_ty)
    strength = (strength.to(tl.float32) * FACTOR).to(strengths.dtype.element_ty).to(tl.float32)
    time = tl.load(steps + (first + row) * step_stride + head, mask=used, other=0.0).to(tl.float32)
    time = softplus(time + tl.load(biases + head).to(tl.float32))
    log_decay = tl.where(used, -tl.exp(tl.load(rates + head).to(tl.float32)) * time, 0.0)
    total, between = decays(log_decay, ancestors + slot * step, row, rows)
    since = tl.exp(total)
    value = rows_of(convolved, first, stride, row, 2 * key_heads * WIDTH + head * VALUES + column, used, inside)
    written = (value.to(tl.float32) - held * (of_keys * since)[:, None]) * strength[:, None]
    between *= of_keys[None, :]
    system *= tl.where(row[:, None] > row[None, :], between * (of_keys * strength)[:, None], 0.0)
    for solved in range(1, rows):
        reads = tl.sum(tl.where(row[:, None] == solved, system, 0.0), 0)
        change = tl.sum(reads[:, None] * written, 0)
        written = tl.where(row[:, None] == solved, written - change[None, :], written)
    mixed = tl.dot(scores * between, written, read * since[:, None], input_precision=PRECISION) * of_queries[:, None]
    at = (slot * heads + head).to(tl.int64) * rows + row
    shown = used[:, None] & inside[None, :]
    tl.store(right + at[:, None] * VALUES + column[None, :], written, mask=shown)
    out = (first + row).to(tl.int64)[:, None] * heads * VALUES + head * VALUES + column[None, :]
    tl.store(output + out, mixed.to(output.dtype.element_ty), mask=shown)
    if part == 0:
        tl.store(totals + at, total, mask=used)
        for begin in range(0, WIDTH, CHUNK):
            inner = begin + chunk
            there = inner < WIDTH
            key = rows_of(convolved, first, stride, row, (key_heads + key_head) * WIDTH + inner, used, there)
            key = key.to(tl.float32) * of_keys[:, None]
            tl.store(left + at[:, None] * WIDTH + inner[None, :], key, mask=used[:, None] & there[None, :])


@triton.jit
def scan_kernel(
    convolved, steps, rates, biases, skips, state, output, left, right, totals, ancestors,
    rows, step, key_heads, stride, step_stride, state_stride,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the Mamba-2 scan for ``BLOCK`` value columns of one head, over all rows of a slot's tree.

    What the state gets from a row is kept: what it writes in ``left``, its key in ``right``, and the logarithm of the
    decay in ``totals``.
    """
    head, slot, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(0)
    shared = heads // key_heads
    key_head = head // shared
    row, chunk = tl.arange(0, ROWS), tl.arange(0, CHUNK)
    column = part * BLOCK + tl.arange(0, BLOCK)
    used, inside = row < rows, column < VALUES
    first = slot * rows
    state += slot.to(tl.int64) * state_stride + head.to(tl.int64) * WIDTH * VALUES
    scores, read = tl.zeros([ROWS, ROWS], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
    key_at = (slot * key_heads + key_head).to(tl.int64) * rows + row
    for begin in range(0, WIDTH, CHUNK):
        inner = begin + chunk
        there = inner < WIDTH
        keys = heads * VALUES + key_head * WIDTH + inner
        key = rows_of(convolved, first, stride, row, keys, used, there)
        query = rows_of(convolved, first, stride, row, keys + key_heads * WIDTH, used, there)
        scores = tl.dot(query, tl.trans(key), scores, input_precision=PRECISION)
        held_at = column[None, :] * WIDTH + inner[:, None]
        held = tl.load(state + held_at, mask=there[:, None] & inside[None, :], other=0.0).to(tl.float32)
        read = tl.dot(query.to(tl.float32), held, read, input_precision=PRECISION)
        if (part == 0) & (head % shared == 0):
            stored = used[:, None] & there[None, :]
            tl.store(right + key_at[:, None] * WIDTH + inner[None, :], key.to(tl.float32), mask=stored)
    kind = steps.dtype.element_ty
    time = tl.load(steps + (first + row) * step_stride + head, mask=used, other=0.0).to(tl.float32)
    time = (time + tl.load(biases + head).to(kind).to(tl.float32)).to(kind).to(tl.float32)
    time = tl.where(used, softplus(time).to(kind).to(tl.float32), 0.0)
    log_decay = -tl.exp(tl.load(rates + head).to(tl.float32)) * time
    total, between = decays(log_decay, ancestors + slot * step, row, rows)
    value = rows_of(convolved, first, stride, row, head * VALUES + column, used, inside).to(tl.float32)
    written = value * time[:, None]
    mixed = tl.dot(scores * between, written, read * tl.exp(total)[:, None], input_precision=PRECISION)
    mixed += tl.load(skips + head).to(tl.float32) * value
    at = (slot * heads + head).to(tl.int64) * rows + row
    shown = used[:, None] & inside[None, :]
    tl.store(left + at[:, None] * VALUES + column[None, :], written, mask=shown)
    if part == 0:
        tl.store(totals + at, total, mask=used)
    out = (first + row).to(tl.int64)[:, None] * heads * VALUES + head * VALUES + column[None, :]
    tl.store(output + out, mixed.to(output.dtype.element_ty), mask=shown)


PATH = "slot", "count", "low", "high", "slots", "rows"
"""Arguments that differ between steps; kernels aren't specialized for their values, which would compile them anew."""


@triton.jit
def places_on_path(low, high):
    """Return the place of each node on a path, after the root's, 0; -1 for other nodes.

    The path is given by bits of its nodes, in two halves.
    """
    node = tl.arange(0, NODES)
    is_on_path = (tl.where(node < 32, low, high) >> (node % 32)) & 1
    return tl.where(is_on_path == 1, tl.cumsum(is_on_path, 0), -1)


@triton.jit
def row_at(place, places):
    """Return the row of the root or node at a place on a path."""
    return tl.sum(tl.where(places == place, tl.arange(0, NODES) + 1, 0), 0)


@triton.jit(do_not_specialize=PATH)
def write_columns_kernel(
    columns, state, slot, count, low, high, slots, rows, width, state_stride,
    BEFORE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write to a layer's ``state`` the columns that a convolution keeps after a path of ``count`` rows.

    ``columns`` has ``BEFORE`` columns of the state before the tree for each slot, and one for each row of the tree.
    """
    layer, channel = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < width
    columns += (layer * slots + slot).to(tl.int64) * (BEFORE + rows) * width + channel
    state += layer.to(tl.int64) * state_stride + channel.to(tl.int64) * BEFORE
    places = places_on_path(low, high)
    for place in tl.static_range(BEFORE):
        behind = count + place - BEFORE
        column = tl.where(behind < 0, count + place, BEFORE + row_at(behind, places))
        tl.store(state + place, tl.load(columns + column * width, mask=inside, other=0.0), mask=inside)


@triton.jit(do_not_specialize=PATH)
def write_updates_kernel(
    left, right, totals, state, slot, count, low, high, slots, rows, groups, state_stride,
    WIDTH: tl.constexpr, LOADED: tl.constexpr, DECAYS: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Decay ``BLOCK`` columns of a head's state and add the updates of a path of ``count`` rows, in place.

    Each update decays until the path's last row, by one factor for each head or, if ``DECAYS`` isn't 1, for each row of
    the state.
    """
    layer, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    tree = (layer * slots + slot).to(tl.int64)
    first = (tree * heads + head) * rows
    of_group = (tree * groups + head // (heads // groups)) * rows
    inner, column = tl.arange(0, LOADED), part * BLOCK + tl.arange(0, BLOCK)
    there, inside = inner < WIDTH, column < VALUES
    places = places_on_path(low, high)
    decay = totals + tl.where(DECAYS > 1, inner, 0)
    end = tl.load(decay + (first + row_at(count - 1, places)) * DECAYS, mask=there, other=0.0)
    state += layer.to(tl.int64) * state_stride + head.to(tl.int64) * WIDTH * VALUES
    at = state + inner[:, None] * VALUES + column[None, :]
    used = there[:, None] & inside[None, :]
    held = tl.load(at, mask=used, other=0.0).to(tl.float32) * tl.exp(end)[:, None]
    for place in range(count):
        row = row_at(place, places)
        since = tl.exp(end - tl.load(decay + (first + row) * DECAYS, mask=there, other=0.0))
        added = tl.load(left + (first + row) * WIDTH + inner, mask=there, other=0.0) * since
        value = tl.load(right + (of_group + row) * VALUES + column, mask=inside, other=0.0)
        held += added[:, None] * value[None, :]
    tl.store(at, held.to(state.dtype.element_ty), mask=used)


@triton.jit
def gated_norm_kernel(
    output, gate, weight, mixed, groups, width, gate_stride, epsilon,
    WEIGHTS: tl.constexpr, FIRST: tl.constexpr, ACTIVATION: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalize one group of a row's columns, and multiply it by its activated gate, before the norm if ``FIRST``.

    Each group has its part of the weight if ``WEIGHTS``; otherwise all share it.
    """
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = (token * groups + group) * width + column
    row = tl.load(output + at, mask=inside, other=0.0)
    kind = row.dtype
    opened = tl.load(gate + token * gate_stride + group * width + column, mask=inside, other=0.0).to(tl.float32)
    opened = activated(opened, ACTIVATION)
    scaled = row.to(tl.float32)
    if FIRST:
        scaled *= opened
    scaled *= tl.rsqrt(tl.sum(scaled * scaled, 0) / width + epsilon)
    factor = tl.load(weight + (group * width if WEIGHTS else 0) + column, mask=inside, other=0.0)
    if ROUNDS:
        scaled = scaled.to(kind).to(tl.float32) * factor.to(tl.float32)
        if factor.dtype == kind:
            scaled = scaled.to(kind).to(tl.float32)
    else:
        scaled *= factor.to(tl.float32)
    if not FIRST:
        scaled *= opened
    tl.store(mixed + at, scaled.to(mixed.dtype.element_ty), mask=inside)
