"""What the target itself ranked highest, heard from the logits of each pass: three sources in one reading."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hdtool.runtime.accept import Accepted
from hdtool.runtime.likeliest import ranked
from hdtool.runtime.sources.last_logit import LAST, MOST_CANDIDATES, remember
from hdtool.runtime.sources.recycled import BEST, Recycled

Array = npt.NDArray[Any]


class Rankings:
    def __init__(self, last: bool, copied: int, recycled: int) -> None:
        self._last = np.zeros(1, LAST) 
        self._takes_last = last
        self._copied, self._recycled = Recycled(copied), Recycled(recycled)
        self._c, self._r = copied, recycled
        self.memories = self._recycled.memory, self._copied.memory, self._last

    def hear(self, accepted: Accepted, logits: torch.Tensor, tails: Array | None) -> None:
        if not len(logits) : return
        rows = [0, *(node + 1 for node in accepted.path)]
        if self._takes_last:
            tokens, scores = ranked(logits[rows[-1]:rows[-1]+1], MOST_CANDIDATES + 1)
            remember(self._last, accepted.tokens[-1], tokens[0], scores[0])
        if tails is None: return
        if self._r:
            tokens, scores = ranked(logits, BEST)
            self._recycled.keep(tails, tokens, scores, logits.shape[1])
            if self._c: self._copied.keep(tails[rows], tokens[rows], scores[rows], logits.shape[1])
        elif self._c:
            tokens, scores = ranked(logits[rows], BEST)
            self._copied.keep(tails[rows], tokens, scores, logits.shape[1])
