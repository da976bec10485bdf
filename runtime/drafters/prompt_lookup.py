"""Prompt lookup decoding (Saxena, 2023): drafts the tokens after an earlier occurrence of the last few tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from hdtool.runtime.accept import Accepted
from hdtool.runtime.drafters.growing_context import GrowingContext
from hdtool.runtime.kernels.compiled import Ints, compiled
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.tree import ROOT, DraftTree
from hdtool.runtime.verified import Verified


class PromptLookup:
    """Drafts one chain, as ``prompt_lookup_num_tokens`` of transformers does.

    The longest match of at most ``longest`` tokens is used; of equal ones the first.
    """

    def __init__(self, tokens: int = 10, longest: int = 3) -> None:
        self.seconds: dict[SourceName, float] = {SourceName.CONTEXT: 0.0}
        """Seconds spent in the source since the drafter was made."""
        self._longest = longest
        self._parents = np.arange(tokens, dtype=np.int32) + np.int32(ROOT)
        self._sources = np.full(tokens, SourceName.CONTEXT, np.uint8)
        self._context = GrowingContext()
        first_match(self._context.grown(()), longest)  # compiles or loads it, so that no step waits for it

    def begin(self, prompt: Sequence[int]) -> None:
        self._context.restart(prompt)

    def draft(self, context: Sequence[int]) -> DraftTree:
        started = time.perf_counter()
        tokens_so_far = self._context.grown(context)
        start = first_match(tokens_so_far, self._longest)
        # Copied, because the buffer is overwritten.
        tokens = tokens_so_far[start : start + len(self._parents)].copy()
        tree = DraftTree(context[-1], tokens, self._parents[: len(tokens)], self._sources[: len(tokens)])
        self.seconds[SourceName.CONTEXT] += time.perf_counter() - started
        return tree

    def observe(self, accepted: Accepted, verified: Verified) -> None:
        pass


@compiled
def first_match(context: Ints, longest: int) -> int:
    """The index after the first of the longest matches of the context's end; the length if there is none."""
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
    return start
