"""Hierarchy Drafting as in its paper (Cho et al., 2025): a fixed number of sequences, the most local store first."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from hdtool.runtime.accept import Accepted
from hdtool.runtime.config import SOURCE_LETTERS, PaperConfig
from hdtool.runtime.drafters.lookahead import Lookahead
from hdtool.runtime.drafters.sequence_table import LENGTH, SequenceTable
from hdtool.runtime.drafters.trie import Trie, sequences_of
from hdtool.runtime.source_names import SourceName, source_of
from hdtool.runtime.tree import LARGEST_TREE, DraftTree
from hdtool.runtime.verified import Verified

if TYPE_CHECKING:
    from hdtool.runtime.stores.corpus_index import CorpusIndex
    from hdtool.runtime.stores.model_store import ModelStore


class PaperDrafter:
    """Queries its sources in order until available are enough sequences, and merges these into one tree.

    If the order names it, the context table is updated with the prompt, the emitted tokens, the n-grams of the
    lookahead branch. Missing stores are skipped.
    """

    def __init__(
        self,
        config: PaperConfig | None = None,
        *,
        model_store: ModelStore | None = None,
        corpus_index: CorpusIndex | None = None,
    ) -> None:
        self.config = config = config or PaperConfig()
        self.seconds: dict[SourceName, float] = dict.fromkeys(
            (*map(source_of, SOURCE_LETTERS), SourceName.LOOKAHEAD), 0.0
        )
        """Seconds spent in each source since the drafter was made."""
        self._store = model_store
        self._index = corpus_index
        self._table = SequenceTable(config.sequences)
        self._read = 0  # tokens of the context that are keys of the table
        self._learns = "C" in config.order
        self._lookahead = Lookahead(config.window, LENGTH + 1) if config.lookahead and self._learns else None
        extra = self._lookahead.most if self._lookahead else 0
        self._trie = Trie(LARGEST_TREE - extra, extra)
        query = {"C": self._query_context, "M": self._query_model, "S": self._query_corpus}
        available = {"C": True, "M": model_store is not None, "S": corpus_index is not None}
        self._queries = [(source_of(letter), query[letter]) for letter in config.order if available[letter]]
        self._drafted: DraftTree | None = None
        self._compile()

    def _compile(self) -> None:
        """Compile or load everything now, so that no step waits for it; ``begin`` clears the state."""
        words = [0] * (LENGTH + 1)
        self.begin(words)
        self._trie.add(np.zeros((1, LENGTH), np.int32), SourceName.NONE, wanted=1)
        for _, query in self._queries:
            query(words, 1)
        tree = self.draft(words)
        self.observe(Accepted([], words[:1]), Verified(torch.zeros(1 + len(tree), 1)))

    def begin(self, prompt: Sequence[int]) -> None:
        self._drafted = None
        self._table.clear()
        self._read = 0
        self._learn(prompt)
        if self._lookahead:
            self._lookahead.begin(prompt)

    def draft(self, context: Sequence[int]) -> DraftTree:
        self._learn(context)
        self._trie.clear()
        wanted = self.config.sequences
        for source, query in self._queries:
            if wanted <= 0:
                break
            with self._timed(source):
                wanted -= query(context, wanted)
        if self._lookahead:
            with self._timed(SourceName.LOOKAHEAD):
                self._trie.append_tree(*self._lookahead.nodes(), SourceName.LOOKAHEAD)
        self._drafted = DraftTree(context[-1], *self._trie.nodes())
        return self._drafted

    def observe(self, accepted: Accepted, verified: Verified) -> None:
        tree, self._drafted = self._drafted, None
        # Near the end of the answer the verified tree may be smaller than the drafted one.
        if tree is None or not self._learns or len(verified) != len(tree) + 1 or not verified.logits.numel():
            return
        if self._lookahead:
            with self._timed(SourceName.LOOKAHEAD):
                predicted = verified.best(len(verified) - self._lookahead.num_observed)
                self._table.add(self._lookahead.observe(tree.root, predicted))

    def _learn(self, context: Sequence[int]) -> None:
        """Add the sequences of new tokens of the context to the table."""
        if self._learns:
            with self._timed(SourceName.CONTEXT):
                fresh = context[self._read :]
                if len(fresh) > LENGTH:
                    self._table.add_text(fresh)
                    self._read = len(context) - LENGTH

    def _query_context(self, context: Sequence[int], wanted: int) -> int:
        return self._trie.add(self._table.after(context[-1]), SourceName.CONTEXT, wanted=wanted)

    def _query_model(self, context: Sequence[int], wanted: int) -> int:
        assert self._store
        phrases, _ = self._store.phrases_after(context[-1], self.config.sequences)
        return self._trie.add(phrases, SourceName.MODEL, wanted=wanted)

    def _query_corpus(self, context: Sequence[int], wanted: int) -> int:
        """The continuations of the last two tokens, then those of the last one."""
        assert self._index
        added = 0
        for length in (2, 1):
            found = self._index.after(context[-length:])
            sequences = sequences_of(found.tokens, found.parents, LENGTH, self.config.sequences)
            added += self._trie.add(sequences, SourceName.CORPUS, wanted=wanted - added)
            if added == wanted or found.matched < length:  # the index fell back to one token by itself
                break
        return added

    @contextmanager
    def _timed(self, source: SourceName) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[source] += time.perf_counter() - started


def lookahead_decoding(config: PaperConfig | None = None) -> PaperDrafter:
    """Lookahead Decoding: the context table alone, fed by the branch, the prompt and what is emitted."""
    return PaperDrafter(replace(config or PaperConfig(), order="C", lookahead=True))
