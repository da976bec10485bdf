"""Sources made from the target's logits: the last logit, recycled rankings, and rankings of neighboring positions.

The tokens that the target ranked high in place of the root are often the next ones (LogitSpec). All nodes of a tree,
accepted or not, give rankings that are kept by the last tokens before them (as Token Recycling does). And rankings at
rejected nodes tell of the same position after other tokens: a wrong token seldom changes everything after it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from hdtool.runtime.accept import Accepted
from hdtool.runtime.drafters.hierarchy.candidates import contribute, put
from hdtool.runtime.drafters.hierarchy.memory import DRAFTING, NEAR_AT, RESTART, Prior, Source, record_at, work_at
from hdtool.runtime.drafters.hierarchy.weights import FEW, KINDS, MANY, ONE, bucket_of_share, weights_at
from hdtool.runtime.kernels.compiled import Array, compiled
from hdtool.runtime.kernels.memory.no_copy import Pinned
from hdtool.runtime.kernels.topk import NO_LOGIT, topk
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.stores.history.log_search import LONGEST_MATCH
from hdtool.runtime.stores.recycled_rankings import (
    BEST,
    LONG_RUN,
    LONGEST_NODE,
    WHOLE,
    RecycledRankings,
    fetch,
    rankings_of,
    row_of,
    tag_of,
)
from hdtool.runtime.stores.recycled_rankings import TABLE as RECYCLED_TABLE
from hdtool.runtime.verified import Verified

MOST_CANDIDATES = 60
"""Candidates that the last logit gives at most."""
MOST_OF_THE_REST = 0.9
"""The candidates of the last logit get at most this part of the probability that is left in the end."""
PLACES = 8
"""Positions after the root that have neighboring rankings."""
NAMED = 32
"""The most tokens of such a position; those of probable nodes come first."""
NEAR_SHARPNESS = 0.7
OF_LAST, OF_RECYCLED = SourceName.LAST.value, SourceName.RECYCLED.value

LAST_RECORD = np.dtype(
    [
        ("count", np.int64),  # of candidates; 0 where the ranking of the root is missing
        ("tokens", np.int64, MOST_CANDIDATES),  # most probable first
        ("kinds", np.int64, MOST_CANDIDATES),
    ],
    align=True,
)
NEIGHBORS = np.dtype(
    [
        ("count", np.int64),  # of positions; 0 where there are none
        ("ahead", np.int64),  # tokens that were emitted since
        ("named", np.int64, PLACES),  # the number of tokens
        ("whole", np.float64, PLACES),  # the sum of the probabilities of all nodes there
        ("tokens", np.int64, (PLACES, NAMED)),
        ("shares", np.float64, (PLACES, NAMED)),
        ("kinds", np.int64, (PLACES, NAMED)),
    ],
    align=True,
)


class RankedNodes(NamedTuple):
    """The nodes of the rows of logits, the root first."""

    tails: Array
    """The last tokens down to each node."""
    depths: Array
    probs: Array


class Rankings(Pinned):
    """The records of these sources, as far as they are in use; rankings are selected once for all of them."""

    def __init__(self, *, last: bool = False, recycled: bool = False, known: Array | None = None) -> None:
        """``known`` are rankings of single tokens that are there from the first step on."""
        self.last, self.near, self.recycled = np.zeros(1, LAST_RECORD), np.zeros(1, NEIGHBORS), RecycledRankings()
        self._uses_last, self._uses_recycled = last, recycled
        self.uses_logits, self.is_kept = last or recycled, recycled or known is not None
        self._known = known
        self.forget()
        if self.uses_logits:  # compiled, or loaded from the cache, before a step needs it
            tokens, scores = topk(torch.full((1, 1), NO_LOGIT), 1)
            remember(self.last, 0, tokens[0], scores[0])
            look_round(self.near, np.zeros(1, np.int64), np.ones(1), tokens, scores, 0)

    def forget(self) -> None:
        """Drop what was ranked in earlier answers; known rankings stay."""
        self.recycled.clear()
        if self._known is not None:
            self.recycled.begin_with(self._known, alone=not self._uses_recycled)

    def observe(self, accepted: Accepted, verified: Verified, nodes: RankedNodes | None) -> None:
        """Read the rows of logits of the root and each node; without ``nodes``, only that of the last accepted one."""
        if not len(verified):
            return
        rankable = verified.rankable()
        if self._uses_last:
            row = accepted.path[-1] + 1 if accepted.path else 0
            tokens, scores = topk(rankable[row : row + 1], MOST_CANDIDATES + 1)
            remember(self.last, accepted.tokens[-1], tokens[0], scores[0])
        if self._uses_recycled and nodes is not None:
            tokens, scores = topk(rankable, BEST)
            self.recycled.keep(nodes.tails, tokens, scores, verified.logits.shape[-1])
            look_round(self.near, nodes.depths, nodes.probs, tokens, scores, len(accepted.path))


@compiled
def remember(memory: Array, root: int, tokens: Array, scores: Array) -> None:
    """Store the top tokens that the root was chosen from, and their logits, without the root itself."""
    last = memory[0]
    last.count = 0
    if not np.isfinite(scores[0]):
        return
    chances = np.exp(scores - scores[0])
    chances /= chances.sum()
    for place in range(len(tokens)):
        if tokens[place] != root and chances[place] > 0 and last.count < MOST_CANDIDATES:
            last.tokens[last.count] = tokens[place]
            last.kinds[last.count] = min(KINDS - 1, int(-np.log2(chances[place])))
            last.count += 1


@compiled
def last_at(at: int) -> Any:
    return record_at(at, OF_LAST, LAST_RECORD)


def _find_last(at: int, node: int) -> int:
    return 0 if node == 0 and last_at(at).count > 0 else -1


def _weigh_last(at: int, node: int, order: int, first: int, left: float) -> float:
    """Give each candidate of the last logit its part of what is left after all n-gram orders."""
    work, last, rates, whole = work_at(at), last_at(at), weights_at(at).rates, 0.0
    for place in range(last.count):
        whole += rates[last.kinds[place]]
    unit = left / max(1.0, whole / MOST_OF_THE_REST)
    work.last_open = left
    for place in range(last.count):
        token, kind = last.tokens[place], last.kinds[place]
        part = unit * rates[kind]
        if work.truth == DRAFTING:
            if part >= work.floor and 0 <= token < work.vocabulary:
                put(work, OF_LAST, token, part)
        elif token == work.truth:
            work.last_part, work.last_kind = part, kind
    return left


def _move_last(at: int, token: int, emitted: int) -> None:
    last_at(at).count = 0


LAST = Source(SourceName.LAST, 0, None, _find_last, _weigh_last, _move_last)


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
    row = row_of(table, work.tails[node, LONGEST_MATCH - 1], work.marks[order], order)
    if row < 0:
        return left
    kept = rankings_of(table)[row]
    if kept.shares[0] == 0 or kept.tag != tag_of(work.marks[order]):
        return left
    # How often the best token was the best takes the place of how far the evidence spreads.
    bucket = bucket_of_share(kept.shares[0], WHOLE, ONE if kept.run >= LONG_RUN else FEW if kept.run > 0 else MANY)
    return contribute(at, OF_RECYCLED, first + order - 1, kept.tokens, kept.shares, WHOLE, bucket, left)


@compiled
def near_at(at: int) -> Any:
    return record_at(at, NEAR_AT, NEIGHBORS)


def _move_recycled(at: int, token: int, emitted: int) -> None:
    near = near_at(at)
    near.ahead += 1
    if token == RESTART:
        near.count = 0


RECYCLED = Source(
    SourceName.RECYCLED, 1, Prior(LONGEST_NODE, 0.9, 0.9, 0.3, 0.3), _find_recycled, _weigh_recycled, _move_recycled
)  # fmt: skip
SINGLE = RECYCLED._replace(find=_find_single)
"""Rankings of single tokens that nothing replaces count less than what followed the token in texts."""


@compiled
def look_round(memory: Array, depths: Array, probs: Array, tokens: Array, scores: Array, passed: int) -> None:
    """Store the rankings of nodes with these depths and probabilities, the root first; ``passed`` were accepted.

    All nodes at the depth of the bonus token or deeper were rejected. Their rankings add no candidates: the probability
    of a candidate of other sources rises where they hold it.
    """
    near = memory[0]
    near.count = near.ahead = 0
    near.named[:], near.whole[:] = 0, 0.0
    chances = np.empty(tokens.shape[1])
    for node in range(1, len(tokens)):
        place = depths[node] - passed - 1
        if not 0 <= place < PLACES or not np.isfinite(scores[node, 0]):
            continue
        chances[:] = np.exp(NEAR_SHARPNESS * (scores[node] - scores[node, 0]))
        chances *= probs[node] / chances.sum()
        near.whole[place] += probs[node]
        near.count = max(near.count, place + 1)
        for rank in range(len(chances)):
            _name(near, place, tokens[node, rank], chances[rank])
    for place in range(near.count):
        for at in range(near.named[place]):
            share = near.shares[place, at] / near.whole[place]
            near.kinds[place, at] = min(KINDS - 1, int(-np.log2(share)))


@compiled
def _name(near: Any, place: int, token: int, part: float) -> None:
    """Add to the share of a token."""
    if part <= 0:
        return
    for at in range(near.named[place]):
        if near.tokens[place, at] == token:
            near.shares[place, at] += part
            return
    if near.named[place] < NAMED:
        at = near.named[place]
        near.tokens[place, at], near.shares[place, at] = token, part
        near.named[place] += 1
