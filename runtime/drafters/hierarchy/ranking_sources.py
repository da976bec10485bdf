"""Sources made from the target's logits: the last logits, recycled rankings, and rankings of neighboring positions.

Tokens that the target ranked high when it chose the root often come next (LogitSpec). The ranking at each node of a
verified tree, accepted or not, is stored by the last tokens before it (Token Recycling). Rankings at rejected nodes are
also used at the same position after other tokens, since a wrong token seldom changes everything after it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.drafters.hierarchy.compiled_source import NEAR_AT, CompiledSource, Prior, record_at, work_at
from hdtool.runtime.drafters.hierarchy.counting_sources import (
    MAX_PLUGIN_POSITIONS,
    MAX_PREDICTED_TOKENS,
    MILLION,
    NO_CHAIN_TOKEN,
    PREDICTION_RECORD,
    advance_record,
    prediction_records,
    prediction_source,
)
from hdtool.runtime.drafters.hierarchy.token_probabilities import (
    candidate_index,
    contribute,
    rescale,
    share_bucket,
    total_probability,
)
from hdtool.runtime.kernels.compiled import Array, Uncopyable, compiled
from hdtool.runtime.kernels.topk import NO_LOGIT, topk
from hdtool.runtime.settings.draft_sources import SourceId
from hdtool.runtime.stores.recycled_rankings import (
    MAX_KEY_TOKENS,
    RANKING_TOKENS,
    RECYCLED_TABLE,
    SHARE_UNIT,
    RecycledRankings,
    kept_row,
    prefetch_rankings,
    rankings_of,
)
from hdtool.runtime.stores.token_log import MAX_MATCH_TOKENS

MAX_NEIGHBOR_TOKENS = 32
"""Maximum number of tokens in a neighboring ranking, beginning with those of the most probable nodes."""
AGREEMENT = (13.0, 9.0, 6.0, 4.0, 3.0, 2.0, 1.5, 1.3)
"""Factors for candidates whose share in a neighboring ranking is above 1/2, above 1/4, and so on."""
MIN_SHARE_SUM = 1e-9
LAST_SHARPNESS, NEAR_SHARPNESS = 0.5, 0.7
"""Exponents applied to probabilities before they are normalized to shares."""
RECYCLED_NUMBER = SourceId.RECYCLED.value

RankedNodes = tuple[Array, Array, Array]
"""``(tails, depths, probs)``: last tokens, depth and probability of the root and each node that has a row of logits."""


class LogitRecords(Uncopyable):
    """Records of the sources that read the target's logits; each row is ranked only once for all of these sources."""

    def __init__(self, *, last: bool = False, recycled: bool = False, known: Array | None = None) -> None:
        """``known`` holds rankings after single tokens, for use from the first step on."""
        self.last, self.near = prediction_records([SourceId.LAST]), prediction_records([SourceId.RECYCLED])
        self.recycled = RecycledRankings()
        self.uses_last, self._uses_recycled = last, recycled
        self.uses_logits, self.is_kept = last or recycled, recycled or known is not None
        self._known = known
        self.forget()
        if self.uses_logits:  # compile the code, or load it from the cache, before the first step
            tokens, scores = topk(torch.full((1, 1), NO_LOGIT), 1)
            note_last_ranking(self.last[0], 0, tokens[0], scores[0])
            note_neighbors(self.near[0], np.zeros(1, np.int64), np.ones(1), tokens, scores, 0)

    @property
    def max_ranked(self) -> int:
        """Number of top logits that the sources read from each row."""
        return MAX_PREDICTED_TOKENS + 1 if self.uses_last else RANKING_TOKENS * self._uses_recycled

    def forget(self) -> None:
        """Drop the rankings of earlier answers; known rankings stay."""
        self.recycled.clear()
        if self._known is not None:
            self.recycled.begin_with(self._known, alone=not self._uses_recycled)

    def observe(self, accepted: Accepted, verified: Verified, nodes: RankedNodes | None) -> None:
        """Store the ranking that the new root was chosen from and, if ``nodes`` are given, the rankings at these."""
        if not len(verified):
            return
        if self.uses_last:
            row = accepted.path[-1] + 1 if accepted.path else 0
            tokens, scores = verified.topk(MAX_PREDICTED_TOKENS + 1, slice(row, row + 1))
            note_last_ranking(self.last[0], accepted.tokens[-1], tokens[0], scores[0])
        if self._uses_recycled and nodes is not None:
            tails, depths, probs = nodes
            tokens, scores = verified.topk(RANKING_TOKENS)
            self.recycled.keep(tails, tokens, scores, verified.logits.shape[-1])
            note_neighbors(self.near[0], depths, probs, tokens, scores, len(accepted.path))


