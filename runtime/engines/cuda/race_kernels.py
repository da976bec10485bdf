"""Triton kernels that run each row's race in float32, with the random numbers of ``ExponentialRace``."""

from __future__ import annotations

import triton
import triton.language as tl

from hdtool.runtime.core import exponential_race, race_leaders
from hdtool.runtime.model import pass_inputs

SEED, DRAW = tl.constexpr(pass_inputs.SEED), tl.constexpr(pass_inputs.DRAW)
POSITIONS = tl.constexpr(pass_inputs.HEADER)
"""Index of the words after a slot's header: tokens, then positions."""
STRIDE = tl.constexpr(int(exponential_race.SPLITMIX_STRIDE))
WORDS = tl.constexpr(race_leaders.RACE.itemsize // 8)
"""Size of a ``RACE`` record in int64."""
SCORES = tl.constexpr(race_leaders.place_of("scores"))
KEYS = tl.constexpr(race_leaders.place_of("keys"))
HIGHEST = tl.constexpr(race_leaders.place_of("highest"))
ROUNDING = tl.constexpr(race_leaders.ROUNDING)
NOTHING = tl.constexpr(-0x7F800001 << 32)
"""An entry, see ``entries``, with the key minus infinity."""


@triton.jit
def hashed(number):
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB
    return number ^ (number >> 31)


@triton.jit
def exponential(bits):
    """Return ``-log(1 - u)`` for the uniform number ``u = bits / 2**53``, to float32's precision also for a small u."""
    u = bits.to(tl.float32) * 1.1102230246251565e-16
    rest = ((1 << 53) - bits).to(tl.float32) * 1.1102230246251565e-16
    small = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u / 6)))))
    return tl.where(u < 0.0625, small, -tl.log(rest))


@triton.jit
def exponents(score, highest, draw):
    """Return the logarithms of the tokens' weights, relative to that of the highest score."""
    return (score - highest) / draw.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def entries(key, token):
    """Pack each key, and its token below it, into an integer that sorts by key."""
    bits = key.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | token


@triton.jit
def lead_kernel(
    logits, best, step, found, rows, stride, vocabulary, LEADERS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write the entries of a block's leaders, the fastest first, into ``found``, ``[rows, blocks, LEADERS]``.

    ``rows`` is the number of rows in a slot, ``best`` holds the argmax of each row.
    """
    row, block = tl.program_id(0), tl.program_id(1)
    words = step + (row // rows).to(tl.int64) * stride
    draw = tl.load(words + DRAW)
    if draw != 0:
        position = (tl.load(words + POSITIONS + rows + row % rows) + 1).to(tl.uint64)
        start = hashed(tl.load(words + SEED).to(tl.uint64) + position * STRIDE)
        token = block * BLOCK + tl.arange(0, BLOCK)
        inside = token < vocabulary
        logits += row.to(tl.int64) * vocabulary
        score = tl.load(logits + token, mask=inside, other=-float("inf")).to(tl.float32)
        favourite = tl.load(best + row)
        highest = tl.load(logits + favourite, mask=(favourite >= 0) & (favourite < vocabulary), other=0.0)
        bits = (hashed(start + (token + 1).to(tl.uint64) * STRIDE) >> 11).to(tl.int64)
        key = exponents(score, highest.to(tl.float32), draw) - tl.log(exponential(bits))
        key = tl.where(key == key, key, float("inf"))  # the host decides what is not a number
        left = tl.where(inside, entries(key, token), NOTHING)
        found += (row.to(tl.int64) * tl.num_programs(1) + block) * LEADERS
        for place in tl.static_range(LEADERS):
            first = tl.max(left, 0)
            tl.store(found + place, first)
            left = tl.where(left == first, NOTHING, left)


@triton.jit
def select_kernel(
    logits, best, step, found, races, rows, stride, vocabulary, number, LEADERS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write the leaders of a row into its record in ``races``, given the ``number`` leaders of its blocks."""
    row = tl.program_id(0)
    draw = tl.load(step + (row // rows).to(tl.int64) * stride + DRAW)
    if draw != 0:
        logits += row.to(tl.int64) * vocabulary
        races += row * WORDS
        record = races.to(tl.pointer_type(tl.float32))
        favourite = tl.load(best + row)
        inside = (favourite >= 0) & (favourite < vocabulary)
        tl.store(record + HIGHEST, tl.load(logits + favourite, mask=inside, other=0.0).to(tl.float32))
        at = tl.arange(0, BLOCK)
        left = tl.load(found + row.to(tl.int64) * number + at, mask=at < number, other=NOTHING)
        for place in tl.static_range(LEADERS):
            first = tl.max(left, 0)
            token, bits = first & 0x7FFFFFFF, (first >> 32).to(tl.int32)
            tl.store(races + place, token)
            tl.store(record + SCORES + place, tl.load(logits + token).to(tl.float32))
            tl.store(record + KEYS + place, (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True))
            left = tl.where(left == first, NOTHING, left)


@triton.jit
def weigh_kernel(
    logits, step, races, sums, rows, stride, vocabulary,
    LEADERS: tl.constexpr, SUMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """If draws have a nucleus, write a block's shares of the sums of weights into ``sums``, ``[rows, blocks, SUMS]``.

    They are the ``certain`` and ``possible`` weights of each leader, then the total.
    """
    row, block = tl.program_id(0), tl.program_id(1)
    draw = tl.load(step + (row // rows).to(tl.int64) * stride + DRAW)
    if (draw >> 32) != 0:
        races += row * WORDS
        record = races.to(tl.pointer_type(tl.float32))
        token = block * BLOCK + tl.arange(0, BLOCK)
        score = tl.load(
            logits + row.to(tl.int64) * vocabulary + token, mask=token < vocabulary, other=-float("inf")
        ).to(tl.float32)  # fmt: skip
        highest = tl.load(record + HIGHEST)
        exponent = exponents(score, highest, draw)
        weight = tl.exp(exponent)
        sums += (row.to(tl.int64) * tl.num_programs(1) + block) * SUMS
        for place in tl.static_range(LEADERS):
            leader, own = tl.load(races + place), tl.load(record + SCORES + place)
            distance = exponent - exponents(own, highest, draw)
            is_tied = score == own
            certain = tl.where(is_tied, token > leader, distance > ROUNDING)
            possible = tl.where(is_tied, token > leader, distance >= -ROUNDING)
            tl.store(sums + place, tl.sum(tl.where(certain, weight, 0.0), 0))
            tl.store(sums + LEADERS + place, tl.sum(tl.where(possible, weight, 0.0), 0))
        tl.store(sums + 2 * LEADERS, tl.sum(weight, 0))
