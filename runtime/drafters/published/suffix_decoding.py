"""SuffixDecoding (Oliaro et al., 2024): a tree of the most frequent continuations of one match of the context.

Two automata count continuations: one in the prompt and the current answer, the other in all answers including the
current one. Each suffix of the context that occurs in one of them is a match; the longer a match, the more nodes its
tree has. The tree with the most expected tokens is drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hdtool.runtime.budget.node_budget import Budget
from hdtool.runtime.config.source_names import SourceId
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.acceptance_rates import Probs
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.core.tree import LARGEST_TREE, DraftTree
from hdtool.runtime.drafters.published.budgeted import BudgetedDrafter
from hdtool.runtime.drafters.published.suffix_automaton import (
    LAST_STATE,
    NO_STATE,
    START_STATE,
    Automaton,
    SuffixAutomaton,
    advance,
)
from hdtool.runtime.kernels.best_first import insert_best
from hdtool.runtime.kernels.compiled import Ints, compiled

MAX_MATCH_TOKENS = 64
"""Maximum match length in tokens."""
EDGE_BITS = 32
EDGE_MASK = (1 << EDGE_BITS) - 1
MAX_KEPT_TOKENS = 1 << 20
"""Number of tokens of earlier answers beyond which these answers are discarded before the next one."""


class SuffixConfig(NamedTuple):
    """How many nodes to draft for a match; the defaults are those of the paper's authors."""

    nodes_per_token: float = 1.0
    """Number of nodes for each token of the match."""
    extra_nodes: float = 0.0
    """Number of nodes to add to these, whatever the length of the match."""
    min_prob: float = 0.1
    """Minimum probability of a node."""


DEFAULT_SUFFIX_CONFIG = SuffixConfig()


class FoundTree(NamedTuple):
    """Buffers for the nodes of a tree, most probable first."""

    probs: npt.NDArray[np.float64]
    keys: Ints
    """Number of the parent, counted from 1, and edge to the node's state, packed; the root is parent 0."""


class SuffixDecoding(BudgetedDrafter):
    """Drafts from the conversation and, unless ``remembers`` is False, from earlier answers."""

    def __init__(
        self, budget: Budget | None = None, config: SuffixConfig = DEFAULT_SUFFIX_CONFIG, *, remembers: bool = True
    ) -> None:
        super().__init__(budget, SourceId.CONTEXT, SourceId.HISTORY)
        self._config, self._remembers = config, remembers
        self._context, self._answers = SuffixAutomaton(), SuffixAutomaton()
        self._tail: list[int] = []
        """Last tokens of the context, to match with earlier answers."""
        self._best, self._other = _no_nodes(), _no_nodes()
        # Compile the code, or load it from the cache, before the first step.
        advance(self._answers.arrays, START_STATE, 0, np.zeros(1, np.int64))
        self._grow_from(self._context, (START_STATE, 0), 1, 0.0)

    def begin(self, prompt: Sequence[int]) -> None:
        self._context.clear()
        self._context.extend(prompt)
        self._tail = list(prompt[-MAX_MATCH_TOKENS:])
        if len(self._answers) > MAX_KEPT_TOKENS:
            self._answers.clear()
        self._answers.end_text()

    def _grow(self, context: Sequence[int], max_nodes: int) -> tuple[DraftTree, Probs]:
        with self._timing(SourceId.CONTEXT):
            local = self._context.arrays
            # The whole context occurs only once; its link leads to the longest suffix that occurred before.
            state = max(START_STATE, int(local.links[local.sizes[LAST_STATE]]))
            size, score = self._grow_from(self._context, (state, int(local.lengths[state])), max_nodes, 0.0)
        source = SourceId.CONTEXT
        if self._remembers:
            with self._timing(SourceId.HISTORY):
                self._best, self._other = self._other, self._best
                match = advance(self._answers.arrays, START_STATE, 0, np.array(self._tail, np.int64))
                size_of_earlier, score_of_earlier = self._grow_from(self._answers, match, max_nodes, score)
                if score_of_earlier > score:
                    size, source = size_of_earlier, SourceId.HISTORY
                else:
                    self._best, self._other = self._other, self._best
        probs, keys = self._best
        labels = (self._context if source == SourceId.CONTEXT else self._answers).arrays.labels
        tree = DraftTree.of(context[-1], labels[keys[:size] & EDGE_MASK], (keys[:size] >> EDGE_BITS) - 1, source)
        return tree, probs[:size]

    def observe(self, accepted: Accepted, verified: Verified) -> None:
        super().observe(accepted, verified)
        with self._timing(SourceId.CONTEXT):
            self._context.extend(accepted.tokens)
        if self._remembers:
            with self._timing(SourceId.HISTORY):
                self._answers.extend(accepted.tokens)
                self._tail = (self._tail + accepted.tokens)[-MAX_MATCH_TOKENS:]

    def _grow_from(
        self, automaton: SuffixAutomaton, match: tuple[int, int], max_nodes: int, score: float
    ) -> tuple[int, float]:
        """Write the best tree to ``_best``; return its size and score, or 0 and ``score`` if none scores higher."""
        config, state = self._config, match[0]
        bounds = config.nodes_per_token, config.extra_nodes, config.min_prob
        grown: tuple[int, float] = _best_tree(automaton.arrays, state, match[1], max_nodes, bounds, score, self._best)
        return grown


def _no_nodes() -> FoundTree:
    return FoundTree(np.zeros(LARGEST_TREE), np.zeros(LARGEST_TREE, np.int64))


@compiled
def _best_tree(
    automaton: Automaton,
    state: Any,
    matched: Any,
    max_nodes: int,
    bounds: tuple[float, float, float],
    score: float,
    found: FoundTree,
) -> tuple[int, float]:
    """Find the match whose tree has the highest score, and write this tree to ``found``.

    Return its size and score, or 0 and ``score`` if no tree scores higher than ``score``.
    """
    size, best = 0, np.int64(START_STATE)
    limit = 0
    while state > START_STATE:
        wanted = min(max_nodes, int(bounds[0] * min(matched, MAX_MATCH_TOKENS) + bounds[1]))
        if wanted <= score:
            break  # no node adds more than 1, and shorter matches have fewer nodes
        grown = _expand(automaton, state, wanted, bounds[2], found)
        total = found.probs[:grown].sum()
        if total > score:
            score, best, limit = total, np.int64(state), wanted
        state = automaton.links[state]
        matched = automaton.lengths[state]
    if best > START_STATE:
        size = _expand(automaton, best, limit, bounds[2], found)
    return size, score


@compiled
def _expand(automaton: Automaton, state: Any, max_nodes: int, min_prob: float, found: FoundTree) -> int:
    """Write the ``max_nodes`` most probable nodes below a state to ``found``; return their number."""
    probs, keys = found
    size = node = 0
    prob, at = 1.0, np.int64(state)
    while True:
        edge = np.int64(automaton.edges[at])
        unit = prob / automaton.counts[at]
        while edge != NO_STATE:
            chance = unit * automaton.counts[automaton.targets[edge]]
            if chance >= min_prob:
                size = insert_best(probs, keys, chance, node << EDGE_BITS | edge, node, size, max_nodes)
            edge = np.int64(automaton.nexts[edge])
        if node == size:
            return size
        prob, at = probs[node], np.int64(automaton.targets[keys[node] & EDGE_MASK])
        node += 1
        if node == max_nodes:
            return size
