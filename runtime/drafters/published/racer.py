"""RACER (Zhang et al., 2026): retrieved n-grams, and a tree of the tokens that the target last ranked highest.

The most frequent continuations of all matches come first. The rest of the tree follows the rankings: the best token of
a node gets half of its parent's breadth, each further one half of the one before.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from hdtool.runtime.accept import Accepted
from hdtool.runtime.budget.node_budget import Budget, FixedBudget
from hdtool.runtime.drafters.growing_context import GrowingContext
from hdtool.runtime.drafters.node_calibration import NodeCalibration
from hdtool.runtime.drafters.published.ngram_trie import NgramTrie
from hdtool.runtime.drafters.published.top_tokens import BEST, NONE, Conversation, TopTokens
from hdtool.runtime.drafters.trie import Trie
from hdtool.runtime.kernels.compiled import Ints, compiled
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.tree import LARGEST_TREE, ROOT, DraftTree
from hdtool.runtime.verified import Verified

RATES = (0.4, 0.45, 0.12, 0.06, 0.04, 0.03, 0.02, 0.02, 0.01)
"""Prior acceptance rates: of retrieved tokens, then by rank."""
RETRIEVED = 0
RECYCLED = SourceName.RECYCLED.value

NO_KINDS = np.empty(0, np.int64)


class Racer:
    """Keeps n-grams and rankings from one conversation to the next unless ``remembers`` is False."""

    most_ranked = BEST

    def __init__(self, budget: Budget | None = None, *, remembers: bool = True) -> None:
        self.seconds: dict[SourceName, float] = {SourceName.CONTEXT: 0.0, SourceName.RECYCLED: 0.0}
        """Seconds spent in each source since the drafter was made."""
        self._budget = budget or FixedBudget(LARGEST_TREE)
        self._remembers, self._conversation = remembers, Conversation()
        self._ngrams, self._table = NgramTrie(), TopTokens()
        self._trie = Trie(LARGEST_TREE)
        self._context = GrowingContext()
        self._known = 0
        """Tokens of the context whose n-grams are counted."""
        self._calibration = NodeCalibration(RATES)
        self._verified = NO_KINDS, DraftTree.bare(0)
        """The kinds of the nodes of the last tree, and the tree."""
        # Compiled, or loaded from the cache, before a step needs it.
        self._trie.add(np.full((1, 1), NONE, np.int32), SourceName.CONTEXT, wanted=1)
        _fill(np.zeros((1, BEST), np.int64), 0, *self._trie.nodes(), 1)

    def begin(self, prompt: Sequence[int]) -> None:
        if not self._conversation.continues(prompt) and not self._remembers:
            self._ngrams.clear()
            self._table.clear()
        self._context.restart(prompt)
        self._ngrams.add(self._context.grown(prompt), 0)
        self._known = len(prompt)
        self._verified = NO_KINDS, DraftTree.bare(prompt[-1])

    def draft(self, context: Sequence[int]) -> DraftTree:
        root, most = context[-1], min(self._budget.most, LARGEST_TREE)
        if not most:
            self._verified = NO_KINDS, DraftTree.bare(root)
            return self._verified[1]
        started = time.perf_counter()
        known = self._context.grown(context)
        self._ngrams.add(known, self._known)
        self._known = len(known)
        rows, _ = self._ngrams.after(known, most)
        self._trie.clear()
        self._trie.add(rows, SourceName.CONTEXT, wanted=len(rows))
        between = time.perf_counter()
        tokens, parents, sources, kinds = _fill(self._table.rows, root, *self._trie.nodes(), most)
        whole = DraftTree(root, tokens, parents, sources)
        order, probs = self._calibration.by_probability(kinds, whole)
        order = order[: self._budget.nodes(probs)]
        self._verified = kinds[order], whole.picked(order)
        self.seconds[SourceName.CONTEXT] += between - started
        self.seconds[SourceName.RECYCLED] += time.perf_counter() - between
        return self._verified[1]

    def observe(self, accepted: Accepted, verified: Verified) -> None:
        started = time.perf_counter()
        kinds, tree = self._verified
        if len(verified) == len(tree) + 1:  # else the tree was clipped and its nodes differ
            self._calibration.update(kinds, tree, accepted.path)
            if self._budget.most:
                self._table.keep(tree, verified)
        self.seconds[SourceName.RECYCLED] += time.perf_counter() - started


@compiled
def _fill(
    rows: Ints, root: int, retrieved: Ints, above: Ints, origins: Ints, most: int
) -> tuple[Ints, Ints, Ints, Ints]:
    """The retrieved nodes and, up to ``most``, ranked tokens breadth first: tokens, parents, sources and kinds."""
    size = min(len(retrieved), most)
    tokens, parents = np.empty(most, np.int64), np.empty(most, np.int32)
    sources, kinds = np.empty(most, np.uint8), np.full(most, RETRIEVED)
    tokens[:size], parents[:size], sources[:size] = retrieved[:size], above[:size], origins[:size]
    waiting, breadths = np.full(most + 1, ROOT), np.full(most + 1, BEST)
    read, written = 0, 1
    while read < written and size < most:
        node, breadth = waiting[read], breadths[read]
        following = breadth if node == ROOT else breadth // 2
        token = root if node == ROOT else tokens[node]
        read += 1
        for rank in range(breadth if 0 <= token < len(rows) else 0):
            if rows[token, rank] == NONE or written > most:
                break
            child = 0
            while child < size and not (parents[child] == node and tokens[child] == rows[token, rank]):
                child += 1
            if child == size:
                if size == most:
                    break
                tokens[size], parents[size] = rows[token, rank], node
                sources[size], kinds[size] = RECYCLED, rank + 1
                size += 1
            waiting[written], breadths[written] = child, max(1, following)
            following //= 2
            written += 1
    return tokens[:size], parents[:size], sources[:size], kinds[:size]
