"""Triton kernels of a described model's pass: norms, rotary positions, attention, gates and moves in the cache.

Each kernel rounds where the corresponding Transformers module rounds, and accumulates in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hdtool.runtime.model import pass_inputs

LOG2_E = tl.constexpr(1.4426950408889634)
NODES = tl.constexpr(64)
"""Number of bits in a row's ancestor mask: the size of the largest tree."""
MOVED_TO = tl.constexpr(pass_inputs.MOVED_TO)
MOVED = tl.constexpr(pass_inputs.MOVED)
MOVED_FROM = tl.constexpr(pass_inputs.MOVED_FROM)
LEFT_OUT = tl.constexpr(pass_inputs.LEFT_OUT)
LOWEST = tl.constexpr(-1e30)
"""Lower than the level of any split that has keys."""


def padded(width: int) -> int:
    """Round a width up to a power of two that tensor cores support, at least 16."""
    return max(16, int(triton.next_power_of_2(width)))


@triton.jit
def normed_row(
    row, weight, bias, column, inside, width, epsilon,
    OFFSET: tl.constexpr, ROUNDS: tl.constexpr, CENTERS: tl.constexpr = False, BIAS: tl.constexpr = False,
):  # fmt: skip
    """Return the norm of a row in the row's dtype; columns beyond ``width`` must be zero.

    The norm is a LayerNorm if ``CENTERS``, with a bias if ``BIAS``, and otherwise an RMSNorm.
    """
    kind = row.dtype
    scaled = row.to(tl.float32)
    if CENTERS:
        scaled = tl.where(inside, scaled - tl.sum(scaled, 0) / width, 0.0)
    scaled *= tl.rsqrt(tl.sum(scaled * scaled, 0) / width + epsilon)
    if ROUNDS:
        scaled = scaled.to(kind).to(tl.float32)
    scaled *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + OFFSET
    if BIAS:
        scaled += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    return scaled.to(kind)


