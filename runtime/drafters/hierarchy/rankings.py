"""Sources made from the target's logits: the last logit, recycled rankings, and rankings of neighboring positions.

The tokens that the target ranked high in place of the root are often the next ones (LogitSpec). All nodes of a tree,
accepted or not, give rankings that are kept by the last tokens before them (as Token Recycling does). And rankings at
rejected nodes tell of the same position after other tokens: a wrong token seldom changes everything after it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hdtool.runtime.accept import Accepted
from hdtool.runtime.drafters.hierarchy.candidates import (
    NEAR_AT,
    Prior,
    Source,
    bucket_of_share,
    contribute,
    index_of,
    record_at,
    rescale,
    whole,
    work_at,
)
from hdtool.runtime.drafters.hierarchy.evidence import (
    BEST_PREDICTED,
    LONGEST_CHAIN,
    MILLION,
    NO_TOKEN,
    PREDICTED,
    follow,
    predicted_by,
    predicting,
)
from hdtool.runtime.engine import Verified
from hdtool.runtime.kernels.compiled import Array, Uncopyable, compiled
from hdtool.runtime.kernels.topk import NO_LOGIT, topk
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.stores.live_tables import (
    BEST,
    LONGEST_NODE,
    RECYCLED_TABLE,
    WHOLE,
    RecycledRankings,
    fetch,
    kept_row,
    rankings_of,
)
from hdtool.runtime.stores.token_log import LONGEST_MATCH

NAMED = 32
"""The most tokens of a neighboring ranking; those of probable nodes come first."""
AGREEMENT = (13.0, 9.0, 6.0, 4.0, 3.0, 2.0, 1.5, 1.3)
"""Gains of candidates that a neighboring ranking holds with a share of a half or more, a quarter or more, and so on."""
LEAST_SUM = 1e-9
LAST_SHARPNESS, NEAR_SHARPNESS = 0.5, 0.7
"""Shares are of probabilities raised to these powers."""
OF_RECYCLED = SourceName.RECYCLED.value

RankedNodes = tuple[Array, Array, Array]
"""The last tokens down to each node that has a row of logits, the root first; their depths; their probabilities."""


class Rankings(Uncopyable):
    """The records of these sources, as far as they are in use; rankings are selected once for all of them."""

    def __init__(self, *, last: bool = False, recycled: bool = False, known: Array | None = None) -> None:
        """``known`` are rankings of single tokens that are there from the first step on."""
        self.last, self.near = predicted_by([SourceName.LAST]), predicted_by([SourceName.RECYCLED])
        self.recycled = RecycledRankings()
        self._uses_last, self._uses_recycled = last, recycled
        self.uses_logits, self.is_kept = last or recycled, recycled or known is not None
        self._known = known
        self.forget()
        if self.uses_logits:  # compiled, or loaded from the cache, before a step needs it
            tokens, scores = topk(torch.full((1, 1), NO_LOGIT), 1)
            remember(self.last[0], 0, tokens[0], scores[0])
            look_round(self.near[0], np.zeros(1, np.int64), np.ones(1), tokens, scores, 0)

    @property
    def most_ranked(self) -> int:
        """Tokens of a row's ranking that are read."""
        return BEST_PREDICTED + 1 if self._uses_last else BEST * self._uses_recycled

    def forget(self) -> None:
        """Drop what was ranked in earlier answers; known rankings stay."""
        self.recycled.clear()
        if self._known is not None:
            self.recycled.begin_with(self._known, alone=not self._uses_recycled)

    def observe(self, accepted: Accepted, verified: Verified, nodes: RankedNodes | None) -> None:
        """Read the rows of logits of the root and each node; without ``nodes``, only that of the last accepted one."""
        if not len(verified):
            return
        if self._uses_last:
            row = accepted.path[-1] + 1 if accepted.path else 0
            tokens, scores = verified.topk(BEST_PREDICTED + 1, slice(row, row + 1))
            remember(self.last[0], accepted.tokens[-1], tokens[0], scores[0])
        if self._uses_recycled and nodes is not None:
            tails, depths, probs = nodes
            tokens, scores = verified.topk(BEST)
            self.recycled.keep(tails, tokens, scores, verified.logits.shape[-1])
            look_round(self.near[0], depths, probs, tokens, scores, len(accepted.path))


