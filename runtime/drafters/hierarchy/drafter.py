"""The default drafter: all sources in one estimate, the likeliest paths in one tree."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hdtool.runtime.accept import Accepted
from hdtool.runtime.budget.node_budget import Budget, FixedBudget, Probs
from hdtool.runtime.drafters.heads.gate import HeadsGate
from hdtool.runtime.drafters.heads.state import HeadsState
from hdtool.runtime.drafters.hierarchy.level_weights import new_weights
from hdtool.runtime.drafters.hierarchy.ranking_agreement import learn_gains
from hdtool.runtime.drafters.hierarchy.sources.context_table import LONGEST_MATCH, ContextTable
from hdtool.runtime.drafters.hierarchy.sources.corpus_evidence import no_shards, range_record
from hdtool.runtime.drafters.hierarchy.sources.heads_evidence import HEADS, note
from hdtool.runtime.drafters.hierarchy.sources.logit_rankings import RankedNodes, Rankings
from hdtool.runtime.drafters.hierarchy.sources.model_evidence import model_record
from hdtool.runtime.drafters.hierarchy.tree_builder import feed, grow, restart
from hdtool.runtime.drafters.hierarchy.workspace import WORK, Memory
from hdtool.runtime.kernels.clock import HAS_CLOCK
from hdtool.runtime.kernels.no_copy import Pinned
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.stores.corpus_index import CorpusIndex
from hdtool.runtime.stores.model_store import ModelStore
from hdtool.runtime.tree import LARGEST_TREE, DraftTree

TIMED_EVERY = 32
"""Reading the clock at every turn makes a draft a fifth slower."""
ANY_TOKEN = 2**31 - 1
FAITH, FADING = 10.0, 0.995
"""Tokens that the odds are believed before they are held against what came, and what a step leaves of the past."""
IN_DOUBT = 1.1
"""Odds are lowered only if they promise so many times what comes: most of less is chance."""

Array = npt.NDArray[Any]


class Hierarchy(Pinned):
    """Drafts from the context, the model store and the corpus index, as far as they are there.

    And from what the target thought likely: ``last`` in place of the root, ``copied`` where it last said the
    same tokens, ``recycled`` at nodes of earlier trees, whether it took them or not. What is learned of the
    sources' worth, and what is copied and recycled, is kept from one generation to the next. Trained ``heads``
    are one source more, which is asked as long as it brings more than its own pass takes.
    """

    def __init__(
        self,
        model: ModelStore | None = None,
        corpus: CorpusIndex | None = None,
        *,
        context: bool = True,
        budget: Budget | None = None,
        last: bool = False,
        copied: bool = False,
        recycled: bool = False,
        heads: HeadsState | None = None,
        vocabulary: int = ANY_TOKEN,
    ) -> None:
        """No token from ``vocabulary`` on is ever drafted."""
        self.budget = budget or FixedBudget()
        self._heads = heads
        self._asking = None if isinstance(self.budget, FixedBudget) else HeadsGate()
        self._began = time.perf_counter()
        self.table = ContextTable()
        self._stores = model, corpus  # their arrays must outlive the addresses
        self._shards = corpus.shards if corpus else no_shards()
        self._corpus = self._shards.tokens
        ranges, self._places = range_record(self._shards)
        self._rankings = Rankings(last=last, copied=copied, recycled=recycled)
        work, learned = np.zeros(1, WORK), new_weights()
        said = np.zeros(1, HEADS)
        self._memory = Memory(
            work, learned, self.table.memory, model_record(model), ranges, *self._rankings.memories, said
        )
        self._at = self._memory.addresses()
        self._fill_in(work, context, vocabulary)
        # Fields of a record cost a tenth of a microsecond each time they are asked for.
        nodes = (work[field][0, 1:] for field in ("tokens", "parents", "sources", "probs"))
        self._tokens, self._parents, self._sources, self._probs = nodes
        self._tails, self._timed, self._laps = work["tails"][0], work["timed"], work["laps"][0]
        self._depths, self._root_and_probs = work["depths"][0], work["probs"][0]
        self._recycles = recycled
        self._pending: list[int] = []
        self._drafts = 0
        self._spent = 0.0
        self._came = self._promised = FAITH
        """Tokens of late that nodes of trees brought, and what their odds had promised."""
        self._clocked = np.zeros(len(SourceName))
        self.probs: Probs = self._probs[:0]
        """Of the nodes of the last tree: the chance that the target takes the path down to each."""
        self._compile()

    def _fill_in(self, work: Array, context: bool, vocabulary: int) -> None:
        model, corpus = self._stores
        work["vocabulary"] = min(
            [vocabulary, *(store.manifest.tokenizer.vocab_size for store in self._stores if store)]
        )
        for source, there in ((SourceName.CONTEXT, context), (SourceName.MODEL, model), (SourceName.CORPUS, corpus)):
            work["has"][0, source] = bool(there)
        work["instant_at"] = work["instant"].ctypes.data

    def _compile(self) -> None:
        """Have everything compiled, or loaded, before the first step waits for it."""
        self.begin(())
        feed(self._corpus, self._at, np.empty(0, np.int64))
        grow(self._corpus, self._at, 1)
        if self._recycles:
            learn_gains(self._at, np.empty(0, np.int64), 0)

    @property
    def addresses(self) -> Array:
        """Where its memory is, which must outlive them: for compiled code that drafts for many."""
        return self._at

    @property
    def shards(self) -> int:
        """Of the corpus index."""
        return len(self._shards.places)

    @property
    def corpus(self) -> Array:
        """The tokens of the corpus index, which compiled code takes beside the addresses."""
        return self._corpus

    @property
    def weights(self) -> Any:
        """How far each level is trusted by now, by kind of evidence; see ``level_weights.py``."""
        return self._memory.weights["weight"][0]

    @property
    def rates(self) -> Any:
        """What each kind of candidate of the last logit is worth by now."""
        return self._memory.weights["rates"][0]

    @property
    def gains(self) -> Any:
        """What agreement with neighbouring rankings is worth by now, by kind."""
        return self._memory.weights["gains"][0]

    @property
    def seconds(self) -> dict[SourceName, float]:
        """The time that drafting took so far, by source; NONE is what the tree itself took.

        The whole is measured; how it is shared out was measured at every 32nd draft. Empty where
        compiled code has no clock.
        """
        whole = self._clocked.sum()
        if not whole:
            return {}
        parts = (self._spent * self._clocked / whole).tolist()
        parts[SourceName.HEADS] += self._heads.seconds if self._heads else 0.0
        return {SourceName(source): part for source, part in enumerate(parts) if part}

    def begin(self, prompt: Sequence[int]) -> None:
        self._catch_up()
        self.probs = self._probs[:0]
        if self._heads:
            self._heads.begin(list(prompt))
        self.table.read(prompt)
        restart(self._corpus, self._at, np.array(prompt[-LONGEST_MATCH:], np.int64))

    def draft(self, context: Sequence[int]) -> DraftTree:
        self._began = time.perf_counter()
        most = min(self.budget.most, LARGEST_TREE)
        if not most:
            self.probs = self._probs[:0]
            return DraftTree.bare(context[-1])
        self._catch_up()
        if self._heads and (not self._asking or self._asking.now):
            self._heads.look_ahead()
            note(self._memory.heads, self._heads.tokens, self._heads.probs)
        timed = HAS_CLOCK and self._drafts % TIMED_EVERY == 0
        self._timed[0] = timed
        started = time.perf_counter()
        grown = grow(self._corpus, self._at, most)
        self._spent += time.perf_counter() - started
        self._drafts += 1
        if timed:
            self._timed[0] = 0
            self._clocked += self._laps
        probs = self._probs[:grown]
        doubt = IN_DOUBT * self._came / self._promised
        size = self.budget.nodes(probs * doubt if doubt < 1.0 else probs)
        self.probs = probs[:size].copy()
        # The workspace counts the root as row 0.
        return DraftTree(context[-1], self._tokens[:size].copy(), self._parents[:size] - 1, self._sources[:size].copy())

    def observe(self, accepted: Accepted, logits: torch.Tensor) -> None:
        if self._heads:
            self._heads.hear(accepted)
        current = not self._pending  # else nobody knows what the rows of the tree stand behind
        behind = self._behind(len(logits)) if current and len(logits) == len(self.probs) + 1 else None
        promised = float(self.probs.sum()) if len(logits) else 0.0
        if behind and promised:
            if self._recycles:
                learn_gains(self._at, np.array(accepted.path, np.int64), len(self.probs))
            self._came = FADING * self._came + len(accepted.path)
            self._promised = FADING * self._promised + promised
        self._pending += accepted.tokens
        if self.budget.most:
            self._catch_up()
            # Only now: what is learned of these sources must not come from what they heard a moment ago.
            self._rankings.hear(accepted, logits, behind)
            if self._heads and self._asking and current and promised:
                self._asking.hear(1 + promised, time.perf_counter() - self._began)

    def _behind(self, rows: int) -> RankedNodes:
        """What so many rows of logits stand behind; the root's will have moved on when they are heard."""
        return RankedNodes(self._tails[:rows].copy(), self._depths[:rows], self._root_and_probs[:rows])

    def _catch_up(self) -> None:
        """Take in what was emitted; while drafting is not worth its time, this is put off."""
        if self._pending:
            feed(self._corpus, self._at, np.array(self._pending, np.int64))
            self._pending.clear()
