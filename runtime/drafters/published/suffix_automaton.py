"""An online suffix automaton (Blumer et al., 1985) that counts occurrences, and SAM-Decoding, which uses it.

A state represents the substrings that end at the same places. Its link leads to the longest suffix of these substrings
that occurs at more places, so following the links enumerates the matches of the end of the text, longest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hdtool.runtime.budget.budgeted_drafter import BudgetedDrafter
from hdtool.runtime.budget.node_budget import Budget
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.acceptance_rates import AcceptanceRates, Probs
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.drafters.published.lookup_methods import PRIOR_RATE, chain_of
from hdtool.runtime.kernels.compiled import Ints, compiled
from hdtool.runtime.settings.draft_sources import SourceId

NO_STATE = -1
START_STATE = 0
"""The state of the empty string."""
NUM_TOKENS, NUM_STATES, NUM_EDGES, LAST_STATE = range(4)
"""Indices in ``Automaton.sizes``: numbers of tokens, states and edges in use, and the state of the text so far."""
STATES_PER_TOKEN, EDGES_PER_TOKEN, SLOTS_PER_TOKEN = 2, 3, 8


class Automaton(NamedTuple):
    """Arrays of a suffix automaton, which compiled code reads and extends."""

    sizes: Ints
    tokens: Ints
    lengths: Ints
    """Length of each state's longest substring."""
    links: Ints
    ends: Ints
    """Place after the first occurrence of each state's substrings."""
    counts: Ints
    """Number of occurrences of each state's substrings."""
    edges: Ints
    """Latest edge of each state."""
    sources: Ints
    """State that each edge leaves."""
    labels: Ints
    """Token of each edge."""
    targets: Ints
    """State that each edge enters."""
    nexts: Ints
    """Next older edge of the same state."""
    slots: Ints
    """Hash table of the edges by state and token."""


class SuffixAutomaton:
    """A suffix automaton of one or more texts, which grows as tokens are added."""

    def __init__(self, tokens: int = 1024) -> None:
        """``tokens`` is the initial capacity in tokens, a power of two."""
        self.arrays = _empty(tokens)
        self.extend((0,))  # compile the code, or load it from the cache, before the first step
        self.clear()

    def __len__(self) -> int:
        return int(self.arrays.sizes[NUM_TOKENS])

    def clear(self) -> None:
        self.arrays.sizes[:] = 0, 1, 0, START_STATE
        self.arrays.edges[START_STATE] = NO_STATE
        self.arrays.slots[:] = NO_STATE

    def extend(self, tokens: Sequence[int] | Ints) -> None:
        """Append tokens to the current text."""
        needed = len(self) + len(tokens)
        if needed > len(self.arrays.tokens):
            before, self.arrays = self.arrays, _empty(1 << (needed - 1).bit_length())
            _move(before, self.arrays)
        _extend_all(self.arrays, np.asarray(tokens, np.int64))

    def end_text(self) -> None:
        """End the current text; the next token begins another one."""
        self.arrays.sizes[LAST_STATE] = START_STATE


def _empty(tokens: int) -> Automaton:
    states, edges = STATES_PER_TOKEN * tokens + 1, EDGES_PER_TOKEN * tokens + 1
    lengths, links, ends, counts, latest = (np.zeros(states, np.int32) for _ in range(5))
    sources, labels, targets, nexts = (np.zeros(edges, np.int32) for _ in range(4))
    links[START_STATE] = latest[START_STATE] = NO_STATE
    slots = np.full(SLOTS_PER_TOKEN * tokens, NO_STATE, np.int32)
    sizes, text = np.array([0, 1, 0, START_STATE]), np.zeros(tokens, np.int32)
    return Automaton(sizes, text, lengths, links, ends, counts, latest, sources, labels, targets, nexts, slots)


def _move(old: Automaton, new: Automaton) -> None:
    for before, after in zip(old[:-1], new[:-1], strict=True):
        after[: len(before)] = before
    _index(new)


@compiled
def _index(automaton: Automaton) -> None:
    for edge in range(automaton.sizes[NUM_EDGES]):
        automaton.slots[_slot(automaton, automaton.sources[edge], automaton.labels[edge])] = edge


@compiled
def _slot(automaton: Automaton, state: Any, token: Any) -> Any:
    """Return the slot that holds an edge, or the free slot where it belongs."""
    mixed_hash = np.uint64(state) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(token) * np.uint64(0xC2B2AE3D27D4EB4F)
    slot_mask = np.int64(len(automaton.slots) - 1)
    slot = np.int64((mixed_hash ^ (mixed_hash >> np.uint64(29))) & np.uint64(0x7FFFFFFF)) & slot_mask
    while True:
        edge = automaton.slots[slot]
        if edge == NO_STATE or (automaton.sources[edge] == state and automaton.labels[edge] == token):
            return slot
        slot = (slot + 1) & slot_mask


@compiled
def after(automaton: Automaton, state: Any, token: Any) -> Any:
    """Return the state that ``token`` leads to from ``state``, or ``NO_STATE``."""
    edge = automaton.slots[_slot(automaton, state, token)]
    return automaton.targets[edge] if edge != NO_STATE else np.int32(NO_STATE)


