"""Drafts from the corpus index alone, as REST does: what follows the longest suffix of the context in it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hdtool.runtime.accept import Accepted
from hdtool.runtime.budget.node_budget import Budget, FixedBudget
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.tree import LARGEST_TREE, DraftTree
from hdtool.runtime.verified import Verified

if TYPE_CHECKING:
    from hdtool.runtime.stores.corpus_index import CorpusIndex


class CorpusDrafter:
    """Drafts the most frequent continuations, as many nodes as the budget allows."""

    def __init__(self, index: CorpusIndex, budget: Budget | None = None) -> None:
        self.seconds: dict[SourceName, float] = {SourceName.CORPUS: 0.0}
        """Drafting time by source."""
        self._index = index
        self._budget = budget or FixedBudget(LARGEST_TREE)
        index.after(())  # compiles the lookup, or loads it, before the first step

    def begin(self, prompt: Sequence[int]) -> None:
        pass

    def draft(self, context: Sequence[int]) -> DraftTree:
        started = time.perf_counter()
        most = min(self._budget.most, LARGEST_TREE)
        found = self._index.after(context, most) if most else None
        kept = self._budget.nodes(found.counts / max(found.found, 1)) if found else 0
        tree = DraftTree.bare(context[-1])
        if found and kept:
            # Parents stand before their children and have no smaller counts, so any prefix of the tree is a tree.
            tokens, parents = found.tokens[:kept].copy(), found.parents[:kept].astype(np.int32)
            tree = DraftTree(context[-1], tokens, parents, np.full(kept, SourceName.CORPUS, np.uint8))
        self.seconds[SourceName.CORPUS] += time.perf_counter() - started
        return tree

    def observe(self, accepted: Accepted, verified: Verified) -> None:
        pass
