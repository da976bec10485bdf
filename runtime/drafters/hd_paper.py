"""Hierarchy Drafting as its paper describes it: a fixed number of sequences, the most local database first."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from hdtool.runtime.accept import Accepted
from hdtool.runtime.config import PaperConfig
from hdtool.runtime.drafters.discarded import discarded
from hdtool.runtime.drafters.lookahead import Lookahead
from hdtool.runtime.drafters.sequence_table import LENGTH, SequenceTable
from hdtool.runtime.drafters.trie import Trie, sequences_of
from hdtool.runtime.kernels.topk import likeliest
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.tree import LARGEST_TREE, DraftTree

if TYPE_CHECKING:
    from hdtool.runtime.stores.corpus_index import CorpusIndex
    from hdtool.runtime.stores.model_store import ModelStore

SOURCE_OF = {"C": SourceName.CONTEXT, "M": SourceName.MODEL, "S": SourceName.CORPUS}


class PaperDrafter:
    """Asks its databases in order until there are enough sequences, and unites these into one tree.

    The context table learns from the prompt, from what is emitted, from the lookahead branch and, if
    asked to, from what the target would have said after drafts that it turned down; where the order
    leaves it out, none of this is done. Databases that are named and not there are passed over.
    """

    def __init__(
        self,
        config: PaperConfig | None = None,
        *,
        model_store: ModelStore | None = None,
        corpus_index: CorpusIndex | None = None,
    ) -> None:
        self.config = config = config or PaperConfig()
        self.seconds: dict[SourceName, float] = dict.fromkeys((*SOURCE_OF.values(), SourceName.LOOKAHEAD), 0.0)
        """What each source has taken since this drafter exists."""
        self._store = model_store
        self._index = corpus_index
        self._table = SequenceTable(config.sequences)
        self._read = 0  # tokens of the context that are keys of the table already
        self._learns = "C" in config.order
        self._lookahead = Lookahead(config.window, LENGTH + 1) if config.lookahead and self._learns else None
        beside = self._lookahead.most if self._lookahead else 0
        self._trie = Trie(LARGEST_TREE - beside, beside)
        ask = {"C": self._ask_context, "M": self._ask_model, "S": self._ask_corpus}
        there = {"C": True, "M": model_store is not None, "S": corpus_index is not None}
        self._asked = [(SOURCE_OF[letter], ask[letter]) for letter in config.order if there[letter]]
        self._tail = np.empty(0, np.int64)
        self._drafted: DraftTree | None = None
        self._drafts = 0  # its nodes that are not of the lookahead branch
        self._compile()

    def _compile(self) -> None:
        """Have everything compiled, or loaded, before the first step waits for it; ``begin`` forgets what this was."""
        words = [0] * (LENGTH + 1)
        self.begin(words)
        self._trie.add(np.zeros((1, LENGTH), np.int32), SourceName.NONE, wanted=1)
        for _, ask in self._asked:
            ask(words, 1)
        tree = self.draft(words)
        self.observe(Accepted([], words[:1]), torch.zeros(1 + len(tree), 1))

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
        for source, ask in self._asked:
            if wanted <= 0:
                break
            with self._timed(source):
                wanted -= ask(context, wanted)
        self._drafts = len(self._trie)
        if self._lookahead:
            with self._timed(SourceName.LOOKAHEAD):
                self._trie.put_beside(*self._lookahead.nodes(), SourceName.LOOKAHEAD)
        self._drafted = DraftTree(context[-1], *self._trie.nodes())
        self._tail = np.array(context[-LENGTH:], np.int64)
        return self._drafted

    def observe(self, accepted: Accepted, logits: torch.Tensor) -> None:
        tree, self._drafted = self._drafted, None
        # Near the end the tree that was checked is smaller than the one drafted: nothing to learn from it then.
        if tree is None or not self._learns or len(logits) != len(tree) + 1 or not logits.numel():
            return
        if self._lookahead:
            with self._timed(SourceName.LOOKAHEAD):
                said = likeliest(logits[len(logits) - self._lookahead.asked :])
                self._table.add(self._lookahead.observe(tree.root, said))
        if self.config.discarded and self._drafts and len(self._tail) == LENGTH:
            with self._timed(SourceName.CONTEXT):
                said = likeliest(logits[1 : self._drafts + 1])
                self._table.add(discarded(self._tail, tree.tokens, tree.parents, accepted.path, said))

    def _learn(self, context: Sequence[int]) -> None:
        """The tokens of the context that four others follow by now."""
        if self._learns:
            with self._timed(SourceName.CONTEXT):
                fresh = context[self._read :]
                if len(fresh) > LENGTH:
                    self._table.add_text(fresh)
                    self._read = len(context) - LENGTH

    def _ask_context(self, context: Sequence[int], wanted: int) -> int:
        return self._trie.add(self._table.after(context[-1]), SourceName.CONTEXT, wanted=wanted)

    def _ask_model(self, context: Sequence[int], wanted: int) -> int:
        assert self._store
        phrases, _ = self._store.phrases_after(context[-1], self.config.sequences)
        return self._trie.add(phrases, SourceName.MODEL, wanted=wanted)

    def _ask_corpus(self, context: Sequence[int], wanted: int) -> int:
        """The continuations of the last two tokens, then those of the last one."""
        assert self._index
        brought = 0
        for length in (2, 1):
            found = self._index.after(context[-length:])
            sequences = sequences_of(found.tokens, found.parents, LENGTH, self.config.sequences)
            brought += self._trie.add(sequences, SourceName.CORPUS, wanted=wanted - brought)
            if brought == wanted or found.matched < length:  # the index fell back to one token by itself
                break
        return brought

    @contextmanager
    def _timed(self, source: SourceName) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[source] += time.perf_counter() - started


def lookahead_decoding(config: PaperConfig | None = None) -> PaperDrafter:
    """Lookahead Decoding: the context table alone, fed by the branch, the prompt and what is emitted."""
    return PaperDrafter(replace(config or PaperConfig(), order="C", lookahead=True, discarded=False))