@compiled
def remember(last: Any, root: int, tokens: Array, scores: Array) -> None:
    """Store the top tokens that the root was chosen from, by their logits, without the root itself."""
    last.count = last.ahead = count = 0
    last.tokens[0, :] = NO_TOKEN
    shares = np.exp(LAST_SHARPNESS * (scores - scores[0]))
    for place in range(len(tokens)):
        if tokens[place] == root or not np.isfinite(shares[place]):
            shares[place] = 0.0
    shares *= MILLION / max(LEAST_SUM, shares.sum())
    for place in range(len(tokens)):
        if shares[place] > 0 and count < BEST_PREDICTED:
            last.tokens[0, count], last.shares[0, count] = tokens[place], int(shares[place])
            last.count, count = 1, count + 1  # one position


LAST = predicting(SourceName.LAST, 0, Prior(1, 0.7))


@compiled
def _recycled_at(at: int) -> Any:
    return record_at(at, OF_RECYCLED, RECYCLED_TABLE)


def _find_recycled(at: int, node: int) -> int:
    work, table = work_at(at), _recycled_at(at)
    if table.longest > 0:
        fetch(table, work.tails[node, LONGEST_MATCH - 1], work.marks)
    return table.longest if table.longest > 1 else -1


def _find_single(at: int, node: int) -> int:
    return 1 if _recycled_at(at).longest == 1 else -1


def _weigh_recycled(at: int, node: int, order: int, first: int, left: float) -> float:
    """Add the ranking that the target last gave after the same tokens."""
    work, table = work_at(at), _recycled_at(at)
    row = kept_row(table, work.tails[node, LONGEST_MATCH - 1], work.marks[order], order)
    if row < 0:
        return left
    kept = rankings_of(table)[row]
    bucket = bucket_of_share(kept.shares[0], WHOLE)
    return contribute(at, OF_RECYCLED, first + order - 1, kept.tokens, kept.shares, WHOLE, bucket, left)


@compiled
def near_at(at: int) -> Any:
    return record_at(at, NEAR_AT, PREDICTED)


def _move_recycled(at: int, token: int, emitted: int) -> None:
    follow(near_at(at), token)


RECYCLED = Source(
    SourceName.RECYCLED, 1, Prior(LONGEST_NODE, 0.9, 0.9), _find_recycled, _weigh_recycled, _move_recycled
)  # fmt: skip
SINGLE = RECYCLED._replace(find=_find_single)
"""Rankings of single tokens that nothing replaces count less than what followed the token in texts."""


@compiled
def look_round(near: Any, depths: Array, probs: Array, tokens: Array, scores: Array, passed: int) -> None:
    """Store the rankings of nodes with these depths and probabilities, the root first; ``passed`` were accepted.

    All nodes at the depth of the bonus token or deeper were rejected. Their rankings add no candidates: the probability
    of a candidate of other sources rises where they hold it.
    """
    near.count = near.ahead = 0
    near.tokens[:] = NO_TOKEN
    shares, sums = np.zeros((LONGEST_CHAIN, NAMED)), np.zeros(LONGEST_CHAIN)
    for node in range(1, len(tokens)):
        place = depths[node] - passed - 1
        if 0 <= place < LONGEST_CHAIN and np.isfinite(scores[node, 0]):
            chances = np.exp(NEAR_SHARPNESS * (scores[node] - scores[node, 0]))
            chances *= probs[node] / chances.sum()
            sums[place] += probs[node]
            near.count = max(near.count, place + 1)
            for rank in range(len(chances)):
                at = _rank_of(near.tokens[place], tokens[node, rank])
                if at < NAMED and chances[rank] > 0:
                    near.tokens[place, at] = tokens[node, rank]
                    shares[place, at] += chances[rank]
    for place in range(near.count):
        for at in range(NAMED if sums[place] > 0 else 0):
            near.shares[place, at] = int(MILLION * (shares[place, at] / sums[place]))


@compiled
def _rank_of(named: Array, token: int) -> int:
    """Where a token is among those of a position, or the place after them."""
    at = 0
    while at < NAMED and named[at] != token and named[at] != NO_TOKEN:
        at += 1
    return at


@compiled
def agree(work: Any, near: Any, place: int) -> None:
    """Multiply the probabilities of candidates that a ranking of their position holds, and keep the sum."""
    before = whole(work)
    for rank in range(_rank_of(near.tokens[place], NO_TOKEN)):
        at, kind = index_of(work, near.tokens[place, rank]), 0
        while kind < len(AGREEMENT) - 1 and near.shares[place, rank] << (kind + 1) <= MILLION:
            kind += 1
        if at >= 0:
            work.chances[at] *= AGREEMENT[kind]
    rescale(work, before)
