"""Draws by the highest scores of a row equal those by all of them, or are left to those."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from transformers import LogitsProcessorList

from hdtool.runtime.core.accept import accept
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.top_k_top_p import ALL_TOKENS, NOT_FINITE, UNDECIDED, WARPER_OPTIONS, DrawOptions, draw_row
from hdtool.runtime.core.tree import ROOT, DraftTree
from hdtool.runtime.core.tree_walks import draw_ranked, ranked_for
from hdtool.runtime.kernels.topk import MAX_RANKED
from hdtool.runtime.settings.model import SamplingConfig
from tests.support.samplers import sampler_of

VOCABULARY = 3000
TRUNCATIONS: dict[str, dict[str, Any]] = {
    "top-k": {"top_k": 50},
    "top-k and top-p": {"top_k": 20, "top_p": 0.8},
    "min-p": {"min_p": 0.05},
}


def truncating(name: str, context: list[int]) -> Sampler:
    """One with the processors of ``generate``."""
    options = TRUNCATIONS[name]
    made = [kind(options[option]) for kind, option in WARPER_OPTIONS.items() if option in options]
    return Sampler(SamplingConfig(temperature=0.8, seed=3), context, processors=LogitsProcessorList(made))


def ranking(row: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """As a device ranks: among equal scores in any order."""
    best = torch.from_numpy(row).topk(min(most, len(row)))
    return best.indices.numpy(), best.values.numpy()


def zipf(seed: int) -> np.ndarray:
    """Scores of which the k-th highest has a probability of about 1 / k squared."""
    drawn = np.random.default_rng(seed)
    scores = -2 * np.log(np.arange(1, VOCABULARY + 1)) + drawn.normal(0, 0.5, VOCABULARY)
    return drawn.permutation(scores).astype(np.float32)


@given(
    st.integers(0, 2**32),
    st.integers(2, 400),
    st.integers(1, MAX_RANKED),
    st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    st.sampled_from([0, 1, 5, 40]),
    st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.05, 0.5]),
    st.sampled_from([0.0, 0.5]),
)
def test_what_the_highest_scores_decide_is_what_all_scores_decide(
    seed: int, vocabulary: int, most: int, temperature: float, top_k: int, top_p: float, min_p: float, step: float
) -> None:
    drawn = np.random.default_rng(seed)
    row = (drawn.normal(0, 4, vocabulary)).astype(np.float32)
    if step:  # equal scores
        row = np.float32(step) * np.round(row / np.float32(step))
    row[drawn.random(vocabulary) < 0.1] = -np.inf
    row[0] = 1.0
    draws = DrawOptions(np.uint64(seed), np.float32(temperature), top_k, top_p, min_p)
    tokens, scores = ranking(row, most)
    found = draw_ranked(7, vocabulary, tokens, scores, draws)
    assert found in (UNDECIDED, draw_row(7, row, ALL_TOKENS, draws))
    if most >= vocabulary and not top_k:
        assert (found == UNDECIDED) == (top_p < 1)


@pytest.mark.parametrize("name", TRUNCATIONS)
def test_the_highest_scores_decide_where_others_are_removed(name: str) -> None:
    shortcuts = truncating(name, [0]).shortcuts
    assert shortcuts.draws and shortcuts.max_ranked == ranked_for(shortcuts.draws) <= MAX_RANKED
    for position in range(200):
        row = zipf(position)
        found = draw_ranked(position, VOCABULARY, *ranking(row, shortcuts.max_ranked), shortcuts.draws)
        assert found == draw_row(position, row, ALL_TOKENS, shortcuts.draws)


def test_other_draws_read_their_row() -> None:
    for sampling in (SamplingConfig(temperature=0.7), SamplingConfig(temperature=1.0, top_p=0.9)):
        sampler = sampler_of(sampling, [0])
        assert sampler.shortcuts.draws_by_row and not sampler.shortcuts.max_ranked
        row = torch.from_numpy(zipf(1))
        wrong = row.flip(0)[None]
        known = sampler.chooser(wrong, first=row.numpy())
        assert known(0) == sampler_of(sampling, [0]).chooser(row[None])(0)
    penalised = sampler_of(SamplingConfig(temperature=0.7, repetition_penalty=1.2), [0])
    assert not penalised.shortcuts.draws_by_row and not penalised.shortcuts.max_ranked


def test_rows_that_are_not_finite_are_noticed() -> None:
    draws = DrawOptions(np.uint64(1), np.float32(1.0), 0, 1.0, 0.1)
    for highest in (np.nan, np.inf, -np.inf):
        row = np.full(100, -np.inf, np.float32)
        row[3] = highest
        assert draw_ranked(0, 100, *ranking(row, 8), draws) == NOT_FINITE == draw_row(0, row, ALL_TOKENS, draws)


@pytest.mark.parametrize("most", [1, 5, MAX_RANKED])
@pytest.mark.parametrize("name", TRUNCATIONS)
def test_acceptance_by_rankings_equals_that_by_all_logits(name: str, most: int) -> None:
    """Walks go on with all logits of a row where its ranking does not decide."""
    longest = 0
    for seed in range(40):
        logits = torch.from_numpy(np.stack([zipf(30 * seed + row) for row in range(4)]))
        best = [int(row.argmax()) for row in logits]
        tree = DraftTree.of(1, [best[0], best[1], best[2]], [ROOT, 0, 1])
        samplers = [truncating(name, list(range(seed + 1))) for _ in range(2)]
        rankings = tuple(
            np.ascontiguousarray(part) for part in (logits.topk(most)[1].numpy(), logits.topk(most)[0].numpy())
        )
        known = Verified(logits, ranked=(rankings[0], rankings[1]))
        found, expected = (
            accept(tree, verified, sampler, stops=(5,), max_tokens=3)
            for verified, sampler in zip((known, Verified(logits)), samplers, strict=True)
        )
        assert found == expected and samplers[0].context == samplers[1].context
        longest = max(longest, len(expected.tokens) if expected else 0)
    assert longest == 3
