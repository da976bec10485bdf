"""The logits of a step, as far as a recording has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from hdtool.data.conversations.rankings import Rankings
from hdtool.runtime.evaluation.recorded_turns import RecordedTurn
from hdtool.runtime.tree import LARGEST_TREE


class RecordedLogits:
    """A row for the root and for each node; minus infinity for all tokens and nodes that were not recorded."""

    def __init__(self, turns: Iterable[RecordedTurn]) -> None:
        """Has room for the tokens of these turns."""
        self._vocabulary = 1 + max(
            (int(max(*turn.prompt, *turn.answer, turn.rankings.tokens.max())) for turn in turns if turn.rankings),
            default=0,
        )
        self._logits = torch.full((1 + LARGEST_TREE, self._vocabulary), -torch.inf)
        self._rows = self._logits.numpy()
        self._filled = 0

    def after(self, rankings: Rankings, done: int, path: Sequence[int], nodes: int) -> torch.Tensor:
        """Those of a tree below ``done`` tokens of an answer, valid until the next call."""
        self._rows[: self._filled] = -torch.inf
        self._filled = 1 + nodes
        for place, row in enumerate([0, *(node + 1 for node in path)], done):
            self._rows[row, rankings.tokens[place]] = rankings.logprobs[place]
        return self._logits[: self._filled]
