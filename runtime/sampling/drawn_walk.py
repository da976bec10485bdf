"""A walk down a tree by drawn tokens, in one compiled call."""

from __future__ import annotations

import numpy as np

from hdtool.runtime.kernels.compiled import Array, compiled
from hdtool.runtime.kernels.gemm_tiles import ITEM_SIZE
from hdtool.runtime.kernels.memory.raw_memory import array_at
from hdtool.runtime.sampling.truncation import NOT_FINITE, UNKNOWN, Draws, draw_row, winner_among_any
from hdtool.runtime.tree import OPEN, ROOT, DraftTree, descend


def compile_walks(draws: Draws, walked: Array) -> None:
    """Compile it, or load it from the cache, before the first step."""
    bare, row = DraftTree.bare(0), np.zeros(1, np.float32)
    walk_draws(row.ctypes.data, 1, 1, np.empty(0, np.int64), bare.tokens, bare.parents, 1, walked, 0, False, draws)


@compiled
def walk_draws(
    address: int,
    apart: int,
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
        row = array_at(address + (node + 1) * apart * ITEM_SIZE, vocabulary, np.float32)
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
