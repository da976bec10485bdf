"""What the target ranked highest, heard from the logits of each pass: three sources in one reading."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hdtool.runtime.accept import Accepted
from hdtool.runtime.drafters.hierarchy.sources.last_logits import LAST, MOST_CANDIDATES, remember
from hdtool.runtime.drafters.hierarchy.sources.neighbor_rankings import NEIGHBOURS, look_round
from hdtool.runtime.drafters.hierarchy.sources.recycled_rankings import BEST, Recycled
from hdtool.runtime.kernels.no_copy import Pinned
from hdtool.runtime.kernels.topk import NO_LOGIT, at_hand, ranked

Array = npt.NDArray[Any]


class RankedNodes(NamedTuple):
    """What rows of logits stand behind, the root's first."""

    tails: Array
    """The last tokens down to each node."""
    depths: Array
    probs: Array


class Rankings(Pinned):
    """The last logit, the logits copied from accepted nodes and those recycled from all nodes, as far as wanted."""

    def __init__(self, *, last: bool = False, copied: bool = False, recycled: bool = False) -> None:
        self._last = np.zeros(1, LAST)
        self._copied = Recycled() if copied else None
        self._recycled = Recycled() if recycled else None
        self._near = np.zeros(1, NEIGHBOURS)
        self._wants_last = last
        unused = Recycled().memory
        self.memories = (
            self._last,
            self._copied.memory if self._copied else unused,
            self._recycled.memory if self._recycled else unused,
            self._near,
        )
        if last or copied or recycled:
            self._compile()

    def _compile(self) -> None:
        """Have everything compiled, or loaded, before a step waits for it."""
        tokens, scores = ranked(torch.full((1, 1), NO_LOGIT), 1)
        remember(self._last, 0, tokens[0], scores[0])
        look_round(self._near, np.zeros(1, np.int64), np.ones(1), tokens, scores, 0)

    def hear(self, accepted: Accepted, logits: torch.Tensor, behind: RankedNodes | None) -> None:
        """Take in a pass: a row of logits for the root and each node.

        Where nobody knows what they stand behind, only the last one accepted is of use.
        """
        if not len(logits) or not (self._wants_last or self._copied or self._recycled):
            return
        rankable = at_hand(logits)
        rows = [0, *(node + 1 for node in accepted.path)]
        if self._wants_last:
            tokens, scores = ranked(rankable[rows[-1] : rows[-1] + 1], MOST_CANDIDATES + 1)
            remember(self._last, accepted.tokens[-1], tokens[0], scores[0])
        if behind is None:
            return
        vocabulary = logits.shape[-1]
        if self._recycled:
            tokens, scores = ranked(rankable, BEST)
            self._recycled.keep(behind.tails, tokens, scores, vocabulary)
            look_round(self._near, behind.depths, behind.probs, tokens, scores, len(accepted.path))
            if self._copied:
                self._copied.keep(behind.tails[rows], tokens[rows], scores[rows], vocabulary)
        elif self._copied:
            tokens, scores = ranked(rankable[rows], BEST)
            self._copied.keep(behind.tails[rows], tokens, scores, vocabulary)
