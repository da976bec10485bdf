"""Drafts trees from a single trained drafter, without other sources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hdtool.runtime.budget.budgeted_drafter import BudgetedDrafter
from hdtool.runtime.budget.node_budget import Budget
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.acceptance_rates import Probs
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.core.tree import ROOT, DraftTree
from hdtool.runtime.drafters.trained.proposal import best_paths
from hdtool.runtime.drafters.trained.proposer import TrainedProposer
from hdtool.runtime.settings.draft_sources import SourceId

if TYPE_CHECKING:
    from hdtool.runtime.drafters.heads.checkpoint import SavedHeads


class StandaloneDrafter(BudgetedDrafter):
    """Drafts trees from a single trained drafter."""

    def __init__(self, trained: TrainedProposer, budget: Budget, static: StaticTree | None = None) -> None:
        """With a ``static`` tree, every draft has that shape; by default, a draft has the most probable nodes."""
        super().__init__(budget)
        self.trained, self._static = trained, static
        # Compile the search, or load it from the cache, before the first step.
        best_paths(np.zeros((1, 1)), np.zeros((1, 1), np.int64), 1)

    @property
    def seconds(self) -> dict[SourceId, float]:
        return {self.trained.source: self.trained.seconds}

    def begin(self, prompt: Sequence[int]) -> None:
        self.trained.begin(list(prompt))

    def _grow(self, context: Sequence[int], max_nodes: int) -> tuple[DraftTree, Probs]:
        before = self.trained.seconds
        if not self.trained.begin_draft():
            return DraftTree.bare(context[-1]), np.empty(0)
        proposal = self.trained.propose(max_nodes)
        self.budget.set_draft_seconds(self.trained.seconds - before)
        if tree := self._static:
            parents, ranks = tree.parents[:max_nodes], tree.ranks[:max_nodes]
            rankings, probs = tree.depths[:max_nodes] - 1, tree.gains[:max_nodes]
        else:
            after = np.ascontiguousarray(proposal.after)
            parents, ranks, rankings, probs = best_paths(proposal.probs, after, max_nodes)
        tokens = proposal.tokens[rankings, ranks]
        return DraftTree.of(context[-1], tokens, parents, self.trained.source), probs

    def observe(self, accepted: Accepted, verified: Verified) -> None:
        super().observe(accepted, verified)
        self.trained.observe(accepted, verified)


class StaticTree:
    """A fixed shape for all draft trees, chosen when the heads were evaluated."""

    def __init__(self, saved: SavedHeads) -> None:
        paths = [tuple(path) for path in saved.evaluation.tree]
        places = {path: node for node, path in enumerate(paths)} | {(): ROOT}
        self.parents = np.array([places[path[:-1]] for path in paths], np.int32)
        self.ranks: npt.NDArray[np.int64] = np.array([path[-1] for path in paths], np.int64)
        self.depths: npt.NDArray[np.int64] = np.array([len(path) for path in paths], np.int64)
        self.gains: npt.NDArray[np.float64] = np.array(saved.evaluation.gains)