@compiled
def note_last_ranking(last: Any, root: int, tokens: Array, scores: Array) -> None:
    """Store the top tokens of the logits from which ``root`` was chosen, except ``root`` itself."""
    last.count = last.ahead = count = 0
    last.tokens[0, :] = NO_CHAIN_TOKEN
    shares = np.exp(LAST_SHARPNESS * (scores - scores[0]))
    for rank in range(len(tokens)):
        if tokens[rank] == root or not np.isfinite(shares[rank]):
            shares[rank] = 0.0
    shares *= MILLION / max(MIN_SHARE_SUM, shares.sum())
    for rank in range(len(tokens)):
        if shares[rank] > 0 and count < MAX_PREDICTED_TOKENS:
            last.tokens[0, count], last.shares[0, count] = tokens[rank], int(shares[rank])
            last.count, count = 1, count + 1  # the record predicts one position


LAST_SOURCE = prediction_source(SourceId.LAST, 0, Prior(1, 0.7))


@compiled
def _recycled_at(records_at: int) -> Any:
    return record_at(records_at, RECYCLED_NUMBER, RECYCLED_TABLE)


def _find_recycled(records_at: int, node: int) -> int:
    work, table = work_at(records_at), _recycled_at(records_at)
    if table.max_key_tokens > 0:
        prefetch_rankings(table, work.tails[node, MAX_MATCH_TOKENS - 1], work.suffix_hashes)
    return table.max_key_tokens if table.max_key_tokens > 1 else -1


def _find_single(records_at: int, node: int) -> int:
    return 1 if _recycled_at(records_at).max_key_tokens == 1 else -1


def _weigh_recycled(records_at: int, node: int, order: int, first: int, left: float) -> float:
    """Add the target's latest ranking after the node's last ``order`` tokens; return the probability that is left."""
    work, table = work_at(records_at), _recycled_at(records_at)
    row = kept_row(table, work.tails[node, MAX_MATCH_TOKENS - 1], work.suffix_hashes[order], order)
    if row < 0:
        return left
    kept = rankings_of(table)[row]
    bucket = share_bucket(kept.shares[0], SHARE_UNIT)
    return contribute(
        records_at, RECYCLED_NUMBER, first + order - 1, kept.tokens, kept.shares, SHARE_UNIT, bucket, left
    )


@compiled
def near_at(records_at: int) -> Any:
    return record_at(records_at, NEAR_AT, PREDICTION_RECORD)


def _move_recycled(records_at: int, token: int, emitted: int) -> None:
    advance_record(near_at(records_at), token)


RECYCLED_SOURCE = CompiledSource(
    SourceId.RECYCLED, 1, Prior(MAX_KEY_TOKENS, 0.9, 0.9), _find_recycled, _weigh_recycled, _move_recycled
)  # fmt: skip
SINGLE_TOKEN_SOURCE = RECYCLED_SOURCE._replace(find=_find_single)
"""The source of known rankings that are never replaced; listed after the sources that count n-grams in texts."""


@compiled
def note_neighbors(near: Any, depths: Array, probs: Array, tokens: Array, scores: Array, passed: int) -> None:
    """Store the rankings at rejected nodes by position; ``passed`` is the number of accepted nodes.

    ``depths``, ``probs``, ``tokens`` and ``scores`` have a row for the root and for each node. All nodes at the depth
    of the bonus token or deeper were rejected. Their rankings add no candidates, but raise the probability of
    candidates from other sources.
    """
    near.count = near.ahead = 0
    near.tokens[:] = NO_CHAIN_TOKEN
    shares, sums = np.zeros((MAX_PLUGIN_POSITIONS, MAX_NEIGHBOR_TOKENS)), np.zeros(MAX_PLUGIN_POSITIONS)
    for node in range(1, len(tokens)):
        position = depths[node] - passed - 1
        if 0 <= position < MAX_PLUGIN_POSITIONS and np.isfinite(scores[node, 0]):
            chances = np.exp(NEAR_SHARPNESS * (scores[node] - scores[node, 0]))
            chances *= probs[node] / chances.sum()
            sums[position] += probs[node]
            near.count = max(near.count, position + 1)
            for rank in range(len(chances)):
                index = _rank_of(near.tokens[position], tokens[node, rank])
                if index < MAX_NEIGHBOR_TOKENS and chances[rank] > 0:
                    near.tokens[position, index] = tokens[node, rank]
                    shares[position, index] += chances[rank]
    for position in range(near.count):
        for index in range(MAX_NEIGHBOR_TOKENS if sums[position] > 0 else 0):
            near.shares[position, index] = int(MILLION * (shares[position, index] / sums[position]))


@compiled
def _rank_of(named: Array, token: int) -> int:
    """Return the index of a token in the padded list ``named`` or, if absent, the list's length without padding."""
    index = 0
    while index < MAX_NEIGHBOR_TOKENS and named[index] != token and named[index] != NO_CHAIN_TOKEN:
        index += 1
    return index


@compiled
def weigh_agreement(work: Any, near: Any, position: int) -> None:
    """Raise the probabilities of candidates in the neighboring ranking at ``position``; preserve the total."""
    before = total_probability(work)
    for rank in range(_rank_of(near.tokens[position], NO_CHAIN_TOKEN)):
        index, kind = candidate_index(work, near.tokens[position, rank]), 0
        while kind < len(AGREEMENT) - 1 and near.shares[position, rank] << (kind + 1) <= MILLION:
            kind += 1
        if index >= 0:
            work.chances[index] *= AGREEMENT[kind]
    rescale(work, before)
