"""Draws by the highest scores of a row alone, where top-k or min-p removes the others.

A device sends the highest scores with each pass, so that no draw waits for all scores of its row.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hdtool.runtime.kernels.compiled import Array, compiled
from hdtool.runtime.kernels.elementwise import exponentiate
from hdtool.runtime.kernels.topk import MOST_RANKED
from hdtool.runtime.kernels.vector_code import LANES
from hdtool.runtime.sampling.exponential_race import sample_among
from hdtool.runtime.sampling.truncation import ALL_TOKENS, NOT_FINITE, UNKNOWN, Draws, draw_from_kept
from hdtool.runtime.tree import ROOT, DraftTree, descend


def ranked_for(draws: Draws) -> int:
    """How many of the highest scores decide such draws; 0 if all scores do.

    Top-p depends on the sum of all weights. Of a temperature alone, a token that is not among 64 is drawn too often,
    or cannot be ruled out.
    """
    if draws.top_k:
        return draws.top_k + 1 if draws.top_k < MOST_RANKED else 0
    return MOST_RANKED if draws.min_p > 0 and draws.top_p >= 1 else 0


def compile_ranked_walks(draws: Draws, walked: Array) -> None:
    """Compile walks by ranked draws, or load them from the cache, before the first step."""
    bare, tokens, scores = DraftTree.bare(0), np.zeros((1, 1), np.int64), np.zeros((1, 1), np.float32)
    walk_ranked(1, tokens, scores, bare.tokens, bare.parents, 1, walked, 0, draws)


@compiled
def walk_ranked(
    vocabulary: int,
    tokens: Array,
    scores: Array,
    drafted: Array,
    parents: Array,
    longest: int,
    walked: Array,
    position: int,
    draws: Draws,
) -> tuple[int, bool]:
    """Write at most ``longest`` drawn tokens, and the node that drafted each, to ``walked``.

    ``tokens`` and ``scores`` are the highest of each row, best first; the first token drawn is at this position.
    Returns the number of drawn tokens, and whether all scores that decided are finite. The walk ends before a row that
    is not, and before a token that depends on other scores.
    """
    node = ROOT
    for place in range(longest):
        token = draw_ranked(position + place, vocabulary, tokens[node + 1], scores[node + 1], draws)
        if token == NOT_FINITE:
            return place, False
        if token == UNKNOWN:
            return place, True
        node = descend(walked, place, drafted, parents, node, token)
        if node == ROOT:
            return place + 1, True
    return longest, True


@compiled
def draw_ranked(position: Any, vocabulary: Any, tokens: Any, scores: Any, draws: Any) -> Any:
    """The token that ``draw_row`` draws from a row whose highest scores these are; ``UNKNOWN`` if others decide."""
    known, top_k = len(tokens), draws.top_k
    if not np.isfinite(scores[0]):
        return NOT_FINITE
    if 0 < top_k < vocabulary:
        if top_k >= known or scores[top_k] == scores[top_k - 1]:
            return UNKNOWN
        return draw_from_kept(position, tokens[:top_k].copy(), scores[:top_k], scores[0], ALL_TOKENS, draws)
    padded = np.empty(-(-known // LANES) * LANES, np.float32)
    for place in range(known):
        padded[place] = (scores[place] - scores[0]) / draws.temperature
    padded[known:] = -np.inf
    exponentiate(padded.ctypes.data, len(padded), np.float32(0))
    kept = 0
    while kept < known and padded[kept] >= draws.min_p:
        kept += 1
    if draws.top_p < 1 or (kept == known and known < vocabulary):
        return UNKNOWN
    return sample_among(draws.seed, position, tokens[:kept], padded[:kept], np.inf)
