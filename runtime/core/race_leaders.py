"""Draws by the leaders of a race: a device finds them by approximate times, and the host decides by exact ones.

A device computes the times of all tokens of a row in float32, from the same random numbers as the host, and returns the
tokens with the smallest times. The host computes the times of these leaders as it does in a race of all tokens. A draw
is decided if the best leader is faster than any other token can be, however the device has rounded.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hdtool.runtime.core.exponential_race import SPLITMIX_STRIDE, U64, hashed_seed, stream_start, time_before
from hdtool.runtime.core.top_k_top_p import NOT_FINITE, UNDECIDED, DrawOptions
from hdtool.runtime.core.tree import ROOT, DraftTree, descend
from hdtool.runtime.kernels.compiled import Array, compiled
from hdtool.runtime.kernels.row_operations import exponentiate
from hdtool.runtime.kernels.vector_code import LANES

LEADERS = 8
RACE = np.dtype(
    [
        ("tokens", np.int64, LEADERS),  # the leaders, the fastest first
        ("scores", np.float32, LEADERS),
        ("keys", np.float32, LEADERS),  # negative logarithms of the times; minus infinity if the token cannot win
        ("certain", np.float32, LEADERS),  # weight of all tokens that are certainly more probable than each leader
        ("possible", np.float32, LEADERS),  # as ``certain``, plus the weight of all tokens that are about as probable
        ("total", np.float32),  # weight of all tokens
        ("highest", np.float32),  # highest score of the row
    ],
    align=True,
)
"""Outcome of the race of a row. Weights are relative to that of the highest score; only top-p needs their sums."""


def race_input(draws: DrawOptions) -> tuple[int, int]:
    """Return what a device needs to run races: the hashed seed, and the options.

    The options' lower half is the temperature in float32, the upper half 1 if the draws have a nucleus, or else 0.
    """
    temperature = int(np.float32(draws.temperature).view(np.int32))
    return int(np.uint64(hashed_seed(draws.seed)).astype(np.int64)), (int(draws.top_p < 1) << 32) + temperature


def place_of(field: str) -> int:
    """Return the index of a field's first number in a record that is read as float32."""
    assert RACE.fields
    return RACE.fields[field][1] // 4


ROUNDING = 1e-3
"""Bound on the relative error of a device's times and sums, and on the absolute error of its keys: many times their
rounding errors, of which the largest, of a key, is below 1e-4."""
NEAR_TIE = 1 + 1e-9
"""Ratio of two exact times below which the order in which a race compares them may matter."""
OUTSIDE, UNKNOWN, INSIDE = range(3)
"""Whether a leader is in the nucleus of top-p."""
LOWEST_KEY = -40.0
"""A token with a lower key cannot win: the time of the highest score is at most ``-log(2**-53)``, whose key is -3.6."""


def compile_race_walks(draws: DrawOptions, walk_buffer: Array) -> None:
    """Compile ``walk_races``, or load it from the cache, before the first step."""
    bare = DraftTree.bare(0)
    walk_races(np.zeros(1, RACE), bare.tokens, bare.parents, 1, walk_buffer, 0, draws)


@compiled
def walk_races(
    races: Array,
    drafted: Array,
    parents: Array,
    max_tokens: int,
    walk_buffer: Array,
    position: int,
    draws: DrawOptions,
) -> tuple[int, bool]:
    """Walk down the tree as ``walk_ranked`` does, given the outcome of each row's race instead of a ranking."""
    node = ROOT
    for step in range(max_tokens):
        token = draw_among_leaders(position + step, races[node + 1], draws)
        if token == NOT_FINITE:
            return step, False
        if token == UNDECIDED:
            return step, True
        node = descend(walk_buffer, step, drafted, parents, node, token)
        if node == ROOT:
            return step + 1, True
    return max_tokens, True


@compiled
def draw_among_leaders(position: Any, race: Any, draws: Any) -> Any:
    """Return the token that ``draw_row`` would draw without top-k, given the outcome of a race in a ``RACE`` record.

    Return ``UNDECIDED`` if the leaders do not determine the draw, and ``NOT_FINITE`` if the highest score isn't finite.
    """
    if not np.isfinite(race.highest):
        return NOT_FINITE
    weights = np.empty(-(-LEADERS // LANES) * LANES, np.float32)
    for index in range(LEADERS):
        weights[index] = (race.scores[index] - race.highest) / draws.temperature
    weights[LEADERS:] = -np.inf
    exponentiate(weights.ctypes.data, len(weights), np.float32(0))
    times, start = np.empty(LEADERS), stream_start(draws.seed, position)
    for index in range(LEADERS):
        number = start + U64(race.tokens[index] + 1) * SPLITMIX_STRIDE
        times[index] = time_before(np.inf, number, weights[index]) if race.keys[index] > LOWEST_KEY else np.inf
        # Guards against a device that draws other numbers, and against a token with the time 0.
        if times[index] < np.inf and not abs(np.log(times[index]) + race.keys[index]) < ROUNDING:
            return UNDECIDED
    # All other tokens are slower than this.
    latest = np.exp(-max(race.keys[LEADERS - 1], LOWEST_KEY)) * (1 - ROUNDING)
    for _ in range(LEADERS):
        first = times.argmin()
        if not times[first] < latest or (times < times[first] * NEAR_TIE).sum() > 1:
            return UNDECIDED
        place = _place_in_nucleus(race, first, draws.top_p) if weights[first] >= draws.min_p else OUTSIDE
        if place != OUTSIDE:
            return race.tokens[first] if place == INSIDE else UNDECIDED
        times[first] = np.inf
    return UNDECIDED


@compiled
def _place_in_nucleus(race: Any, leader: Any, top_p: Any) -> Any:
    nucleus = top_p * np.float64(race.total)
    if top_p >= 1 or race.possible[leader] == 0 or race.possible[leader] < nucleus * (1 - ROUNDING):
        return INSIDE  # the most probable token is always kept
    return OUTSIDE if race.certain[leader] > nucleus * (1 + ROUNDING) else UNKNOWN
