"""Compares drafts made in one run with those that passes make one after another."""

from __future__ import annotations

import numpy as np

from hdtool.runtime.core.engine_interface import Ranked
from hdtool.runtime.drafters.trained.draft_module import ROWS_PER_PASS, DraftModule
from hdtool.runtime.drafters.trained.proposal import TOKENS_PER_RANKING, Proposal


def assert_as_in_turn(module: DraftModule, first: Ranked, proposal: Proposal) -> None:
    """Assert that a proposal has the best paths, with the rankings that a module's passes give after each path."""
    assert_equal(proposal, slice(0, 1), first)
    best, path_probs = proposal.tokens.shape[1], np.ones(len(proposal.tokens))
    for depth in range(1, proposal.depths.max() + 1):
        before, rows = (np.flatnonzero(proposal.depths == each) for each in (depth - 1, depth))
        places = [np.argwhere(proposal.after == row)[0] for row in rows]
        parents, ranks = np.array(places).T
        chances = path_probs[before, None] * proposal.probs[before]
        path_probs[rows] = path_probs[parents] * proposal.probs[parents, ranks]
        assert len(rows) == min(ROWS_PER_PASS, chances.size) and best <= TOKENS_PER_RANKING
        np.testing.assert_allclose(path_probs[rows], np.sort(chances.ravel())[::-1][: len(rows)], rtol=1e-5)
        ranked = module.extend(parents.tolist(), proposal.tokens[parents, ranks].tolist())
        assert_equal(proposal, slice(rows[0], rows[-1] + 1), ranked)


def assert_equal(proposal: Proposal, rows: slice, expected: Ranked) -> None:
    np.testing.assert_allclose(proposal.probs[rows], expected[1], rtol=2e-3, atol=1e-6)
    assert (proposal.tokens[rows] == expected[0]).mean() > 0.9  # equals may stand in another order
