"""Which experts each token has, and in which proportion, from the scores that a router gives it."""

from __future__ import annotations

import numpy as np
from numba import types

from hdtool.runtime.kernels.compiled import Array, compiled
from hdtool.runtime.kernels.memory.raw_memory import array_at, float_of

ROUTE, SCORES, OUTPUTS, INPUTS, BIAS, TOP, SIGMOID, RENORMS, CORRECTION, GROUPS, USED_GROUPS = range(11)
"""The matmul that gives the scores: its address, that of the matrix, rows and columns, and the address of the bias.
Then the experts of a token; whether their shares are sigmoids of their scores, and no softmax of all; whether they are
made to add up to 1; the address of what is added to shares to choose by, 0 for none; and the groups of experts, with
the number of those that are used."""
FACTOR, ADDED, LEAST, SHARED_GATE = range(USED_GROUPS + 1, USED_GROUPS + 5)
"""The bits of what shares are multiplied by in the end, of what is added to their sum, and of its least value. Then the
fields of a matmul with one row, whose sigmoid is the share of the expert that all tokens have: 1 without it."""
ROUTER_FIELDS = SHARED_GATE + BIAS + 1


@compiled
def route(router: Array, scores: Array, chosen: Array, shares: Array) -> None:
    """Choose the best experts of each row; ``scores`` ``[rows, experts]`` are overwritten."""
    rows, top = chosen.shape
    factor = float_of(router, FACTOR)
    for row in range(rows):
        of_row = scores[row]
        choices = of_row.copy()
        _to_shares(of_row, router[SIGMOID] != 0)
        if router[CORRECTION]:
            added = array_at(router[CORRECTION], (len(of_row),), types.float32)
            for expert in range(len(of_row)):
                choices[expert] = of_row[expert] + added[expert]
        if router[USED_GROUPS] < router[GROUPS]:
            _hide_groups(choices, router[GROUPS], router[USED_GROUPS])
        taken = np.float32(0)
        for rank in range(top):
            best = np.argmax(choices)
            chosen[row, rank], shares[row, rank] = best, of_row[best]
            taken += of_row[best]
            choices[best] = -np.inf
        divisor = max(taken + float_of(router, ADDED), float_of(router, LEAST)) if router[RENORMS] else np.float32(1)
        for rank in range(top):
            shares[row, rank] = shares[row, rank] / divisor * factor


@compiled
def _to_shares(scores: Array, is_sigmoid: bool) -> None:
    if is_sigmoid:
        for expert in range(len(scores)):
            scores[expert] = np.float32(1) / (np.float32(1) + np.exp(-scores[expert]))
        return
    largest, total = scores.max(), np.float32(0)
    for expert in range(len(scores)):
        scores[expert] = np.exp(scores[expert] - largest)
        total += scores[expert]
    for expert in range(len(scores)):
        scores[expert] /= total


@compiled
def _hide_groups(choices: Array, groups: int, used: int) -> None:
    """Leave the experts of the best groups, by the sum of the best two of each."""
    size = len(choices) // groups
    best = np.empty(groups, np.float32)
    for group in range(groups):
        first, second = np.float32(-np.inf), np.float32(-np.inf)
        for expert in range(group * size, (group + 1) * size):
            if choices[expert] > first:
                first, second = choices[expert], first
            elif choices[expert] > second:
                second = choices[expert]
        best[group] = first + second
    is_used = np.zeros(groups, np.bool_)
    for _ in range(used):
        most = np.argmax(best)
        is_used[most], best[most] = True, -np.inf
    for group in range(groups):
        if not is_used[group]:
            choices[group * size : (group + 1) * size] = -np.inf
