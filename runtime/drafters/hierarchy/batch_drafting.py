"""Trees for all requests of a batch in one compiled call."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from hdtool.runtime.drafter import Drafter
from hdtool.runtime.drafters.hierarchy.drafter import Hierarchy
from hdtool.runtime.drafters.hierarchy.tree_builder import grow_all
from hdtool.runtime.tree import DraftTree

Context = Sequence[int]


class BatchDrafting:
    """The drafters of a batch, as far as they are hierarchies with one corpus; they draft together."""

    def __init__(self) -> None:
        self._drafters: list[Hierarchy] = []
        self._at = np.empty((0, 0), np.int64)

    def trees(self, drafters: Sequence[Drafter], contexts: Sequence[Context]) -> list[DraftTree]:
        """The tree of each drafter below the end of its context; those of other kinds draft by themselves."""
        found: dict[int, DraftTree] = {}
        hierarchies = [(place, of) for place, of in enumerate(drafters) if isinstance(of, Hierarchy)]
        together = [(place, of) for place, of in hierarchies if of.corpus is hierarchies[0][1].corpus]
        if len(together) > 1:
            places = [place for place, _ in together]
            trees = self._grown([of for _, of in together], [contexts[place] for place in places])
            found = dict(zip(places, trees, strict=True))
        return [
            found[place] if place in found else drafter.draft(contexts[place]) for place, drafter in enumerate(drafters)
        ]

    def _grown(self, drafters: list[Hierarchy], contexts: Sequence[Context]) -> list[DraftTree]:
        if self._drafters != drafters:
            self._drafters, self._at = drafters, np.array([drafter.addresses for drafter in drafters])
        most = [drafter.prepare(context) for drafter, context in zip(drafters, contexts, strict=True)]
        grown, started = np.zeros(len(most), np.int64), time.perf_counter()
        grow_all(drafters[0].corpus, self._at, np.array(most), grown)
        each = (time.perf_counter() - started) / len(drafters)
        return [
            drafter.completed(context, nodes, each) if wanted else DraftTree.bare(context[-1])
            for drafter, context, wanted, nodes in zip(drafters, contexts, most, grown.tolist(), strict=True)
        ]
