"""SAM-Decoding (Hu et al., 2024) on the conversation alone: what followed the first place of the longest match."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from hdtool.runtime.accept import Accepted
from hdtool.runtime.budget.node_budget import Budget, FixedBudget
from hdtool.runtime.drafters.published.suffix_automaton import LAST, START, TOKENS, SuffixAutomaton
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.tree import LARGEST_TREE, ROOT, DraftTree
from hdtool.runtime.verified import Verified

TOKENS_AHEAD = 40
"""Tokens of a draft."""
PRIOR_RATE, PRIOR_WEIGHT, EMA_WINDOW = 0.6, 10.0, 200.0
"""The rate of acceptance that the measured one begins with, its weight, and the window of the average in tokens."""


class SamDecoding:
    """Drafts one chain. Its tokens are equally probable, given the one before."""

    def __init__(self, budget: Budget | None = None) -> None:
        self.seconds: dict[SourceName, float] = {SourceName.CONTEXT: 0.0}
        """Seconds spent in the source since the drafter was made."""
        self._budget = budget or FixedBudget(LARGEST_TREE)
        self._automaton = SuffixAutomaton()
        self._parents = np.arange(TOKENS_AHEAD, dtype=np.int32) + np.int32(ROOT)
        self._sources = np.full(TOKENS_AHEAD, SourceName.CONTEXT, np.uint8)
        self._verified, self._accepted = PRIOR_WEIGHT, PRIOR_WEIGHT * PRIOR_RATE
        self._drafted = 0

    def begin(self, prompt: Sequence[int]) -> None:
        self._automaton.clear()
        self._automaton.extend(prompt)
        self._drafted = 0

    def draft(self, context: Sequence[int]) -> DraftTree:
        started = time.perf_counter()
        automaton = self._automaton.arrays
        # The whole context occurs once; its link is the longest suffix that occurred before.
        match = automaton.links[automaton.sizes[LAST]]
        start = int(automaton.ends[match]) if match > START else int(automaton.sizes[TOKENS])
        most = min(TOKENS_AHEAD, self._budget.most, int(automaton.sizes[TOKENS]) - start)
        kept = self._budget.nodes((self._accepted / self._verified) ** np.arange(1, most + 1)) if most else 0
        tokens = automaton.tokens[start : start + kept].astype(np.int64)
        self._drafted = kept
        self.seconds[SourceName.CONTEXT] += time.perf_counter() - started
        return DraftTree(context[-1], tokens, self._parents[:kept], self._sources[:kept])

    def observe(self, accepted: Accepted, verified: Verified) -> None:
        started = time.perf_counter()
        if self._drafted:
            compared = min(self._drafted, len(accepted.path) + 1)
            fading = min(1.0, EMA_WINDOW / self._verified)
            self._verified = self._verified * fading + compared
            self._accepted = self._accepted * fading + len(accepted.path)
        self._automaton.extend(accepted.tokens)
        self.seconds[SourceName.CONTEXT] += time.perf_counter() - started
