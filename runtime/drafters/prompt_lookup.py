"""Prompt lookup decoding (Saxena, 2023): drafts the tokens after an earlier occurrence of the last few tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from hdtool.runtime.accept import Accepted
from hdtool.runtime.budget.node_budget import Budget, FixedBudget
from hdtool.runtime.drafters.growing_context import GrowingContext
from hdtool.runtime.kernels.compiled import Ints, compiled
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.tree import LARGEST_TREE, ROOT, DraftTree
from hdtool.runtime.verified import Verified

PRIOR_RATE, PRIOR_WEIGHT, EMA_WINDOW = 0.6, 10.0, 200.0
"""The rate of acceptance that measured ones begin with, its weight, and the window of their averages in tokens."""


class PromptLookup:
    """Drafts one chain, as ``prompt_lookup_num_tokens`` of transformers does, of the tokens that the budget takes.

    The longest match of at most ``longest`` tokens is used; of equal ones the first. How probable a token is follows
    from the length of the match before it, the earlier tokens of the chain included, by what was accepted so far.
    """

    def __init__(self, tokens: int = 10, longest: int = 3, budget: Budget | None = None) -> None:
        self.seconds: dict[SourceName, float] = {SourceName.CONTEXT: 0.0}
        """Seconds spent in the source since the drafter was made."""
        self._longest = longest
        self._budget = budget or FixedBudget(LARGEST_TREE)
        self._parents = np.arange(tokens, dtype=np.int32) + np.int32(ROOT)
        self._sources = np.full(tokens, SourceName.CONTEXT, np.uint8)
        self._context = GrowingContext()
        self._seen = np.full(longest + tokens, PRIOR_WEIGHT)
        """Tokens that were compared with the answer, by the length of the match before them, and those that fitted."""
        self._fitted = self._seen * PRIOR_RATE
        self._found: Ints = np.empty(0, np.int64)
        """The tokens after the last match, whether they were drafted or not."""
        self._matched = 0
        first_match(self._context.grown(()), longest)  # compiles or loads it, so that no step waits for it

    def begin(self, prompt: Sequence[int]) -> None:
        self._context.restart(prompt)
        self._found = self._found[:0]

    def draft(self, context: Sequence[int]) -> DraftTree:
        started = time.perf_counter()
        tokens_so_far = self._context.grown(context)
        start, self._matched = first_match(tokens_so_far, self._longest)
        # Copied, because the buffer is overwritten.
        self._found = tokens_so_far[start : start + len(self._parents)].copy()
        most = min(len(self._found), self._budget.most)
        kept = 0
        if most:
            following = slice(self._matched, self._matched + most)
            kept = self._budget.nodes(np.cumprod(self._fitted[following] / self._seen[following]))
        tree = DraftTree(context[-1], self._found[:kept], self._parents[:kept], self._sources[:kept])
        self.seconds[SourceName.CONTEXT] += time.perf_counter() - started
        return tree

    def observe(self, accepted: Accepted, verified: Verified) -> None:
        """Learn from the answer, which shows what would have been accepted of tokens that were not sent, too."""
        for place, (found, token) in enumerate(zip(self._found.tolist(), accepted.tokens, strict=False)):
            length = self._matched + place
            fading = min(1.0, EMA_WINDOW / self._seen[length])
            self._seen[length] = self._seen[length] * fading + 1
            self._fitted[length] = self._fitted[length] * fading + (found == token)
            if found != token:
                break


@compiled
def first_match(context: Ints, longest: int) -> tuple[int, int]:
    """The index after the first of the longest matches of the context's end, and the length of that match.

    Without a match, the length of the context and 0.
    """
    size = len(context)
    start, matched = size, 0
    for end in range(size - 1):
        if context[end] == context[size - 1]:
            length = 1
            while length < min(longest, end + 1) and context[end - length] == context[size - 1 - length]:
                length += 1
            if length > matched:
                start, matched = end + 1, length
                if matched == longest:
                    break
    return start, matched
