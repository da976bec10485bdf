"""Hierarchy Drafting as published (Cho et al., 2025): query databases in order until enough sequences are found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.drafter import Drafter
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.core.tree import LARGEST_TREE, DraftTree, Trie, sequences_of
from hdtool.runtime.drafters.published.lookup_methods import Lookahead
from hdtool.runtime.kernels.compiled import Ints, compiled
from hdtool.runtime.settings.decoding import PaperConfig
from hdtool.runtime.settings.draft_sources import SOURCE_LETTERS, SourceId, source_of

if TYPE_CHECKING:
    from hdtool.runtime.stores.corpus_index import CorpusIndex
    from hdtool.runtime.stores.model_store import ModelStore

SEQUENCE_LENGTH = 4
"""Number of tokens in a stored sequence, not counting its key, which is the token before it."""
INITIAL_KEYS = 1 << 10


class SequenceTable:
    """Stores the ``per_key`` most recent sequences that followed each token.

    A sequence that occurs again is stored only once and becomes the most recent one.
    """

    def __init__(self, per_key: int) -> None:
        self.per_key = per_key
        self._used = 0
        self._row_of = np.full(INITIAL_KEYS, -1, np.int32)
        self._rows = np.empty((INITIAL_KEYS, per_key, SEQUENCE_LENGTH), np.int32)
        self._filled = np.empty(INITIAL_KEYS, np.int32)

    def clear(self) -> None:
        self._row_of.fill(-1)
        self._used = 0

    def add_text(self, tokens: Sequence[int]) -> None:
        """Add each token of a text as a key, with the ``SEQUENCE_LENGTH`` tokens that follow it."""
        self._add(np.array(tokens, np.int32), len(tokens) - SEQUENCE_LENGTH, 1)

    def add(self, sequences: Ints) -> None:
        """Add sequences, one row each: a key and the tokens after it. The last row is the most recent."""
        self._add(sequences.astype(np.int32).reshape(-1), len(sequences), SEQUENCE_LENGTH + 1)

    def _add(self, tokens: Ints, count: int, stride: int) -> None:
        if count > 0:
            self._make_room(int(tokens.max()), count)
            self._used = _add(self._row_of, self._rows, self._filled, self._used, tokens, count, stride)

    def after(self, token: int) -> Ints:
        """Return the sequences that followed a token, one row each, most recent first."""
        row = self._row_of[token] if 0 <= token < len(self._row_of) else -1
        return self._rows[row, : self._filled[row]] if row >= 0 else self._rows[0, :0]

    def _make_room(self, max_token: int, more: int) -> None:
        """Grow the table, if needed, for ``more`` further keys and for token ids up to ``max_token``."""
        if max_token >= len(self._row_of):
            added = np.full(max(max_token + 1, 2 * len(self._row_of)) - len(self._row_of), -1, np.int32)
            self._row_of = np.concatenate([self._row_of, added])
        if self._used + more > len(self._rows):
            size = 2 * (self._used + more)
            rows, filled = np.empty((size, self.per_key, SEQUENCE_LENGTH), np.int32), np.empty(size, np.int32)
            rows[: self._used], filled[: self._used] = self._rows[: self._used], self._filled[: self._used]
            self._rows, self._filled = rows, filled


@compiled
def _add(row_of: Ints, rows: Ints, filled: Ints, used: int, tokens: Ints, count: int, stride: int) -> int:
    """Add ``count`` sequences whose keys are ``stride`` apart in ``tokens``; return the number of rows in use."""
    per_key = rows.shape[1]
    for start in range(0, count * stride, stride):
        key = tokens[start]
        if row_of[key] < 0:
            row_of[key] = used
            filled[used] = 0
            used += 1
        row = row_of[key]
        index = 0
        while index < filled[row] and not _equals_row(rows[row, index], tokens, start + 1):
            index += 1
        if index == filled[row]:
            filled[row] = min(index + 1, per_key)
            index = filled[row] - 1
        for moved in range(index, 0, -1):
            rows[row, moved] = rows[row, moved - 1]
        rows[row, 0] = tokens[start + 1 : start + 1 + SEQUENCE_LENGTH]
    return used


@compiled
def _equals_row(row: Ints, tokens: Ints, start: int) -> bool:
    level = 0
    while level < SEQUENCE_LENGTH and row[level] == tokens[start + level]:
        level += 1
    return level == SEQUENCE_LENGTH


class PaperDrafter(Drafter):
    """Queries its sources in order until it has enough sequences, and merges these into one tree.

    If ``config.order`` includes the context table, the prompt, emitted tokens and n-grams of the lookahead branch are
    added to this table. Sources without a store are skipped.
    """

    def __init__(
        self,
        config: PaperConfig | None = None,
        *,
        model_store: ModelStore | None = None,
        corpus_index: CorpusIndex | None = None,
    ) -> None:
        self.config = config = config or PaperConfig()
        super().__init__(*map(source_of, SOURCE_LETTERS), SourceId.LOOKAHEAD)
        self._store = model_store
        self._index = corpus_index
        self._table = SequenceTable(config.sequences)
        self._read = 0  # number of context tokens whose sequences are in the table
        self._learns = "C" in config.order
        self._lookahead = Lookahead(config.window, SEQUENCE_LENGTH + 1) if config.lookahead and self._learns else None
        extra = self._lookahead.max_nodes if self._lookahead else 0
        self._trie = Trie(LARGEST_TREE - extra, extra)
        query = {"C": self._query_context, "M": self._query_model, "S": self._query_corpus}
        available = {"C": True, "M": model_store is not None, "S": corpus_index is not None}
        self._queries = [(source_of(letter), query[letter]) for letter in config.order if available[letter]]
        self._drafted: DraftTree | None = None
        self._compile()

    def _compile(self) -> None:
        """Compile all code, or load it from the cache, in a dummy step, whose state the next ``begin`` clears."""
        words = [0] * (SEQUENCE_LENGTH + 1)
        self.begin(words)
        self._trie.add(np.zeros((1, SEQUENCE_LENGTH), np.int32), SourceId.NONE, wanted=1)
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
            with self._timing(source):
                wanted -= query(context, wanted)
        if self._lookahead:
            with self._timing(SourceId.LOOKAHEAD):
                self._trie.append_tree(*self._lookahead.branch(), SourceId.LOOKAHEAD)
        self._drafted = DraftTree(context[-1], *self._trie.copy_arrays())
        return self._drafted

    def observe(self, accepted: Accepted, verified: Verified) -> None:
        tree, self._drafted = self._drafted, None
        # Near the end of an answer, the verified tree may be smaller than the drafted one.
        if tree is None or not self._learns or len(verified) != len(tree) + 1 or not verified.logits.numel():
            return
        if self._lookahead:
            with self._timing(SourceId.LOOKAHEAD):
                predicted = verified.best(len(verified) - self._lookahead.num_observed)
                self._table.add(self._lookahead.observe(tree.root, predicted))

    def _learn(self, context: Sequence[int]) -> None:
        """Add the sequences from the new part of the context to the table."""
        if self._learns:
            with self._timing(SourceId.CONTEXT):
                fresh = context[self._read :]
                if len(fresh) > SEQUENCE_LENGTH:
                    self._table.add_text(fresh)
                    self._read = len(context) - SEQUENCE_LENGTH

    def _query_context(self, context: Sequence[int], wanted: int) -> int:
        return self._trie.add(self._table.after(context[-1]), SourceId.CONTEXT, wanted=wanted)

    def _query_model(self, context: Sequence[int], wanted: int) -> int:
        assert self._store
        phrases, _ = self._store.phrases_after(context[-1], self.config.sequences)
        return self._trie.add(phrases, SourceId.MODEL, wanted=wanted)

    def _query_corpus(self, context: Sequence[int], wanted: int) -> int:
        """Add to the tree continuations of the last two tokens, then of the last token alone; return their number."""
        assert self._index
        added = 0
        for length in (2, 1):
            continuations = self._index.after(context[-length:])
            sequences = sequences_of(
                continuations.tokens, continuations.parents, SEQUENCE_LENGTH, self.config.sequences
            )
            added += self._trie.add(sequences, SourceId.CORPUS, wanted=wanted - added)
            if added == wanted or continuations.matched < length:  # the index has already fallen back to one token
                break
        return added


def lookahead_decoding(config: PaperConfig | None = None) -> PaperDrafter:
    """Return a drafter for Lookahead Decoding, whose only sources are the context table and a lookahead branch."""
    return PaperDrafter(replace(config or PaperConfig(), order="C", lookahead=True))
