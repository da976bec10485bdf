"""Rankings from the logits of each pass: top-k once, for the last logit, recycled and neighboring rankings."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from hdtool.runtime.accept import Accepted
from hdtool.runtime.drafters.hierarchy.sources.last_logits import LAST, MOST_CANDIDATES, remember
from hdtool.runtime.drafters.hierarchy.sources.neighbor_rankings import NEIGHBOURS, look_round
from hdtool.runtime.drafters.hierarchy.sources.recycled_rankings import BEST, Recycled
from hdtool.runtime.kernels.compiled import Array
from hdtool.runtime.kernels.memory.no_copy import Pinned
from hdtool.runtime.kernels.topk import NO_LOGIT, topk
from hdtool.runtime.verified import Verified


class RankedNodes(NamedTuple):
    """The nodes of the rows of logits, the root first."""

    tails: Array
    """The last tokens down to each node."""
    depths: Array
    probs: Array


class Rankings(Pinned):
    """The last logit and the rankings recycled from all nodes, as far as they are in use."""

    def __init__(self, *, last: bool = False, recycled: bool = False, known: Array | None = None) -> None:
        """``known`` are rankings of single tokens that are there from the first step on."""
        self._last = np.zeros(1, LAST)
        self._recycled = Recycled()
        self._near = np.zeros(1, NEIGHBOURS)
        self._uses_last, self._uses_recycled = last, recycled
        self.uses_logits = last or recycled
        self.memories = self._last, self._recycled.memory, self._near
        self._known = known
        self.forget()
        if self.uses_logits:
            self._compile()

    def forget(self) -> None:
        """Drop what was ranked in earlier answers; known rankings stay."""
        self._recycled.forget()
        if self._known is not None:
            self._recycled.begin_with(self._known, recycles=self._uses_recycled)

    def _compile(self) -> None:
        """Compile everything, or load it from the cache, before a step needs it."""
        tokens, scores = topk(torch.full((1, 1), NO_LOGIT), 1)
        remember(self._last, 0, tokens[0], scores[0])
        look_round(self._near, np.zeros(1, np.int64), np.ones(1), tokens, scores, 0)

    def observe(self, accepted: Accepted, verified: Verified, nodes: RankedNodes | None) -> None:
        """Read the rows of logits of the root and each node; without ``nodes``, only that of the last accepted one."""
        if not len(verified):
            return
        rankable = verified.rankable()
        if self._uses_last:
            row = accepted.path[-1] + 1 if accepted.path else 0
            tokens, scores = topk(rankable[row : row + 1], MOST_CANDIDATES + 1)
            remember(self._last, accepted.tokens[-1], tokens[0], scores[0])
        if self._uses_recycled and nodes is not None:
            tokens, scores = topk(rankable, BEST)
            self._recycled.keep(nodes.tails, tokens, scores, verified.logits.shape[-1])
            look_round(self._near, nodes.depths, nodes.probs, tokens, scores, len(accepted.path))
