"""Published methods that look up n-grams: prompt lookup, REST, and lookahead decoding.

Lookahead decoding solves for many tokens at once by Jacobi iteration: from guesses at the next tokens, the target
computes the tokens after them, which are the guesses of the next iteration. A row holds the ``width`` guesses of one
iteration, and each row was computed from the one above it::

    row 0    root ── a1 ── a2 ── a3      guesses at the next tokens, a chain below the root
              │      │     │     │
    row 1     b0     b1    b2    b3      the target's argmax after each token of row 0
              │      │     │     │
    row 2     c0     c1    c2    c3      the argmax after each token of row 1, an iteration later

The argmax after the newest row completes the n-gram of a column: ``a1 b1 c1`` and that token. The rows form the
*lookahead branch* of the draft tree, directly below the root, so correct guesses are accepted like any draft token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hdtool.runtime.budget.budgeted_drafter import BudgetedDrafter
from hdtool.runtime.budget.node_budget import Budget
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.acceptance_rates import AcceptanceRates, Probs
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.core.tree import ROOT, DraftTree
from hdtool.runtime.kernels.compiled import Ints, compiled
from hdtool.runtime.settings.draft_sources import SourceId

if TYPE_CHECKING:
    from hdtool.runtime.stores.corpus_index import CorpusIndex


class GrowingContext:
    """Holds a growing context in an array, to which each call appends only the new tokens."""

    def __init__(self) -> None:
        self._tokens = np.empty(0, np.int64)
        self._size = 0

    def restart(self, prompt: Sequence[int]) -> None:
        self._size = 0
        self.grown(prompt)

    def grown(self, context: Sequence[int]) -> Ints:
        """Return ``context`` as an array that the next call may overwrite.

        ``context`` must begin with the contexts given since the last restart.
        """
        if len(context) > len(self._tokens):
            larger = np.empty(2 * len(context), np.int64)
            larger[: self._size] = self._tokens[: self._size]
            self._tokens = larger
        self._tokens[self._size : len(context)] = context[self._size :]
        self._size = len(context)
        return self._tokens[: self._size]


PRIOR_RATE = 0.6
"""Initial acceptance rate of a chain's tokens."""


def chain_of(root: int, tokens: Ints) -> DraftTree:
    """Return a tree that is a chain of ``tokens``, which come from the conversation."""
    return DraftTree.of(root, tokens, range(ROOT, len(tokens) + ROOT), SourceId.CONTEXT)


class PromptLookup(BudgetedDrafter):
    """Drafts one chain, like transformers with ``prompt_lookup_num_tokens``; the budget chooses its length.

    The chain continues the longest match of at most ``max_length`` tokens or, of equally long matches, the first one. A
    token's probability is the rate at which tokens after a match of the same length were accepted so far; the match
    includes the earlier tokens of the chain.
    """

    def __init__(self, tokens: int = 10, max_length: int = 3, budget: Budget | None = None) -> None:
        super().__init__(budget, SourceId.CONTEXT)
        self._tokens, self._max_length = tokens, max_length
        self._context = GrowingContext()
        self._rates = AcceptanceRates(np.full(max_length + tokens, PRIOR_RATE))
        """How often tokens agree with the answer, by the length of the match before them."""
        self._chain: Ints = np.empty(0, np.int64)
        """The tokens after the last match, drafted or not."""
        self._matched = 0
        first_match(self._context.grown(()), max_length)  # compile it, or load it from the cache, before the first step

    def begin(self, prompt: Sequence[int]) -> None:
        self._context.restart(prompt)
        self._chain = self._chain[:0]

    def draft(self, context: Sequence[int]) -> DraftTree:
        with self._timing(SourceId.CONTEXT):  # also in a pause of the budget, to learn from the answer
            tokens_so_far = self._context.grown(context)
            start, self._matched = first_match(tokens_so_far, self._max_length)
            # Copied, because the buffer will be overwritten.
            self._chain = tokens_so_far[start : start + self._tokens].copy()
        return super().draft(context)

    def _grow(self, context: Sequence[int], max_nodes: int) -> tuple[DraftTree, Probs]:
        tree = chain_of(context[-1], self._chain[:max_nodes])
        return tree, np.cumprod(self._rates[self._matched : self._matched + len(tree)])

    def observe(self, accepted: Accepted, verified: Verified) -> None:
        """Update the rates, also for candidates that were not drafted: the answer shows whether they are right."""
        super().observe(accepted, verified)
        compared = min(len(self._chain), len(accepted.tokens))
        agrees = self._chain[:compared] == accepted.tokens[:compared]
        classes = self._matched + np.arange(compared)
        self._rates.learn_chain(classes, int(np.logical_and.accumulate(agrees).sum()))


