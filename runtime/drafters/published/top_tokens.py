"""The tokens that the target ranked highest after each token of the vocabulary, when it last read that token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hdtool.runtime.kernels.topk import topk
from hdtool.runtime.tree import DraftTree
from hdtool.runtime.verified import Verified

BEST = 8
"""Tokens that are kept for each."""
NONE = -1


class TopTokens:
    """A row for each token of the vocabulary; memory is allocated when the first logits arrive."""

    def __init__(self) -> None:
        self.rows = np.empty((0, BEST), np.int64)
        """Best first; ``NONE`` where nothing is known."""
        topk(torch.zeros(1, 1), BEST)  # compiles it, or loads it

    def clear(self) -> None:
        self.rows[:] = NONE

    def keep(self, tree: DraftTree, verified: Verified) -> None:
        """Keep the rankings after the root and each node of a verified tree."""
        vocabulary = verified.logits.shape[-1]
        if len(self.rows) < vocabulary:
            self.rows = np.full((vocabulary, BEST), NONE)
        tokens, scores = verified.topk(BEST)
        known = np.isfinite(scores[:, 0])  # a recording has no rankings after rejected nodes
        read = np.array(tree.all_tokens)
        known &= (read >= 0) & (read < len(self.rows))
        self.rows[read[known]] = np.where(np.isfinite(scores[known]), tokens[known], NONE)


class Conversation:
    """Whether a prompt continues the conversation of the prompt before."""

    def __init__(self) -> None:
        self._prompt: list[int] = []

    def continues(self, prompt: Sequence[int]) -> bool:
        before, self._prompt = self._prompt, list(prompt)
        return bool(before) and self._prompt[: len(before)] == before
