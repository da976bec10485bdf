"""Token Recycling (Luo et al., 2024): a static tree over the tokens that the target ranked highest after each token.

Rankings are recycled from all nodes of a verified tree, accepted or not. The paper's tree has 80 nodes; those accepted
most often are drafted, as many as the budget allows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hdtool.runtime.budget.budgeted_drafter import KindsDrafter
from hdtool.runtime.budget.node_budget import Budget
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.core.tree import ROOT, DraftTree
from hdtool.runtime.kernels.compiled import Ints, compiled
from hdtool.runtime.kernels.topk import topk
from hdtool.runtime.settings.draft_sources import SourceId

RECYCLED_PER_TOKEN = 8
"""Number of ranked tokens that are stored for each token."""
NO_RECYCLED_TOKEN = -1


class RankedSuccessors:
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


class RecyclingDrafter(KindsDrafter):
    """Base class of drafters that recycle the target's rankings; with ``remembers``, across conversations, too."""

    max_ranked = RECYCLED_PER_TOKEN

    def __init__(
        self, budget: Budget | None, prior: Sequence[float], *sources: SourceId, remembers: bool = True
    ) -> None:
        super().__init__(budget, prior, *sources)
        self._remembers, self._last_prompt = remembers, list[int]()
        self._table = RankedSuccessors()

    def begin(self, prompt: Sequence[int]) -> None:
        super().begin(prompt)
        before, self._last_prompt = self._last_prompt, list(prompt)
        if not self._remembers and not (before and self._last_prompt[: len(before)] == before):
            self._forget()

    def _forget(self) -> None:
        """Drop everything learned from earlier conversations."""
        self._table.clear()

    def observe(self, accepted: Accepted, verified: Verified) -> None:
        with self._timing(SourceId.RECYCLED):
            super().observe(accepted, verified)

    def _keep(self, tree: DraftTree, verified: Verified) -> None:
        self._table.keep(tree, verified)


class TokenRecycling(RecyclingDrafter):
    """Drafts a static tree of the tokens in recycled rankings."""

    def __init__(self, budget: Budget | None = None, *, remembers: bool = True) -> None:
        super().__init__(budget, RANK_PRIOR_RATES, SourceId.RECYCLED, remembers=remembers)
        self._places = np.array([children for level in CHILDREN for children in level], np.int64)
        _fill(np.full((1, RECYCLED_PER_TOKEN), 0), 0, self._places)  # compile it, or load it from the cache

    def _propose(self, context: Sequence[int], max_nodes: int) -> tuple[Ints, DraftTree]:
        with self._timing(SourceId.RECYCLED):
            tokens, parents, ranks = _fill(self._table.rows, context[-1], self._places)
            return ranks, DraftTree.of(context[-1], tokens, parents, SourceId.RECYCLED)


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
