"""LogitSpec: the last logit guides the look-up of what followed in the conversation.

The root is known; what the target also thought likely in its place, it may well say next. Each of these
candidates is looked up behind the root, longer matches first, and of equals the latest. Better candidates
are followed farther, and all of it makes one tree, which is cut where nodes cost more than they bring.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

from hdtool.runtime.accept import Accepted
from hdtool.runtime.budget.node_budget import Budget, FixedBudget
from hdtool.runtime.drafters.growing_context import GrowingContext
from hdtool.runtime.drafters.hierarchy.sources.last_logits import MOST_CANDIDATES
from hdtool.runtime.drafters.node_calibration import NodeOdds
from hdtool.runtime.drafters.trie import NO_TOKEN, Trie
from hdtool.runtime.kernels.topk import at_hand, ranked
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.tree import LARGEST_TREE, ROOT, DraftTree

UNRANKED = -1
LONGEST = 3
"""Tokens that must agree at most, the candidate included."""
FOLLOWED = 20
"""Tokens that are taken of what followed the root."""
DEPTHS = ((8, 4), (32, 3), (MOST_CANDIDATES, 1))
"""The first eight candidates begin sequences of four tokens, those up to the 32nd of three, others stand alone."""
RATES = (0.2, 0.4, 0.6, 0.02, 0.01, 0.003)
"""Of kinds of nodes, how often they are taken, before anything is learned: what followed the root where one token
agreed, where two did, where three; then candidates, and what followed them, by their rank."""
CANDIDATE_KINDS = LONGEST
"""Where the kinds of candidates begin."""

NO_KINDS = np.empty(0, np.int64)

Ints = npt.NDArray[Any]


class LogitSpec:
    """Drafts from the last logit and the conversation alone."""

    def __init__(self, budget: Budget | None = None) -> None:
        self.seconds: dict[SourceName, float] = {SourceName.LAST: 0.0}
        """What the source has taken since this drafter exists."""
        self.budget = budget or FixedBudget(LARGEST_TREE)
        self._trie = Trie(LARGEST_TREE)
        self._context = GrowingContext()
        self._candidates = np.empty(0, np.int64)
        groups = [next(group for group, (end, _) in enumerate(DEPTHS) if rank < end) for rank in range(MOST_CANDIDATES)]
        self._depths = np.array([DEPTHS[group][1] for group in groups], np.int64)
        self._kinds = np.array([CANDIDATE_KINDS + group for group in groups], np.int64)
        self._ranks = np.empty(0, np.int64)
        self._probs = NodeOdds(RATES)
        self._sent = NO_KINDS, DraftTree.bare(0)
        """What the target was last asked about, and the kinds of its nodes."""
        self._compile()

    def _compile(self) -> None:
        """Have everything compiled, or loaded, before the first step waits for it."""
        self.begin([0, 0])
        self.observe(Accepted([], [1]), torch.zeros(1, 2))
        self.draft([0, 0, 1])

    def begin(self, prompt: Sequence[int]) -> None:
        self._context.restart(prompt)
        self._candidates = self._candidates[:0]

    def draft(self, context: Sequence[int]) -> DraftTree:
        if not self.budget.most:
            self._sent = NO_KINDS, DraftTree.bare(context[-1])
            return self._sent[1]
        started = time.perf_counter()
        words = self._context.grown(context)
        rows, matched = look_up(words, self._candidates, self._depths, self._ranks)
        self._trie.clear()
        self._trie.add(rows[:1], SourceName.CONTEXT, wanted=1)
        self._trie.add(rows[1:], SourceName.LAST, wanted=len(rows))
        tokens, parents, sources = self._trie.nodes()
        kinds = kinds_of(tokens, parents, sources == SourceName.CONTEXT, matched - 1, self._candidates, self._kinds)
        whole = DraftTree(context[-1], tokens, parents, sources)
        order, probs = self._probs.likeliest_first(kinds, whole)
        order = order[: self.budget.nodes(probs)]
        tree = whole.picked(order)
        self._sent = kinds[order], tree
        self.seconds[SourceName.LAST] += time.perf_counter() - started
        return tree

    def observe(self, accepted: Accepted, logits: torch.Tensor) -> None:
        started = time.perf_counter()
        kinds, tree = self._sent
        if len(logits) == len(tree) + 1:  # else the tree was clipped, and its nodes are others
            self._probs.learn(kinds, tree, accepted.path)
        self._candidates = self._candidates[:0]
        if len(logits) and self.budget.most:
            end = accepted.path[-1] + 1 if accepted.path else 0
            tokens, scores = ranked(at_hand(logits)[end : end + 1], MOST_CANDIDATES + 1)
            likely = tokens[0, np.isfinite(scores[0])]
            self._candidates = likely[likely != accepted.tokens[-1]][:MOST_CANDIDATES]
            if len(self._ranks) != logits.shape[-1]:
                self._ranks = np.full(logits.shape[-1], UNRANKED)
        self.seconds[SourceName.LAST] += time.perf_counter() - started


@njit(cache=True, nogil=True)
def kinds_of(tokens: Ints, parents: Ints, follows: Ints, root_kind: int, candidates: Ints, kinds: Ints) -> Ints:
    """The kind of each node: ``root_kind`` for what followed the root, else that of the candidate it stands behind."""
    found = np.full(len(tokens), root_kind, np.int64)
    for node in range(len(tokens)):
        if not follows[node]:
            above = parents[node]
            if above != ROOT and not follows[above]:
                found[node] = found[above]
            else:
                # A candidate, or one that followed the root too and is followed farther as a candidate.
                first = node if above == ROOT else above
                while parents[first] != ROOT:
                    first = parents[first]
                for rank in range(len(candidates)):
                    if candidates[rank] == tokens[first]:
                        found[node] = kinds[rank]
    return found


@njit(cache=True, nogil=True)
def look_up(words: Ints, candidates: Ints, depths: Ints, ranks: Ints) -> tuple[Ints, Any]:
    """A row for the root, then one for each candidate: itself and what followed it, as far as its depth.

    And how many tokens agreed where the root was found.

    The longest match counts, of equals the one that more is known behind, then the latest. ``ranks`` has
    room for each token of the vocabulary and is left as it was found.
    """
    size = len(words)
    rows = np.full((len(candidates) + 1, FOLLOWED), NO_TOKEN, np.int32)
    matched, known = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    for rank in range(len(candidates)):
        rows[rank + 1, 0] = candidates[rank]
        ranks[candidates[rank]] = rank + 1
    for end in range(size - 2, -1, -1):
        token = words[end]
        if token == words[size - 1]:
            row, before, wanted, start = 0, size - 2, FOLLOWED, 0
        elif 0 <= token < len(ranks) and ranks[token] != UNRANKED:
            row, before, wanted, start = ranks[token], size - 1, depths[ranks[token] - 1] - 1, 1
        else:
            continue
        length = 1
        while (
            length < LONGEST
            and end >= length
            and before >= length - 1
            and (words[end - length] == words[before - length + 1])
        ):
            length += 1
        follow = min(size - 1 - end, wanted)
        if length > matched[row] or (length == matched[row] and follow > known[row]):
            matched[row], known[row] = length, follow
            for place in range(wanted):
                rows[row, start + place] = words[end + 1 + place] if place < follow else NO_TOKEN
    for token in candidates:
        ranks[token] = UNRANKED
    return rows, matched[0]
