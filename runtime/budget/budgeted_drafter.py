"""Base classes of drafters that grow a tree of probable nodes, of which the budget chooses how many to verify."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hdtool.runtime.budget.node_budget import Budget, FixedBudget
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.acceptance_rates import AcceptanceRates, Probs, path_probs
from hdtool.runtime.core.drafter import Drafter
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.core.tree import LARGEST_TREE, DraftTree
from hdtool.runtime.kernels.compiled import Ints
from hdtool.runtime.settings.draft_sources import SourceId


class BudgetedDrafter(Drafter):
    """Drafts the most probable nodes that ``_grow`` returns, as many as the budget chooses."""

    def __init__(self, budget: Budget | None, *sources: SourceId) -> None:
        super().__init__(*sources)
        self.budget = budget or FixedBudget(LARGEST_TREE)

    def draft(self, context: Sequence[int]) -> DraftTree:
        max_nodes = min(self.budget.max_nodes, LARGEST_TREE)
        if not max_nodes:
            return DraftTree.bare(context[-1])
        tree, probs = self._grow(context, max_nodes)
        if not len(tree):
            return tree
        size = self.budget.choose_size(probs[:LARGEST_TREE])
        return tree if size == len(tree) else tree.first(size)

    def _grow(self, context: Sequence[int], max_nodes: int) -> tuple[DraftTree, Probs]:
        """Return a tree, and for each node the probability that its path is accepted, in descending order."""
        raise NotImplementedError

    def observe(self, accepted: Accepted, verified: Verified) -> None:
        self.budget.end_step()


class KindsDrafter(BudgetedDrafter):
    """Drafts nodes of several kinds; the acceptance rate of a node depends on its kind and depth."""

    def __init__(self, budget: Budget | None, prior: Sequence[float], *sources: SourceId) -> None:
        """``prior`` has the initial acceptance rate of each kind."""
        super().__init__(budget, *sources)
        self._rates = AcceptanceRates(np.repeat(prior, LARGEST_TREE))
        path_probs(np.empty(0), np.empty(0, np.int32))  # compile it, or load it from the cache, before the first step
        self._tree, self._classes = DraftTree.bare(0), np.empty(0, np.int64)
        """The last tree, and the class of each of its nodes."""

    def begin(self, prompt: Sequence[int]) -> None:
        self._tree = DraftTree.bare(prompt[-1])

    def draft(self, context: Sequence[int]) -> DraftTree:
        self._tree = super().draft(context)
        return self._tree

    def _grow(self, context: Sequence[int], max_nodes: int) -> tuple[DraftTree, Probs]:
        kinds, tree = self._propose(context, max_nodes)
        classes = kinds * LARGEST_TREE + tree.depths[1:] - 1
        probs = path_probs(self._rates[classes], tree.parents)
        order = np.argsort(-probs, kind="stable")  # a parent stays before a child of equal probability
        self._classes = classes[order]
        return tree.select(order), probs[order]

    def _propose(self, context: Sequence[int], max_nodes: int) -> tuple[Ints, DraftTree]:
        """Return ``(kinds, tree)``: the kind of each node, and a tree of at most ``max_nodes`` nodes."""
        raise NotImplementedError

    def observe(self, accepted: Accepted, verified: Verified) -> None:
        super().observe(accepted, verified)
        tree = self._tree
        if len(verified) == len(tree) + 1:  # else the tree was clipped and its nodes differ
            self._rates.learn_tree(self._classes[: len(tree)], tree, accepted.path)
            if self.budget.max_nodes:
                self._keep(tree, verified)

    def _keep(self, tree: DraftTree, verified: Verified) -> None:
        """Learn from the logits of a verified tree."""
