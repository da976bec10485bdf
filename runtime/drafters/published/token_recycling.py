"""Token Recycling (Luo et al., 2024): a static tree over the tokens that the target ranked highest after each token.

Rankings are recycled from all nodes of a verified tree, accepted or not. The paper's tree has 80 nodes; those accepted
most often are drafted, as many as the budget allows.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from hdtool.runtime.budget.node_budget import Budget, FixedBudget
from hdtool.runtime.config.source_names import SourceId
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.drafter import NO_KINDS, Drafter, NodeCalibration
from hdtool.runtime.core.engine import Verified
from hdtool.runtime.core.tree import LARGEST_TREE, ROOT, DraftTree
from hdtool.runtime.kernels.compiled import Ints, compiled
from hdtool.runtime.kernels.topk import topk

RECYCLED_PER_TOKEN = 8
"""Number of ranked tokens that are stored for each token."""
NO_RECYCLED_TOKEN = -1


class TopTokens:
    """Stores the latest ranking after each token of the vocabulary; allocates memory when the first logits arrive."""

    def __init__(self) -> None:
        self.rows = np.empty((0, RECYCLED_PER_TOKEN), np.int64)
        """For each token, the tokens ranked after it, best first; ``NO_RECYCLED_TOKEN`` if they are unknown."""
        topk(torch.zeros(1, 1), RECYCLED_PER_TOKEN)  # compile it, or load it from the cache, before the first step

    def clear(self) -> None:
        self.rows[:] = NO_RECYCLED_TOKEN

    def keep(self, tree: DraftTree, verified: Verified) -> None:
        """Store the rankings after the root and each node of a verified tree."""
        vocabulary = verified.logits.shape[-1]
        if len(self.rows) < vocabulary:
            self.rows = np.full((vocabulary, RECYCLED_PER_TOKEN), NO_RECYCLED_TOKEN)
        tokens, scores = verified.topk(RECYCLED_PER_TOKEN)
        known = np.isfinite(scores[:, 0])  # a recording has no rankings after rejected nodes
        read = np.array(tree.all_tokens)
        known &= (read >= 0) & (read < len(self.rows))
        self.rows[read[known]] = np.where(np.isfinite(scores[known]), tokens[known], NO_RECYCLED_TOKEN)


class ConversationTracker:
    """Tells whether a prompt continues the conversation of the previous prompt."""

    def __init__(self) -> None:
        self._prompt: list[int] = []

    def continues(self, prompt: Sequence[int]) -> bool:
        before, self._prompt = self._prompt, list(prompt)
        return bool(before) and self._prompt[: len(before)] == before


CHILDREN = (
    (8,),
    (8, 4, 3, 2, 1, 1, 1, 1),
    (8, 3, 2, 1, 1, 1, 1, 1, 2, 1, 0, 0, 1, 0, 0, 1, 0, 1, 1, 0, 0),
    (5, 2, 1, 1, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 1, 0, 0),
    (3, 1, 1, 0, 0, 1, 0, 0, 0, 0, 1, 0, 1, 0, 0),
    (2, 0, 0, 1, 0, 0, 0, 0),
    (0, 0, 0),
)
"""Number of children of each node in the static tree, by depth; a node's children are its highest-ranked tokens."""
RANK_PRIOR_RATES = (0.45, 0.12, 0.06, 0.04, 0.03, 0.02, 0.02, 0.01)
"""Initial acceptance rates by rank."""


class TokenRecycling(Drafter):
    """Drafts from rankings, which are kept between conversations unless ``remembers`` is False."""

    max_ranked = RECYCLED_PER_TOKEN

    def __init__(self, budget: Budget | None = None, *, remembers: bool = True) -> None:
        super().__init__(SourceId.RECYCLED)
        self._budget = budget or FixedBudget(LARGEST_TREE)
        self._remembers, self._conversation = remembers, ConversationTracker()
        self._table = TopTokens()
        self._places = np.array([children for level in CHILDREN for children in level], np.int64)
        self._calibration = NodeCalibration(RANK_PRIOR_RATES)
        self._verified = NO_KINDS, DraftTree.bare(0)
        """``(ranks, tree)``: the rank of each node in the last tree, and this tree."""
        _fill(np.full((1, RECYCLED_PER_TOKEN), 0), 0, self._places)  # compile it, or load it from the cache

    def begin(self, prompt: Sequence[int]) -> None:
        if not self._conversation.continues(prompt) and not self._remembers:
            self._table.clear()
        self._verified = NO_KINDS, DraftTree.bare(prompt[-1])

    def draft(self, context: Sequence[int]) -> DraftTree:
        root = context[-1]
        self._verified = NO_KINDS, DraftTree.bare(root)
        if self._budget.max_nodes and 0 <= root < len(self._table.rows):
            started = time.perf_counter()
            tokens, parents, ranks = _fill(self._table.rows, root, self._places)
            whole = DraftTree(root, tokens, parents, np.full(len(tokens), SourceId.RECYCLED, np.uint8))
            order, probs = self._calibration.by_probability(ranks, whole)
            order = order[: min(self._budget.choose_size(probs[:LARGEST_TREE]), LARGEST_TREE)]
            self._verified = ranks[order], whole.select(order)
            self.seconds[SourceId.RECYCLED] += time.perf_counter() - started
        return self._verified[1]

    def observe(self, accepted: Accepted, verified: Verified) -> None:
        started = time.perf_counter()
        ranks, tree = self._verified
        if len(verified) == len(tree) + 1:  # else the tree was clipped and its nodes differ
            self._calibration.update(ranks, tree, accepted.path)
            if self._budget.max_nodes:
                self._table.keep(tree, verified)
        self.seconds[SourceId.RECYCLED] += time.perf_counter() - started


@compiled
def _fill(rows: Ints, root: int, max_children: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the tokens, parents and ranks of those nodes in the static tree whose tokens are known."""
    max_nodes = len(max_children)
    tokens, parents = np.empty(max_nodes, np.int64), np.empty(max_nodes, np.int32)
    ranks, nodes = np.empty(max_nodes, np.int64), np.full(max_nodes, NO_RECYCLED_TOKEN)  # the node of each entry
    size, index = 0, 1
    for parent in range(max_nodes):
        node = ROOT if parent == 0 else nodes[parent]
        is_known = parent == 0 or node != NO_RECYCLED_TOKEN
        token = root if parent == 0 else tokens[node]
        for rank in range(max_children[parent]):
            child = rows[token, rank] if is_known and 0 <= token < len(rows) else NO_RECYCLED_TOKEN
            if child != NO_RECYCLED_TOKEN:
                tokens[size], parents[size], ranks[size], nodes[index] = child, node, rank, size
                size += 1
            index += 1
    return tokens[:size], parents[:size], ranks[:size]
