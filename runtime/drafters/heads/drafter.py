"""Drafting by heads alone: the static tree of the checkpoint, or the most probable paths at each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from hdtool.runtime.accept import Accepted
from hdtool.runtime.budget.node_budget import Budget
from hdtool.runtime.drafters.heads.calibration import best_paths
from hdtool.runtime.drafters.heads.checkpoint import SavedHeads
from hdtool.runtime.drafters.heads.state import HeadsState
from hdtool.runtime.model.target import Target
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.tree import LARGEST_TREE, ROOT, DraftTree
from hdtool.runtime.verified import Verified


class HeadsDrafter:
    """The methods ``amphista`` and ``medusa``, which differ in their heads only."""

    def __init__(self, saved: SavedHeads, target: Target, budget: Budget, *, static: bool = False) -> None:
        self.session = HeadsState(saved, target)
        self.budget = budget
        self._static = StaticTree(saved) if static else None
        self._parents = np.zeros(LARGEST_TREE, np.int32)
        self._ranks, self._depths = np.zeros((2, LARGEST_TREE), np.int64)
        self._path_probs = np.zeros(LARGEST_TREE)
        self._sources = np.full(LARGEST_TREE, SourceName.HEADS, np.uint8)
        # Compile or load it now, so that no step waits for it.
        best_paths(np.zeros((1, 1)), 1, self._parents, self._ranks, self._depths, self._path_probs)

    @property
    def seconds(self) -> Mapping[SourceName, float]:
        return {SourceName.HEADS: self.session.seconds}

    def begin(self, prompt: Sequence[int]) -> None:
        self.session.begin(list(prompt))

    def draft(self, context: Sequence[int]) -> DraftTree:
        most = min(self.budget.most, LARGEST_TREE)
        if not most:
            return DraftTree.bare(context[-1])
        before = self.session.seconds
        self.session.run_heads()
        self.budget.set_draft_seconds(self.session.seconds - before)
        if self._static:
            tree = self._static
            size = self.budget.nodes(tree.gains[:most])
            parents, ranks, depths = tree.parents[:size], tree.ranks[:size], tree.depths[:size]
        else:
            room = self._parents, self._ranks, self._depths, self._path_probs
            grown = best_paths(self.session.probs, most, *room)
            size = self.budget.nodes(self._path_probs[:grown])
            parents, ranks, depths = self._parents[:size].copy(), self._ranks[:size], self._depths[:size]
        return DraftTree(context[-1], self.session.tokens[depths - 1, ranks], parents, self._sources[:size])

    def observe(self, accepted: Accepted, verified: Verified) -> None:
        self.session.observe(accepted, verified)


class StaticTree:
    """The tree that was chosen when the heads were evaluated."""

    def __init__(self, saved: SavedHeads) -> None:
        paths = [tuple(path) for path in saved.judged.tree]
        places = {path: node for node, path in enumerate(paths)} | {(): ROOT}
        self.parents = np.array([places[path[:-1]] for path in paths], np.int32)
        self.ranks: npt.NDArray[np.int64] = np.array([path[-1] for path in paths], np.int64)
        self.depths: npt.NDArray[np.int64] = np.array([len(path) for path in paths], np.int64)
        self.gains: npt.NDArray[np.float64] = np.array(saved.judged.gains)
