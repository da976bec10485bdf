"""Record the drafts of transformers' assisted generation and of hdtool, by the length of the context."""

from __future__ import annotations

from typing import Any

import pytest

Drafts = dict[int, list[int]]


def drafts_of_library(monkeypatch: pytest.MonkeyPatch, generator: Any) -> Drafts:
    """Record what a candidate generator of transformers drafts from now on."""
    found: Drafts = {}
    drafts = generator.get_candidates

    def recorded(self: Any, input_ids: Any, *given: Any, **named: Any) -> Any:
        candidates = drafts(self, input_ids, *given, **named)
        found[input_ids.shape[1]] = candidates[0][0, input_ids.shape[1] :].tolist()
        return candidates

    monkeypatch.setattr(generator, "get_candidates", recorded)
    return found


def best_chains(drafter: Any) -> Drafts:
    """Record the chain of best tokens that a trained drafter proposes from now on, and draft that chain only."""
    found: Drafts = {}
    propose, draft, context = drafter.trained.propose, drafter.draft, list[int]()

    def noted(most: int) -> Any:
        proposal = propose(most)
        chain, at = list[int](), 0
        while at >= 0:
            chain.append(int(proposal.tokens[at, 0]))
            at = int(proposal.after[at, 0])
        found[len(context)] = chain
        return proposal

    def chain_of(known: list[int]) -> Any:
        context[:] = known
        return draft(known).first_chain()

    drafter.trained.propose, drafter.draft = noted, chain_of
    return found
