"""Compiled functions that walk down a verified draft tree, choosing tokens by argmax or by random draws.

On a GPU, a pass also returns the highest scores of each row, and draws with top-k or min-p seldom need the others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hdtool.runtime.core.top_k_top_p import (
    ALL_TOKENS,
    NOT_FINITE,
    UNDECIDED,
    DrawOptions,
    draw_from_kept,
    draw_row,
    sample_among,
    winner_among_any,
)
from hdtool.runtime.core.tree import ROOT, UNDETERMINED, DraftTree, descend
from hdtool.runtime.kernels.compiled import Array, array_at, compiled
from hdtool.runtime.kernels.row_operations import exponentiate
from hdtool.runtime.kernels.topk import MAX_RANKED, argmax_of_row, bits_of, is_finite
from hdtool.runtime.kernels.vector_code import ITEM_SIZE, LANES


def ranked_for(draws: DrawOptions) -> int:
    """Return how many of a row's highest scores a draw with these options needs; 0 if it needs all scores.

    Top-p depends on the sum of all weights. With a temperature alone, a token outside of the highest ``MAX_RANKED`` is
    drawn, or cannot be ruled out, too often.
    """
    if draws.top_k:
        return draws.top_k + 1 if draws.top_k < MAX_RANKED else 0
    return MAX_RANKED if draws.min_p > 0 and draws.top_p >= 1 else 0


def compile_ranked_walks(draws: DrawOptions, walk_buffer: Array) -> None:
    """Compile ``walk_ranked``, or load it from the cache, before the first step."""
    bare, tokens, scores = DraftTree.bare(0), np.zeros((1, 1), np.int64), np.zeros((1, 1), np.float32)
    walk_ranked(1, tokens, scores, bare.tokens, bare.parents, 1, walk_buffer, 0, draws)


@compiled
def walk_ranked(
    vocabulary: int,
    tokens: Array,
    scores: Array,
    drafted: Array,
    parents: Array,
    max_tokens: int,
    walk_buffer: Array,
    position: int,
    draws: DrawOptions,
) -> tuple[int, bool]:
    """Walk down the tree by drawing up to ``max_tokens`` tokens, given only the highest scores of each row.

    ``scores`` holds the highest scores of each row, best first, and ``tokens`` their tokens; the first token is drawn
    at ``position``. The drawn tokens and the nodes that drafted them are written to ``walk_buffer``. The walk ends
    before a row whose highest score is not finite, and before a token that depends on scores that are not given. Return
    ``(count, finite)``: the number of drawn tokens, and False if a row that is not finite ended the walk.
    """
    node = ROOT
    for step in range(max_tokens):
        token = draw_ranked(position + step, vocabulary, tokens[node + 1], scores[node + 1], draws)
        if token == NOT_FINITE:
            return step, False
        if token == UNDECIDED:
            return step, True
        node = descend(walk_buffer, step, drafted, parents, node, token)
        if node == ROOT:
            return step + 1, True
    return max_tokens, True


@compiled
def draw_ranked(position: Any, vocabulary: Any, tokens: Any, scores: Any, draws: Any) -> Any:
    """Draw from only the highest scores of a row; return the token that ``draw_row`` would draw from all scores.

    Return ``UNDECIDED`` if the draw depends on other scores, and ``NOT_FINITE`` if the highest score is not finite.
    """
    known, top_k = len(tokens), draws.top_k
    if not np.isfinite(scores[0]):
        return NOT_FINITE
    if 0 < top_k < vocabulary:
        if top_k >= known or scores[top_k] == scores[top_k - 1]:
            return UNDECIDED
        return draw_from_kept(position, tokens[:top_k].copy(), scores[:top_k], scores[0], ALL_TOKENS, draws)
    padded = np.empty(-(-known // LANES) * LANES, np.float32)
    for step in range(known):
        padded[step] = (scores[step] - scores[0]) / draws.temperature
    padded[known:] = -np.inf
    exponentiate(padded.ctypes.data, len(padded), np.float32(0))
    kept = 0
    while kept < known and padded[kept] >= draws.min_p:
        kept += 1
    if draws.top_p < 1 or (kept == known and known < vocabulary):
        return UNDECIDED
    return sample_among(draws.seed, position, tokens[:kept], padded[:kept], np.inf)


NO_FORCED_TOKENS = np.empty(0, np.int64)


def compile_drawn_walks(draws: DrawOptions, walk_buffer: Array) -> None:
    """Compile ``walk_draws``, or load it from the cache, before the first step."""
    bare, row = DraftTree.bare(0), np.zeros(1, np.float32)
    walk_draws(row.ctypes.data, 1, 1, NO_FORCED_TOKENS, bare.tokens, bare.parents, 1, walk_buffer, 0, False, draws)


def compile_walks() -> None:
    """Compile ``walk_argmax`` and ``walk_known``, or load them from the cache, before the first step."""
    bare, logits, walk_buffer = DraftTree.bare(0), torch.zeros(1, 1), np.zeros((2, 1), np.int64)
    walk_argmax(*bits_of(logits), NO_FORCED_TOKENS, bare.tokens, bare.parents, 1, walk_buffer)
    walk_known(walk_buffer[0], walk_buffer[0], bare.tokens, bare.parents, 1, walk_buffer)


@compiled
def walk_draws(
    address: int,
    stride: int,
    vocabulary: int,
    forced_tokens: Array,
    drafted: Array,
    parents: Array,
    max_tokens: int,
    walk_buffer: Array,
    position: int,
    is_masked: bool,
    draws: DrawOptions,
) -> tuple[int, bool]:
    """Walk down the tree by drawing up to ``max_tokens`` tokens from float32 logits.

    The tokens and the nodes that drafted them are written to ``walk_buffer``. The first token is drawn at ``position``.
    If ``forced_tokens`` holds the only possible token after a row, that token is taken without a draw. The walk ends
    before a row that is not finite and, if a mask applies, before a token that depends on which tokens are forbidden.
    Return ``(count, finite)``: the number of tokens, and False if a row that is not finite ended the walk.
    """
    node, among = ROOT, np.empty(0, np.int64)
    for step in range(max_tokens):
        row = array_at(address + (node + 1) * stride * ITEM_SIZE, vocabulary, np.float32)
        token = forced_tokens[node + 1] if len(forced_tokens) > 0 else UNDETERMINED
        if token != UNDETERMINED:
            token = token if np.isfinite(row[token]) else NOT_FINITE
        elif is_masked:
            token = winner_among_any(position + step, row, draws)
        else:
            token = draw_row(position + step, row, among, draws)
        if token == NOT_FINITE:
            return step, False
        if token == UNDECIDED:
            return step, True
        node = descend(walk_buffer, step, drafted, parents, node, token)
        if node == ROOT:
            return step + 1, True
    return max_tokens, True


@compiled
def walk_argmax(
    address: int,
    stride: int,
    vocabulary: int,
    infinity: Array,
    forced_tokens: Array,
    drafted: Array,
    parents: Array,
    max_tokens: int,
    walk_buffer: Array,
) -> tuple[int, bool]:
    """Walk down the tree by choosing the argmax of each row, for up to ``max_tokens`` tokens.

    The tokens and the nodes that drafted them are written to ``walk_buffer``. If ``forced_tokens`` holds the only
    possible token after a row, that token is chosen, and only its logit is read. The walk ends before a row that is not
    finite, unless it is the only row. Return ``(count, finite)``: the number of tokens, and False if the walk met a row
    that is not finite.
    """
    node = ROOT
    for step in range(max_tokens):
        token = forced_tokens[node + 1] if len(forced_tokens) > 0 else UNDETERMINED
        if token == UNDETERMINED:
            token, finite = argmax_of_row(address, stride, vocabulary, infinity, node + 1)
        else:
            finite = is_finite(address, stride, infinity, node + 1, token)
        if not finite and len(drafted) > 0:
            return step, False
        node = descend(walk_buffer, step, drafted, parents, node, token)
        if node == ROOT:
            return step + 1, finite
    return max_tokens, True


@compiled
def walk_known(
    argmax: Array, are_finite: Array, drafted: Array, parents: Array, max_tokens: int, walk_buffer: Array
) -> tuple[int, bool]:
    """Walk down the tree as ``walk_argmax`` does, given each row's argmax and whether the row is finite."""
    node = ROOT
    for step in range(max_tokens):
        token, finite = argmax[node + 1], are_finite[node + 1] != 0
        if not finite and len(drafted) > 0:
            return step, False
        node = descend(walk_buffer, step, drafted, parents, node, token)
        if node == ROOT:
            return step + 1, finite
    return max_tokens, True