@compiled
def advance(automaton: Automaton, state: Any, matched: Any, tokens: Ints) -> tuple[Any, Any]:
    """Read tokens of another text; return the state and length of this text's longest suffix in the automaton."""
    for token in tokens:
        while state != START_STATE and after(automaton, state, token) == NO_STATE:
            state = automaton.links[state]
            matched = automaton.lengths[state]
        further = after(automaton, state, token)
        if further != NO_STATE:
            state, matched = further, matched + 1
    return state, matched


@compiled
def _extend_all(automaton: Automaton, tokens: Ints) -> None:
    for token in tokens:
        _extend(automaton, token)


@compiled
def _extend(automaton: Automaton, token: Any) -> None:
    sizes, links, counts = automaton.sizes, automaton.links, automaton.counts
    automaton.tokens[sizes[NUM_TOKENS]] = token
    sizes[NUM_TOKENS] += 1
    last = sizes[LAST_STATE]
    known = after(automaton, last, token)
    if known != NO_STATE:
        current = _reached(automaton, last, token, known)
    else:
        current = _new_state(automaton, automaton.lengths[last] + 1, sizes[NUM_TOKENS])
        state = last
        while state != NO_STATE and after(automaton, state, token) == NO_STATE:
            _add_edge(automaton, state, token, current)
            state = links[state]
        suffix = np.int64(START_STATE)
        if state != NO_STATE:
            suffix = _reached(automaton, state, token, after(automaton, state, token))
        links[current] = suffix
    sizes[LAST_STATE] = current
    while current != START_STATE:
        counts[current] += 1
        current = links[current]


@compiled
def _reached(automaton: Automaton, state: Any, token: Any, target: Any) -> Any:
    """Return the state that represents the longest substring of ``state`` followed by ``token``.

    This is the edge's ``target``, which is split if it also represents longer substrings.
    """
    length = automaton.lengths[state] + 1
    if automaton.lengths[target] == length:
        return np.int64(target)
    part = _new_state(automaton, length, automaton.ends[target])
    automaton.counts[part], automaton.links[part] = automaton.counts[target], automaton.links[target]
    edge = automaton.edges[target]
    while edge != NO_STATE:
        _add_edge(automaton, part, automaton.labels[edge], automaton.targets[edge])
        edge = automaton.nexts[edge]
    while state != NO_STATE and after(automaton, state, token) == target:
        automaton.targets[automaton.slots[_slot(automaton, state, token)]] = part
        state = automaton.links[state]
    automaton.links[target] = part
    return part


@compiled
def _new_state(automaton: Automaton, length: Any, end: Any) -> Any:
    state = automaton.sizes[NUM_STATES]
    automaton.sizes[NUM_STATES] += 1
    automaton.lengths[state], automaton.ends[state] = length, end
    automaton.counts[state], automaton.edges[state] = 0, NO_STATE
    return state


@compiled
def _add_edge(automaton: Automaton, state: Any, token: Any, target: Any) -> None:
    edge = automaton.sizes[NUM_EDGES]
    automaton.sizes[NUM_EDGES] += 1
    automaton.slots[_slot(automaton, state, token)] = edge
    automaton.sources[edge], automaton.labels[edge], automaton.targets[edge] = state, token, target
    automaton.nexts[edge], automaton.edges[state] = automaton.edges[state], edge


TOKENS_AHEAD = 40
"""Maximum number of tokens in a draft."""


class SamDecoding(BudgetedDrafter):
    """Drafts the text after the longest match as a chain; one rate estimates how often its next token is accepted."""

    def __init__(self, budget: Budget | None = None) -> None:
        super().__init__(budget, SourceId.CONTEXT)
        self._automaton = SuffixAutomaton()
        self._rates = AcceptanceRates([PRIOR_RATE])

    def begin(self, prompt: Sequence[int]) -> None:
        self._automaton.clear()
        self._automaton.extend(prompt)
        self._drafted = 0

    def draft(self, context: Sequence[int]) -> DraftTree:
        tree = super().draft(context)
        self._drafted = len(tree)
        return tree

    def _grow(self, context: Sequence[int], max_nodes: int) -> tuple[DraftTree, Probs]:
        with self._timing(SourceId.CONTEXT):
            automaton = self._automaton.arrays
            size = int(automaton.sizes[NUM_TOKENS])
            # The whole context occurs only once; its link leads to the longest suffix that occurred before.
            match = automaton.links[automaton.sizes[LAST_STATE]]
            start = int(automaton.ends[match]) if match > START_STATE else size
            chain = automaton.tokens[start : min(size, start + min(TOKENS_AHEAD, max_nodes))]
            return chain_of(context[-1], chain), np.cumprod(self._rates[np.zeros(len(chain), np.int64)])

    def observe(self, accepted: Accepted, verified: Verified) -> None:
        super().observe(accepted, verified)
        with self._timing(SourceId.CONTEXT):
            self._rates.learn_chain(np.zeros(self._drafted, np.int64), len(accepted.path))
            self._automaton.extend(accepted.tokens)
