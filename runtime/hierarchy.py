"""The default drafter: all sources in one estimate, the likeliest paths in one tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hdtool.runtime.accept import Accepted
from hdtool.runtime.budget import Budget, FixedBudget, Odds
from hdtool.runtime.corpus_index import CorpusIndex
from hdtool.runtime.growth import feed, grow, restart
from hdtool.runtime.model_store import ModelStore
from hdtool.runtime.sources import SourceName
from hdtool.runtime.sources.context_table import LONGEST_MATCH, ContextTable
from hdtool.runtime.sources.corpus_levels import no_shards, range_record
from hdtool.runtime.sources.model_levels import model_record
from hdtool.runtime.tree import LARGEST_TREE, DraftTree
from hdtool.runtime.weights import new_weights
from hdtool.runtime.workspace import WORK, Memory

Array = npt.NDArray[Any]


class Hierarchy:
    """Drafts from the context, the model store and the corpus index, as far as they are there.

    What it learns of the sources' worth it keeps from one generation to the next.
    """

    def __init__(
        self,
        model: ModelStore | None = None,
        corpus: CorpusIndex | None = None,
        *,
        context: bool = True,
        budget: Budget | None = None,
    ) -> None:
        self.seconds: dict[SourceName, float] = {}
        self.budget = budget or FixedBudget()
        self.table = ContextTable()
        self._shards = corpus.shards if corpus else no_shards()
        self._corpus = self._shards.tokens
        ranges, self._places = range_record(self._shards)
        self._memory = Memory(np.zeros(1, WORK), new_weights(), self.table.memory, model_record(model), ranges)
        self._at = self._memory.addresses()
        self._stores = model, corpus
        work = self._memory.work
        sizes = [store.manifest.tokenizer.vocab_size for store in self._stores if store]
        work["vocabulary"] = min(sizes, default=2**31)
        for source, there in zip(SourceName, (False, context, model, corpus), strict=False):
            work["has"][0, source] = bool(there)
        # Fields of a record cost a tenth of a microsecond each time they are asked for.
        nodes = (work[field][0, 1:] for field in ("tokens", "parents", "sources", "odds"))
        self._tokens, self._parents, self._sources, self._odds = nodes
        self._pending: list[int] = []
        self.odds: Odds = self._odds[:0]
        """Of the nodes of the last tree: the chance that the target takes the path down to each."""

    def begin(self, prompt: Sequence[int]) -> None:
        self._catch_up()
        self.table.read(prompt)
        restart(self._corpus, self._at, np.asarray(prompt[-LONGEST_MATCH:], np.int64))

    def draft(self, context: Sequence[int]) -> DraftTree:
        most = min(self.budget.most, LARGEST_TREE)
        if not most:
            self.odds = self._odds[:0]
            return DraftTree.bare(context[-1])
        self._catch_up()
        odds = self._odds[: grow(self._corpus, self._at, most)]
        size = self.budget.nodes(odds)
        self.odds = odds[:size].copy()
        # The workspace counts the root as row 0.
        return DraftTree(context[-1], self._tokens[:size].copy(), self._parents[:size] - 1, self._sources[:size].copy())

    def observe(self, accepted: Accepted, logits: torch.Tensor) -> None:
        self._pending += accepted.tokens
        if self.budget.most:
            self._catch_up()

    def _catch_up(self) -> None:
        """Take in what was emitted; while drafting is not worth its time, this is put off."""
        if self._pending:
            feed(self._corpus, self._at, np.array(self._pending, np.int64))
            self._pending.clear()
