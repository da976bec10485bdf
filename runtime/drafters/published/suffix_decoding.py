"""SuffixDecoding (Oliaro et al., 2024): a tree of the most frequent continuations of one match of the context.

Two automata count continuations: one in the prompt and the current answer, the other in all answers including the
current one. Each suffix of the context that occurs in one of them is a match; the longer a match, the more nodes its
tree has. The tree with the most expected tokens is drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hdtool.runtime.budget.budgeted_drafter import BudgetedDrafter
from hdtool.runtime.budget.node_budget import Budget
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.acceptance_rates import Probs
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.core.tree import DraftTree
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
from hdtool.runtime.settings.draft_sources import SourceId

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
        # Compile the code, or load it from the cache, before the first step.
        advance(self._answers.arrays, START_STATE, 0, np.zeros(1, np.int64))
        _best_tree(self._context.arrays, START_STATE, 0, 1, config, 0.0)

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
            score, probs, keys = _best_tree(local, state, int(local.lengths[state]), max_nodes, self._config, 0.0)
        labels, source = local.labels, SourceId.CONTEXT
        if self._remembers:
            with self._timing(SourceId.HISTORY):
                earlier = self._answers.arrays
                state, matched = advance(earlier, START_STATE, 0, np.array(self._tail, np.int64))
                best, *tree = _best_tree(earlier, state, matched, max_nodes, self._config, score)
                if best > score:
                    (probs, keys), labels, source = tree, earlier.labels, SourceId.HISTORY
        return DraftTree.of(context[-1], labels[keys & EDGE_MASK], (keys >> EDGE_BITS) - 1, source), probs

    def observe(self, accepted: Accepted, verified: Verified) -> None:
        super().observe(accepted, verified)
        with self._timing(SourceId.CONTEXT):
            self._context.extend(accepted.tokens)
        if self._remembers:
            with self._timing(SourceId.HISTORY):
                self._answers.extend(accepted.tokens)
                self._tail = (self._tail + accepted.tokens)[-MAX_MATCH_TOKENS:]


@compiled
def _best_tree(
    automaton: Automaton, state: Any, matched: Any, max_nodes: int, config: SuffixConfig, score: float
) -> tuple[float, Probs, Ints]:
    """Return the highest score of any match's tree, and this tree as ``_expand`` returns it.

    A tree's score is the sum of its nodes' probabilities. If no tree scores higher than ``score``, return ``score`` and
    no nodes.
    """
    best_probs: Probs = np.empty(0)
    best_keys: Ints = np.empty(0, np.int64)
    while state > START_STATE:
        wanted = min(max_nodes, int(config.nodes_per_token * min(matched, MAX_MATCH_TOKENS) + config.extra_nodes))
        if wanted <= score:
            break  # no node adds more than 1, and shorter matches have fewer nodes
        probs, keys = _expand(automaton, state, wanted, config.min_prob)
        if probs.sum() > score:
            score, best_probs, best_keys = probs.sum(), probs, keys
        state = automaton.links[state]
        matched = automaton.lengths[state]
    return score, best_probs, best_keys


@compiled
def _expand(automaton: Automaton, state: Any, max_nodes: int, min_prob: float) -> tuple[Probs, Ints]:
    """Return ``(probs, keys)`` of the ``max_nodes`` most probable nodes below a state, most probable first.

    A key holds the number of the node's parent, from 1 on or 0 for the root, and the edge to the node's state.
    """
    probs, keys = np.empty(max_nodes), np.empty(max_nodes, np.int64)
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
        if node == size or node + 1 == max_nodes:
            return probs[:size], keys[:size]
        prob, at = probs[node], np.int64(automaton.targets[keys[node] & EDGE_MASK])
        node += 1
