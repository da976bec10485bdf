"""Walks down a verified tree, each in one compiled call: by arg-max, or by drawn tokens."""

from __future__ import annotations

import numpy as np
import torch

from hdtool.runtime.kernels.argmax import argmax_of_row, bits_of, is_finite
from hdtool.runtime.kernels.compiled import Array, compiled
from hdtool.runtime.kernels.memory.raw_memory import array_at
from hdtool.runtime.kernels.vector_code import ITEM_SIZE
from hdtool.runtime.sampling.truncation import NOT_FINITE, UNKNOWN, Draws, draw_row, winner_among_any
from hdtool.runtime.tree import OPEN, ROOT, DraftTree, descend

NOTHING_CERTAIN = np.empty(0, np.int64)


def compile_drawn_walks(draws: Draws, walked: Array) -> None:
    """Compile walks by drawn tokens, or load them from the cache, before the first step."""
    bare, row = DraftTree.bare(0), np.zeros(1, np.float32)
    walk_draws(row.ctypes.data, 1, 1, NOTHING_CERTAIN, bare.tokens, bare.parents, 1, walked, 0, False, draws)


def compile_walks() -> None:
    """Compile walks by arg-max, or load them from the cache, before the first step."""
    bare, logits, walked = DraftTree.bare(0), torch.zeros(1, 1), np.zeros((2, 1), np.int64)
    walk_argmax(*bits_of(logits), NOTHING_CERTAIN, bare.tokens, bare.parents, 1, walked)
    walk_known(walked[0], walked[0], bare.tokens, bare.parents, 1, walked)


@compiled
def walk_draws(
    address: int,
    stride: int,
    vocabulary: int,
    certain: Array,
    drafted: Array,
    parents: Array,
    longest: int,
    walked: Array,
    position: int,
    is_masked: bool,
    draws: Draws,
) -> tuple[int, bool]:
    """Write at most ``longest`` tokens, drawn from float32 logits, and the node that drafted each, to ``walked``.

    The first token is at this position. Where one is ``certain`` after a row, it is not drawn. Returns their number,
    and whether all logits that decided are finite; the walk ends before a row that is not.

    If the draws are masked, the walk also ends before a token that depends on what is forbidden.
    """
    node, among = ROOT, np.empty(0, np.int64)
    for place in range(longest):
        row = array_at(address + (node + 1) * stride * ITEM_SIZE, vocabulary, np.float32)
        token = certain[node + 1] if len(certain) > 0 else OPEN
        if token != OPEN:
            token = token if np.isfinite(row[token]) else NOT_FINITE
        elif is_masked:
            token = winner_among_any(position + place, row, draws)
        else:
            token = draw_row(position + place, row, among, draws)
        if token == NOT_FINITE:
            return place, False
        if token == UNKNOWN:
            return place, True
        node = descend(walked, place, drafted, parents, node, token)
        if node == ROOT:
            return place + 1, True
    return longest, True


@compiled
def walk_argmax(
    address: int,
    stride: int,
    vocabulary: int,
    infinity: Array,
    certain: Array,
    drafted: Array,
    parents: Array,
    longest: int,
    walked: Array,
) -> tuple[int, bool]:
    """Write at most ``longest`` chosen tokens, and the node that drafted each, to ``walked``.

    Where a token is ``certain`` after a row, it is chosen, and its logit is the only one that is read.
    Returns their number and whether all logits that decided are finite. The walk ends
    before a row that is not finite, unless there is no other row.
    """
    node = ROOT
    for place in range(longest):
        token = certain[node + 1] if len(certain) > 0 else OPEN
        if token == OPEN:
            token, finite = argmax_of_row(address, stride, vocabulary, infinity, node + 1)
        else:
            finite = is_finite(address, stride, infinity, node + 1, token)
        if not finite and len(drafted) > 0:
            return place, False
        node = descend(walked, place, drafted, parents, node, token)
        if node == ROOT:
            return place + 1, finite
    return longest, True


@compiled
def walk_known(
    argmax: Array, are_finite: Array, drafted: Array, parents: Array, longest: int, walked: Array
) -> tuple[int, bool]:
    """Walk by arg-max where that of all rows is known; see ``walk_argmax``."""
    node = ROOT
    for place in range(longest):
        token, finite = argmax[node + 1], are_finite[node + 1] != 0
        if not finite and len(drafted) > 0:
            return place, False
        node = descend(walked, place, drafted, parents, node, token)
        if node == ROOT:
            return place + 1, finite
    return longest, True
