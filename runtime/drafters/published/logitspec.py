"""LogitSpec (Liu et al., 2025): the last logits guide a look-up in the context.

The top-k tokens of the logits from which the root was chosen are candidates for the token after it. Each candidate is
looked up in the context as the token after the root, and the longest match is used. Higher-ranked candidates get longer
continuations. The budget prunes the resulting tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hdtool.runtime.budget.budgeted_drafter import KindsDrafter
from hdtool.runtime.budget.node_budget import Budget
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.core.tree import LARGEST_TREE, NO_TOKEN, ROOT, DraftTree, Trie
from hdtool.runtime.drafters.published.lookup_methods import GrowingContext
from hdtool.runtime.kernels.compiled import Ints, compiled
from hdtool.runtime.settings.draft_sources import SourceId

UNRANKED = -1
MAX_MATCH = 3
"""Longest match in tokens, including the candidate."""
CONTINUATION_LENGTH = 20
"""Number of tokens in the continuation of the root."""
MAX_RANKED_CANDIDATES = 60
"""Maximum number of candidates taken from the last logits."""
DEPTHS = ((8, 4), (32, 3), (MAX_RANKED_CANDIDATES, 1))
"""Pairs ``(rank, length)``: the first 8 candidates start sequences of 4 tokens, further candidates up to rank 32 start
sequences of 3, and all lower-ranked candidates stay alone."""
PRIOR_RATES = (0.2, 0.4, 0.6, 0.02, 0.01, 0.003)
"""Initial acceptance rates by kind of node: continuations of the root after a match of 1, 2 or 3 tokens, then
candidates and their continuations by group of ranks."""
CANDIDATE_KINDS = MAX_MATCH
"""Kind of the first group of candidates."""


class LogitSpec(KindsDrafter):
    """Drafts only from the last logits and the conversation."""

    max_ranked = MAX_RANKED_CANDIDATES + 1

    def __init__(self, budget: Budget | None = None) -> None:
        super().__init__(budget, PRIOR_RATES, SourceId.LAST)
        self._trie = Trie(LARGEST_TREE)
        self._context = GrowingContext()
        self._candidates = np.empty(0, np.int64)
        groups = [
            next(group for group, (end, _) in enumerate(DEPTHS) if rank < end) for rank in range(MAX_RANKED_CANDIDATES)
        ]
        self._depths = np.array([DEPTHS[group][1] for group in groups], np.int64)
        self._kinds = np.array([CANDIDATE_KINDS + group for group in groups], np.int64)
        self._ranks = np.empty(0, np.int64)
        self._compile()

    def _compile(self) -> None:
        """Compile all code, or load it from the cache, before the first step."""
        self.begin([0, 0])
        self.observe(Accepted([], [1]), Verified(torch.zeros(1, 2)))
        self.draft([0, 0, 1])

    def begin(self, prompt: Sequence[int]) -> None:
        super().begin(prompt)
        self._context.restart(prompt)
        self._candidates = self._candidates[:0]

    def _propose(self, context: Sequence[int], max_nodes: int) -> tuple[Ints, DraftTree]:
        with self._timing(SourceId.LAST):
            rows, matched = look_up(self._context.grown(context), self._candidates, self._depths, self._ranks)
            self._trie.clear()
            self._trie.add(rows[:1], SourceId.CONTEXT, wanted=1)
            self._trie.add(rows[1:], SourceId.LAST, wanted=len(rows))
            tokens, parents, sources = self._trie.copy_arrays()
            kinds = kinds_of(tokens, parents, sources == SourceId.CONTEXT, matched - 1, self._candidates, self._kinds)
            return kinds, DraftTree(context[-1], tokens, parents, sources)

    def observe(self, accepted: Accepted, verified: Verified) -> None:
        with self._timing(SourceId.LAST):
            super().observe(accepted, verified)
            self._candidates = self._candidates[:0]
            if len(verified) and self.budget.max_nodes:
                end = accepted.path[-1] + 1 if accepted.path else 0
                tokens, scores = verified.topk(MAX_RANKED_CANDIDATES + 1, slice(end, end + 1))
                likely = tokens[0, np.isfinite(scores[0])]
                self._candidates = likely[likely != accepted.tokens[-1]][:MAX_RANKED_CANDIDATES]
                if len(self._ranks) != verified.logits.shape[-1]:
                    self._ranks = np.full(verified.logits.shape[-1], UNRANKED)


@compiled
def kinds_of(tokens: Ints, parents: Ints, follows: Ints, root_kind: int, candidates: Ints, kinds: Ints) -> Ints:
    """Return the kind of each node: ``root_kind`` if it is in the root's continuation, else its candidate's kind."""
    node_kinds = np.full(len(tokens), root_kind, np.int64)
    for node in range(len(tokens)):
        if not follows[node]:
            parent = parents[node]
            if parent != ROOT and not follows[parent]:
                node_kinds[node] = node_kinds[parent]
            else:
                # A candidate, or the node at which a candidate's continuation leaves the root's.
                first = node if parent == ROOT else parent
                while parents[first] != ROOT:
                    first = parents[first]
                for rank in range(len(candidates)):
                    if candidates[rank] == tokens[first]:
                        node_kinds[node] = kinds[rank]
    return node_kinds


@compiled
def look_up(context: Ints, candidates: Ints, depths: Ints, ranks: Ints) -> tuple[Ints, Any]:
    """Look up the root and the candidates in the context.

    Return ``(rows, matched)``: rows of tokens, and the length of the root's match. Row 0 is the continuation of the
    root; each further row is a candidate with its continuation. The longest match is used or, of equally long matches,
    the one with the longest continuation, then the latest. ``ranks`` has one entry for each token of the vocabulary
    and is restored before returning.
    """
    size = len(context)
    rows = np.full((len(candidates) + 1, CONTINUATION_LENGTH), NO_TOKEN, np.int32)
    matched, follows = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    for rank in range(len(candidates)):
        rows[rank + 1, 0] = candidates[rank]
        ranks[candidates[rank]] = rank + 1
    for end in range(size - 2, -1, -1):
        token = context[end]
        if token == context[size - 1]:
            row, before, wanted, start = 0, size - 2, CONTINUATION_LENGTH, 0
        elif 0 <= token < len(ranks) and ranks[token] != UNRANKED:
            row, before, wanted, start = ranks[token], size - 1, depths[ranks[token] - 1] - 1, 1
        else:
            continue
        length = 1
        while (
            length < MAX_MATCH
            and end >= length
            and before >= length - 1
            and context[end - length] == context[before - length + 1]
        ):
            length += 1
        follow = min(size - 1 - end, wanted)
        if length > matched[row] or (length == matched[row] and follow > follows[row]):
            matched[row], follows[row] = length, follow
            for place in range(wanted):
                rows[row, start + place] = context[end + 1 + place] if place < follow else NO_TOKEN
    for token in candidates:
        ranks[token] = UNRANKED
    return rows, matched[0]