@compiled
def first_match(context: Ints, max_length: int) -> tuple[int, int]:
    """Find the longest earlier match of the context's last tokens or, of equally long matches, the first one.

    Return ``(start, matched)``: the index after the match, and its length; without a match, the length of the context
    and 0.
    """
    size = len(context)
    start, matched = size, 0
    for end in range(size - 1):
        if context[end] == context[size - 1]:
            length = 1
            while length < min(max_length, end + 1) and context[end - length] == context[size - 1 - length]:
                length += 1
            if length > matched:
                start, matched = end + 1, length
                if matched == max_length:
                    break
    return start, matched


class CorpusDrafter(BudgetedDrafter):
    """Drafts the most frequent continuations in the corpus index, with as many nodes as the budget allows."""

    def __init__(self, index: CorpusIndex, budget: Budget | None = None) -> None:
        super().__init__(budget, SourceId.CORPUS)
        self._index = index
        index.after(())  # compile the lookup, or load it from the cache, before the first step

    def _grow(self, context: Sequence[int], max_nodes: int) -> tuple[DraftTree, Probs]:
        with self._timing(SourceId.CORPUS):
            found = self._index.after(context, max_nodes)
            # Parents come before their children, whose counts are never larger.
            tree = DraftTree.of(context[-1], found.tokens, found.parents, SourceId.CORPUS)
            return tree, found.counts / max(found.num_matches, 1)


class Lookahead:
    """A lookahead branch of ``width`` columns, each of which completes n-grams of ``length`` tokens.

    The branch starts with row 0 only, which is wide enough to lose one column per step until all rows exist.
    """

    def __init__(self, width: int, length: int) -> None:
        self._width = width
        self._max_rows = length - 1
        self._rows: list[Ints] = []
        # Indexed by the number of rows.
        self._parents = [_parents(rows, width + self._max_rows - rows) for rows in range(self._max_rows + 1)]

    @property
    def max_nodes(self) -> int:
        """Largest number of nodes in the branch."""
        return max(map(len, self._parents))

    def begin(self, prompt: Sequence[int]) -> None:
        """Initialize the guesses with random tokens of the prompt; the seed is the prompt's length."""
        guesses = np.random.default_rng(len(prompt)).integers(len(prompt), size=self._width + self._max_rows - 2)
        self._rows = [np.array([prompt[position] for position in guesses], np.int64)]

    def branch(self) -> tuple[Ints, Ints]:
        """Return the tokens and parents of the branch."""
        return np.concatenate(self._rows), self._parents[len(self._rows)]

    @property
    def is_full(self) -> bool:
        return len(self._rows) == self._max_rows

    @property
    def num_observed(self) -> int:
        """Length of ``argmax`` in ``observe``: one token for each of the branch's last nodes."""
        return self._width if self.is_full else len(self._rows[0])

    def observe(self, root: int, argmax: Ints) -> Ints:
        """Advance the branch by the argmax after each of its last nodes; return the completed n-grams, one row each."""
        rows = self._rows
        if not self.is_full:
            # Drop the first column: its head is the new root, which was not guessed.
            self._rows = [*(row[1:] for row in rows), argmax]
            return np.empty((0, self._max_rows + 1), np.int64)
        completed = np.empty((self._width, self._max_rows + 1), np.int64)
        completed[0, 0], completed[1:, 0] = root, rows[0]
        for row, guesses in enumerate([*rows[1:], argmax], start=1):
            completed[:, row] = guesses
        self._rows = [rows[1][1:], *rows[2:], argmax]
        return completed


def _parents(rows: int, width: int) -> Ints:
    """Return the parents in a branch: row 0 is a chain below the root, and any other node follows the one above it."""
    below = np.arange(max(rows - 1, 0) * width) + ROOT
    return np.concatenate([np.arange(width - 1) + ROOT, below]).astype(np.int32)
