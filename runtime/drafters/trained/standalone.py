"""Drafting by a trained drafter alone: the most probable paths of each step, or the static tree of a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hdtool.runtime.accept import Accepted
from hdtool.runtime.budget.node_budget import Budget
from hdtool.runtime.drafters.trained.gate import TrainedGate
from hdtool.runtime.drafters.trained.proposal import MOST_RANKINGS, TrainedDrafter, best_paths
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.tree import LARGEST_TREE, ROOT, DraftTree
from hdtool.runtime.verified import Verified

if TYPE_CHECKING:
    from hdtool.runtime.drafters.heads.checkpoint import SavedHeads


class StandaloneDrafter:
    """The methods that draft from one trained drafter."""

    def __init__(
        self,
        trained: TrainedDrafter,
        budget: Budget,
        static: StaticTree | None = None,
        gate: TrainedGate | None = None,
    ) -> None:
        """With a ``gate``, the drafter runs while it pays; by default, in every step."""
        self.trained, self.budget = trained, budget
        self._gate = gate
        self._began: float | None = None
        """When the draft began that no outcome was observed of yet."""
        self._used = True
        """Whether the drafter ran for it."""
        self._static = static
        self._parents = np.zeros(LARGEST_TREE, np.int32)
        self._ranks, self._rankings = np.zeros((2, LARGEST_TREE), np.int64)
        self._path_probs = np.zeros(LARGEST_TREE)
        self._sources = np.full(LARGEST_TREE, trained.source, np.uint8)
        # Compile or load it now, so that no step waits for it.
        self._best_paths(np.zeros((1, 1)), np.zeros((1, 1), np.int64), 1)

    def _best_paths(self, probs: npt.NDArray[np.float64], after: npt.NDArray[np.int64], most: int) -> int:
        return best_paths(probs, after, most, self._parents, self._ranks, self._rankings, self._path_probs)

    @property
    def seconds(self) -> Mapping[SourceName, float]:
        return {self.trained.source: self.trained.seconds}

    def begin(self, prompt: Sequence[int]) -> None:
        self.trained.begin(list(prompt))

    def draft(self, context: Sequence[int]) -> DraftTree:
        most = min(self.budget.most, LARGEST_TREE)
        self._began = time.perf_counter() if most and self._gate else None
        self._used = self._gate is None or self._gate.now
        if not most or not self._used:
            return DraftTree.bare(context[-1])
        before = self.trained.seconds
        proposal = self.trained.propose(most)
        self.budget.set_draft_seconds(self.trained.seconds - before)
        if self._static:
            tree = self._static
            size = self.budget.nodes(tree.gains[:most])
            parents, ranks, rankings = tree.parents[:size], tree.ranks[:size], tree.depths[:size] - 1
        else:
            assert len(proposal.tokens) <= MOST_RANKINGS
            grown = self._best_paths(proposal.probs, np.ascontiguousarray(proposal.after), most)
            size = self.budget.nodes(self._path_probs[:grown])
            parents, ranks, rankings = self._parents[:size].copy(), self._ranks[:size], self._rankings[:size]
        return DraftTree(context[-1], proposal.tokens[rankings, ranks], parents, self._sources[:size])

    def observe(self, accepted: Accepted, verified: Verified) -> None:
        self.trained.observe(accepted, verified)
        if self._gate and self._began is not None:
            self._gate.observe(len(accepted.tokens), time.perf_counter() - self._began, self._used)
        self._began = None


class StaticTree:
    """The tree that was chosen when the heads were evaluated."""

    def __init__(self, saved: SavedHeads) -> None:
        paths = [tuple(path) for path in saved.judged.tree]
        places = {path: node for node, path in enumerate(paths)} | {(): ROOT}
        self.parents = np.array([places[path[:-1]] for path in paths], np.int32)
        self.ranks: npt.NDArray[np.int64] = np.array([path[-1] for path in paths], np.int64)
        self.depths: npt.NDArray[np.int64] = np.array([len(path) for path in paths], np.int64)
        self.gains: npt.NDArray[np.float64] = np.array(saved.judged.gains)