@triton.jit
def add_norm_kernel(
    hidden, added, after_weight, after_bias, weight, bias, normed, width, after_epsilon, epsilon, multiplier,
    ADDS: tl.constexpr, AFTER: tl.constexpr, BEFORE: tl.constexpr, SCALES: tl.constexpr,
    OFFSET: tl.constexpr, ROUNDS: tl.constexpr, CENTERS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add ``added`` to ``hidden`` in place if ``ADDS``, and normalize the sum into ``normed`` if ``BEFORE``.

    ``added`` is normalized first if ``AFTER``, then multiplied by ``multiplier`` if ``SCALES``.
    """
    at = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    row = tl.load(hidden + at + column, mask=inside, other=0.0)
    kind = row.dtype
    if ADDS:
        more = tl.load(added + at + column, mask=inside, other=0.0)
        if AFTER:
            more = normed_row(
                more, after_weight, after_bias, column, inside, width, after_epsilon, OFFSET, ROUNDS, CENTERS, BIAS
            )  # fmt: skip
        if SCALES:
            more = (more.to(tl.float32) * multiplier).to(kind)
        row = (row.to(tl.float32) + more.to(tl.float32)).to(kind)
        tl.store(hidden + at + column, row, mask=inside)
    if BEFORE:
        row = normed_row(row, weight, bias, column, inside, width, epsilon, OFFSET, ROUNDS, CENTERS, BIAS)
        tl.store(normed + at + column, row, mask=inside)


@triton.jit
def norm_parts_kernel(
    qkv, query_norm, key_norm, stride, queries, keys, epsilon,
    OFFSET: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalize a row's queries, or its keys, in place across all heads."""
    is_query = tl.program_id(1) == 0
    width = tl.where(is_query, queries, keys)
    at = tl.program_id(0).to(tl.int64) * stride + tl.where(is_query, 0, queries)
    column = tl.arange(0, BLOCK)
    inside = column < width
    row = tl.load(qkv + at + column, mask=inside, other=0.0)
    weight = query_norm if is_query else key_norm
    row = normed_row(row, weight, weight, column, inside, width, epsilon, OFFSET, ROUNDS)
    tl.store(qkv + at + column, row, mask=inside)


@triton.jit
def times_weight(part, weight, column, inside, scale, kind, OFFSET: tl.constexpr, ROUNDS: tl.constexpr):
    """Apply an RMSNorm's ``scale`` and weight to part of a row; return float32 values rounded to the dtype ``kind``."""
    part *= scale
    if ROUNDS:
        part = part.to(kind).to(tl.float32)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + OFFSET
    return (part * factor).to(kind).to(tl.float32)


@triton.jit
def rotated(first, second, cos, sin, inside, kind):
    """Return ``first`` times the numbers at ``cos`` plus ``second`` times those at ``sin``, in the dtype ``kind``.

    The products are rounded to ``kind`` first if the numbers have that dtype.
    """
    left = first * tl.load(cos, mask=inside, other=0.0).to(tl.float32)
    right = second * tl.load(sin, mask=inside, other=0.0).to(tl.float32)
    if cos.dtype.element_ty == kind:
        left, right = left.to(kind).to(tl.float32), right.to(kind).to(tl.float32)
    return (left + right).to(kind)


@triton.jit
def rotary_kernel(
    qkv, cos, sin, query_norm, key_norm, keys, values, lengths,
    rows, step, query_heads, key_heads, slot_stride, head_stride, epsilon,
    HALF: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr,
    ROTATES: tl.constexpr, PAIRS: tl.constexpr, NORMS: tl.constexpr, OFFSET: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Rotate queries in place, and write rotated keys and unchanged values into the cache.

    Queries and keys are normalized first if ``NORMS``, and not rotated without ``ROTATES``. A rotated pair is two
    adjacent elements if ``PAIRS``, and otherwise one element of each half. The last ``REST`` elements aren't rotated.
    """
    token, head = tl.program_id(0), tl.program_id(1)
    width = 2 * HALF + REST
    slot = token // rows
    at = (token.to(tl.int64) * (query_heads + 2 * key_heads) + head) * width
    column = tl.arange(0, BLOCK)
    inside = column < HALF
    if PAIRS:
        at_low, at_high = 2 * column, 2 * column + 1
    else:
        at_low, at_high = column, HALF + column
    low = tl.load(qkv + at + at_low, mask=inside, other=0.0)
    high = tl.load(qkv + at + at_high, mask=inside, other=0.0)
    behind = 2 * HALF + tl.arange(0, REST_BLOCK)
    is_rest = behind < width
    rest = tl.load(qkv + at + behind, mask=is_rest, other=0.0)
    kind = low.dtype
    is_query, is_value = head < query_heads, head >= query_heads + key_heads
    if not is_value:
        first, second = low.to(tl.float32), high.to(tl.float32)
        if NORMS:
            weight = query_norm if is_query else key_norm
            third = rest.to(tl.float32)
            squares = tl.sum(first * first, 0) + tl.sum(second * second, 0) + tl.sum(third * third, 0)
            scale = tl.rsqrt(squares / width + epsilon)
            first = times_weight(first, weight, at_low, inside, scale, kind, OFFSET, ROUNDS)
            second = times_weight(second, weight, at_high, inside, scale, kind, OFFSET, ROUNDS)
            rest = times_weight(third, weight, behind, is_rest, scale, kind, OFFSET, ROUNDS).to(kind)
        if ROTATES:
            table = token * 2 * HALF
            low = rotated(first, second, cos + table + at_low, sin + table + at_low, inside, kind)
            high = rotated(second, first, cos + table + at_high, sin + table + at_high, inside, kind)
        else:
            low, high = first.to(kind), second.to(kind)
    if is_query:
        to = qkv + at
    else:
        position = tl.load(lengths + slot * step) + token % rows
        cache = values if is_value else keys
        key_head = (head - query_heads) % key_heads
        to = cache + slot.to(tl.int64) * slot_stride + key_head.to(tl.int64) * head_stride + position * width
    tl.store(to + at_low, low, mask=inside)
    tl.store(to + at_high, high, mask=inside)
    tl.store(to + behind, rest, mask=is_rest)


@triton.jit
def latent_kernel(
    queries, latents, cos, sin, norm, turned, cached_latents, cached_keys, lengths,
    rows, step, heads, query_stride, head_stride, latent_stride, slot_stride, key_slot_stride, epsilon,
    RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    ROTATES: tl.constexpr, PAIRS: tl.constexpr, SPLITS: tl.constexpr, OFFSET: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Write the rotated part of a query to ``turned``, or a token's normalized latent and rotated key to the cache.

    A rotated pair is two adjacent elements if ``PAIRS``, and otherwise one element of each half. If ``SPLITS``, it is
    two adjacent elements, which are written to different halves.
    """
    token, head = tl.program_id(0), tl.program_id(1)
    slot = token // rows
    column = tl.arange(0, BLOCK)
    inside = column < HALF
    if PAIRS:
        to_low, to_high = 2 * column, 2 * column + 1
    else:
        to_low, to_high = column, HALF + column
    if SPLITS:
        at_low, at_high = 2 * column, 2 * column + 1
    else:
        at_low, at_high = to_low, to_high
    if head < heads:
        read = queries + token.to(tl.int64) * query_stride + head * head_stride
        to = turned + (token.to(tl.int64) * heads + head) * 2 * HALF
    else:
        read = latents + token.to(tl.int64) * latent_stride + RANK
        position = tl.load(lengths + slot * step) + token % rows
        to = cached_keys + slot.to(tl.int64) * key_slot_stride + position * 2 * HALF
        inner = tl.arange(0, RANK_BLOCK)
        there = inner < RANK
        latent = tl.load(latents + token.to(tl.int64) * latent_stride + inner, mask=there, other=0.0)
        latent = normed_row(latent, norm, norm, inner, there, RANK, epsilon, OFFSET, ROUNDS)
        cached = cached_latents + slot.to(tl.int64) * slot_stride + position * RANK
        tl.store(cached + inner, latent, mask=there)
    low = tl.load(read + at_low, mask=inside, other=0.0)
    high = tl.load(read + at_high, mask=inside, other=0.0)
    if ROTATES:
        kind = low.dtype
        first, second = low.to(tl.float32), high.to(tl.float32)
        table = token * 2 * HALF
        low = rotated(first, second, cos + table + to_low, sin + table + to_low, inside, kind)
        high = rotated(second, first, cos + table + to_high, sin + table + to_high, inside, kind)
    tl.store(to + to_low, low, mask=inside)
    tl.store(to + to_high, high, mask=inside)


@triton.jit
def add_block(
    query, turned, best, total, mixed, keys, rotated, values, at, last, scale, softcap,
    length, bits, position, positions, window,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    WIDTH: tl.constexpr, LOADED: tl.constexpr, ROTATED: tl.constexpr, ROTATED_LOADED: tl.constexpr,
    VALUES: tl.constexpr, VALUES_LOADED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Continue the online softmax of attention over the next ``BLOCK_N`` keys, starting at position ``at``.

    If ``ROTATED`` isn't 0, scores are summed over two parts: ``query`` and ``keys``, and ``turned`` and ``rotated``.

    Return the updated ``(best, total, mixed)``: maximum score, sum of weights, and weighted sum of values.
    """
    column = at + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, LOADED)
    there = (column < last)[:, None] & (inner < WIDTH)[None, :]
    key = tl.load(keys + column[:, None].to(tl.int64) * WIDTH + inner[None, :], mask=there, other=0.0)
    score = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    if ROTATED:
        inner = tl.arange(0, ROTATED_LOADED)
        there = (column < last)[:, None] & (inner < ROTATED)[None, :]
        key = tl.load(rotated + column[:, None].to(tl.int64) * ROTATED + inner[None, :], mask=there, other=0.0)
        score += tl.dot(turned, tl.trans(key), input_precision=PRECISION)
    score *= scale
    if SOFTCAP:
        score = softcap * (1.0 - 2.0 / (tl.exp(2.0 * score / softcap) + 1.0))
    seen = (column < last)[None, :]
    if MASKED:
        node = column - length - 1
        bit = tl.minimum(tl.maximum(node, 0), NODES - 1).to(tl.int64)
        seen &= (node < 0)[None, :] | (((bits[:, None] >> bit[None, :]) & 1) == 1)
    if WINDOW:
        behind = column - length
        where = tl.load(positions + behind, mask=(behind > 0) & (column < last), other=0)
        where = tl.where(behind > 0, where, column)
        seen &= where[None, :] > position[:, None] - window
    score = tl.where(seen, score * LOG2_E, float("-inf"))
    higher = tl.maximum(best, tl.max(score, 1))
    level = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp2(score - level[:, None])
    decay = tl.exp2(best - level)
    inner = tl.arange(0, VALUES_LOADED)
    there = (column < last)[:, None] & (inner < VALUES)[None, :]
    value = tl.load(values + column[:, None].to(tl.int64) * VALUES + inner[None, :], mask=there, other=0.0)
    mixed = mixed * decay[:, None] + tl.dot(weight.to(value.dtype), value, input_precision=PRECISION)
    return higher, total * decay + tl.sum(weight, 1), mixed


@triton.jit
def attention_kernel(
    qkv, keys, rotated, values, lengths, positions, ancestors, parts, levels,
    rows, step, groups, query_stride, slot_stride, head_stride, rotated_slot_stride,
    value_slot_stride, value_head_stride, scale, softcap, window, blocks, wanted,
    SLOTS: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr, WIDTH: tl.constexpr, LOADED: tl.constexpr,
    ROTATED: tl.constexpr, ROTATED_LOADED: tl.constexpr, VALUES: tl.constexpr, VALUES_LOADED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute attention of a block of query rows over one split of the keys.

    The keys of all slots are divided into about ``wanted`` splits of equal size, at most ``SPLITS`` a slot, so that a
    slot with a long context gets more of them. A slot that the step leaves out has none.

    All rows attend to the context. The bits of ``ancestors`` select which of the tree's nodes each row attends to.
    The outputs are ``parts [splits, tokens, heads, VALUES]`` and ``levels [splits, tokens, heads]``, the log2 of each
    part's sum of softmax weights. If ``ROTATED`` isn't 0, queries and keys have a second part of that width, and all
    queries share the keys.
    """
    block, split = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    head, slot = tl.program_id(1), tl.program_id(2)
    member = block * BLOCK_M + tl.arange(0, BLOCK_M)
    row, query_head = member // groups, head * groups + member % groups
    used = row < rows
    token = slot * rows + row
    inner = tl.arange(0, LOADED)
    queries = qkv + token[:, None].to(tl.int64) * query_stride + query_head[:, None] * (WIDTH + ROTATED)
    query = tl.load(queries + inner[None, :], mask=used[:, None] & (inner < WIDTH)[None, :], other=0.0)
    turned = query
    if ROTATED:
        inner = tl.arange(0, ROTATED_LOADED)
        there = used[:, None] & (inner < ROTATED)[None, :]
        turned = tl.load(queries + WIDTH + inner[None, :], mask=there, other=0.0)
        rotated += slot.to(tl.int64) * rotated_slot_stride
    length = tl.load(lengths + slot * step).to(tl.int32)
    bits = tl.load(ancestors + slot * step + row, mask=used, other=0)
    position = tl.load(positions + slot * step + row, mask=used, other=0).to(tl.int32)
    every = tl.arange(0, SLOTS)
    there = every < tl.num_programs(2)
    spans = tl.load(lengths + every * step, mask=there, other=0).to(tl.int32) + rows
    end = length + rows
    begin = 0
    if WINDOW:  # skip positions before the root's window, which no row attends to
        begin = tl.maximum(length - window + 1, 0) // BLOCK_N * BLOCK_N
        spans = tl.minimum(spans, window + rows)
    is_used = tl.load(lengths + every * step + MOVED, mask=there, other=LEFT_OUT) != LEFT_OUT
    even = tl.cdiv(tl.sum(tl.where(is_used, spans, 0), 0), wanted)
    share = tl.cdiv(tl.maximum(tl.maximum(even, tl.cdiv(end - begin, SPLITS)), LEAST), BLOCK_N) * BLOCK_N
    if tl.load(lengths + slot * step + MOVED) == LEFT_OUT:
        end = begin
    first = begin + split * share
    last = tl.minimum(first + share, end)
    heads = tl.num_programs(1) * groups
    out = (split * tl.num_programs(2) * rows + token).to(tl.int64) * heads + query_head
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, VALUES_LOADED], tl.float32)
    keys += slot.to(tl.int64) * slot_stride + head.to(tl.int64) * head_stride
    values += slot.to(tl.int64) * value_slot_stride + head.to(tl.int64) * value_head_stride
    near = positions + slot * step
    seen_by_all = tl.maximum(tl.minimum(last, length + 1) - first, 0) // BLOCK_N * BLOCK_N
    for at in range(first, first + seen_by_all, BLOCK_N):
        best, total, mixed = add_block(
            query, turned, best, total, mixed, keys, rotated, values, at, last, scale, softcap,
            length, bits, position, near, window,
            False, WINDOW, SOFTCAP, PRECISION, WIDTH, LOADED, ROTATED, ROTATED_LOADED, VALUES, VALUES_LOADED, BLOCK_N,
        )  # fmt: skip
    for at in range(first + seen_by_all, last, BLOCK_N):
        best, total, mixed = add_block(
            query, turned, best, total, mixed, keys, rotated, values, at, last, scale, softcap,
            length, bits, position, near, window,
            True, WINDOW, SOFTCAP, PRECISION, WIDTH, LOADED, ROTATED, ROTATED_LOADED, VALUES, VALUES_LOADED, BLOCK_N,
        )  # fmt: skip
    level = tl.where(total > 0.0, best + tl.log2(tl.maximum(total, 1e-30)), float("-inf"))
    tl.store(levels + out, level, mask=used)
    mixed = mixed / tl.maximum(total, 1e-30)[:, None]
    inner = tl.arange(0, VALUES_LOADED)
    tl.store(
        parts + out[:, None] * VALUES + inner[None, :],
        mixed,
        mask=(used & (total > 0.0))[:, None] & (inner < VALUES)[None, :],
    )


@triton.jit
def merge_kernel(
    parts, levels, sinks, mixed, stride, heads,
    SPLITS: tl.constexpr, SINKS: tl.constexpr, WIDTH: tl.constexpr, LOADED: tl.constexpr,
):  # fmt: skip
    """Average the splits' outputs for a token and head, weighted by sums of softmax weights; sinks add to the total."""
    at = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    level = tl.load(levels + split * stride + at)
    highest = tl.maximum(tl.max(level, 0), LOWEST)
    weight = tl.exp2(level - highest)
    total = tl.sum(weight, 0)
    if SINKS:
        total += tl.exp2(tl.load(sinks + at % heads).to(tl.float32) * LOG2_E - highest)
    inner = tl.arange(0, LOADED)
    there = (level > float("-inf"))[:, None] & (inner < WIDTH)[None, :]
    part = tl.load(parts + (split[:, None] * stride + at) * WIDTH + inner[None, :], mask=there, other=0.0)
    whole = tl.sum(part * weight[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(mixed + at * WIDTH + inner, whole.to(mixed.dtype.element_ty), mask=inner < WIDTH)


@triton.jit
def activated(number, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        active = number / (1.0 + tl.exp(-number))
    elif ACTIVATION == "sigmoid":
        active = 1.0 / (1.0 + tl.exp(-number))
    elif ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * (number + 0.044715 * number * number * number)
        # (1 + tanh(x)) / 2 is sigmoid(2x). Below -40 the result is zero, and the exponential would overflow.
        active = number / (1.0 + tl.exp(-2.0 * tl.maximum(inner, -40.0)))
    else:
        tl.static_assert(ACTIVATION == "gelu")
        active = 0.5 * number * (1.0 + tl.erf(0.7071067811865476 * number))
    return active


@triton.jit
def gate_kernel(gate_up, gated, width, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """Multiply the activation of a row's first half by the row's second half, for one block of columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    kind = gate.dtype
    active = activated(gate.to(tl.float32), ACTIVATION)
    tl.store(gated + row * width + column, (active.to(kind).to(tl.float32) * up).to(kind), mask=inside)


@triton.jit
def move_kernel(cache, input, step, layer_stride, slot_stride, head_stride, heads,
                WIDTH: tl.constexpr, LOADED: tl.constexpr, MOVES: tl.constexpr):  # fmt: skip
    """Move the rows of a slot's accepted path to their final positions, in one head of a layer's keys or values."""
    part, slot = tl.program_id(0), tl.program_id(1)
    number = tl.load(input + slot * step + MOVED)
    if number > 0:
        move = tl.arange(0, MOVES)
        to = tl.load(input + slot * step + MOVED_TO) + move
        moved = tl.load(input + slot * step + MOVED_FROM + move)
        inner = tl.arange(0, LOADED)
        used = (move < number)[:, None] & (inner < WIDTH)[None, :]
        cache += (part // heads).to(tl.int64) * layer_stride + slot.to(tl.int64) * slot_stride
        cache += (part % heads).to(tl.int64) * head_stride
        rows = tl.load(cache + moved[:, None] * WIDTH + inner[None, :], mask=used, other=0.0)
        tl.debug_barrier()  # all loads must finish first: a target may be another row's source
        tl.store(cache + to[:, None] * WIDTH + inner[None, :], rows, mask=used)
