"""What the target ranked highest, heard from the logits of each pass: three sources in one reading."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hdtool.runtime.accept import Accepted
from hdtool.runtime.likeliest import NO_LOGIT, ranked
from hdtool.runtime.sources.last_logit import LAST, MOST_CANDIDATES, remember
from hdtool.runtime.sources.recycled import BEST, Recycled

Array = npt.NDArray[Any]


class Rankings:
    """The last logit, the logits copied from accepted nodes and those recycled from all nodes, as far as wanted."""

    def __init__(self, *, last: bool = False, copied: bool = False, recycled: bool = False) -> None:
        self._last = np.zeros(1, LAST)
        self._copied = Recycled() if copied else None
        self._recycled = Recycled() if recycled else None
        self._wants_last = last
        unused = Recycled().memory
        self.memories = (
            self._last,
            self._copied.memory if self._copied else unused,
            self._recycled.memory if self._recycled else unused,
        )
        if last:
            # Compiled, or loaded, before a step waits for it.
            tokens, scores = ranked(torch.full((1, 1), NO_LOGIT), 1)
            remember(self._last, 0, tokens[0], scores[0])

    def hear(self, accepted: Accepted, logits: torch.Tensor, tails: Array | None) -> None:
        """Take in a pass: a row of logits for the root and each node, of ``tails`` the last tokens down to each.

        Without ``tails`` nobody knows what the rows stand behind, and only the last one accepted is of use.
        """
        if not len(logits):
            return
        rows = [0, *(node + 1 for node in accepted.path)]
        if self._wants_last:
            tokens, scores = ranked(logits[rows[-1] : rows[-1] + 1], MOST_CANDIDATES + 1)
            remember(self._last, accepted.tokens[-1], tokens[0], scores[0])
        if tails is None:
            return
        vocabulary = logits.shape[-1]
        if self._recycled:
            tokens, scores = ranked(logits, BEST)
            self._recycled.keep(tails, tokens, scores, vocabulary)
            if self._copied:
                self._copied.keep(tails[rows], tokens[rows], scores[rows], vocabulary)
        elif self._copied:
            tokens, scores = ranked(logits[rows], BEST)
            self._copied.keep(tails[rows], tokens, scores, vocabulary)
