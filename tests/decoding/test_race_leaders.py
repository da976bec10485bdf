"""Draws that the leaders of a race decide equal those by all scores of the row, or are left to those."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from hdtool.runtime.core.accept import accept
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.core.exponential_race import ExponentialRace
from hdtool.runtime.core.race_leaders import LEADERS, RACE, ROUNDING, draw_among_leaders
from hdtool.runtime.core.top_k_top_p import ALL_TOKENS, NOT_FINITE, UNDECIDED, DrawOptions, draw_row
from hdtool.runtime.core.tree import ROOT, DraftTree
from hdtool.runtime.settings.model import SamplingConfig
from tests.support.races import race_of
from tests.support.samplers import sampler_of

POSITION = 7
SAMPLINGS = {
    "temperature": SamplingConfig(temperature=1.0, seed=3),
    "top-p": SamplingConfig(temperature=0.8, top_p=0.9, seed=4),
    "top-p and min-p": SamplingConfig(temperature=1.3, top_p=0.8, min_p=0.01, seed=5),
}
DRAWS = DrawOptions(np.uint64(1), np.float32(1.0), 0, 1.0, 0.0)


def row_of(seed: int, vocabulary: int, step: float = 0.0) -> np.ndarray:
    """Normal scores, some of them minus infinity, and with equal ones among them if ``step`` is set."""
    drawn = np.random.default_rng(seed)
    row = drawn.normal(0, 4, vocabulary).astype(np.float32)
    if step:
        row = np.float32(step) * np.round(row / np.float32(step))
    row[drawn.random(vocabulary) < 0.1] = -np.inf
    row[drawn.integers(vocabulary)] = 1.0
    return row


@given(
    st.integers(0, 2**64 - 1),
    st.sampled_from([1, 2, 7, 8, 9, 100, 5000]),
    st.sampled_from([1e-6, 0.1, 0.7, 1.0, 2.0, 1e6]),
    st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 0.05]),
    st.sampled_from([0.0, 1e-4, 0.5]),
)
def test_what_the_leaders_decide_is_what_all_scores_decide(
    seed: int, vocabulary: int, temperature: float, top_p: float, min_p: float, step: float
) -> None:
    row = row_of(seed % 1000, vocabulary, step)
    draws = DrawOptions(np.uint64(seed), np.float32(temperature), 0, top_p, min_p)
    found = draw_among_leaders(POSITION, race_of(row, POSITION, draws), draws)
    assert found in (UNDECIDED, draw_row(POSITION, row, ALL_TOKENS, draws))
    if top_p == 1 and not min_p:
        assert found != UNDECIDED


@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.8])
@pytest.mark.parametrize("temperature", [0.5, 0.7, 1.0])
def test_the_leaders_decide_nearly_all_draws(temperature: float, top_p: float) -> None:
    decided = 0
    for seed in range(200):
        draws = DrawOptions(np.uint64(seed), np.float32(temperature), 0, top_p, 0.0)
        row = row_of(seed, 3000)
        decided += draw_among_leaders(POSITION, race_of(row, POSITION, draws), draws) != UNDECIDED
    assert decided >= (200 if top_p == 1 else 196)


def test_a_device_that_rounds_as_much_as_it_may_changes_no_draw() -> None:
    for seed in range(200):
        drawn = np.random.default_rng(seed)
        draws = DRAWS._replace(seed=np.uint64(seed), top_p=0.9 if seed % 2 else 1.0)
        row = row_of(seed, 300)
        race = race_of(row, POSITION, draws)
        for field in ("certain", "possible", "total"):
            race[field] *= 1 + drawn.uniform(-ROUNDING / 4, ROUNDING / 4)
        race["keys"] += drawn.uniform(-ROUNDING / 2, ROUNDING / 2, LEADERS)
        order = np.argsort(-race["keys"], kind="stable")
        for field in ("tokens", "scores", "keys", "certain", "possible"):
            race[field] = race[field][order]
        found = draw_among_leaders(POSITION, race, draws)
        assert found in (UNDECIDED, draw_row(POSITION, row, ALL_TOKENS, draws))


@pytest.mark.parametrize("number", [LEADERS - 1, LEADERS + 1])
def test_a_draw_that_a_token_may_win_that_does_not_lead_is_left_to_all_scores(number: int) -> None:
    """So many tokens are equally fast, but for the rounding of their scores, and all others too slow."""
    times = -np.log1p(-ExponentialRace(int(DRAWS.seed)).uniforms(POSITION, 30))
    row = np.full(30, -30, np.float32)
    row[:number] = np.log(times[:number])
    found = draw_among_leaders(POSITION, race_of(row, POSITION, DRAWS), DRAWS)
    assert found == (draw_row(POSITION, row, ALL_TOKENS, DRAWS) if number < LEADERS else UNDECIDED)


@pytest.mark.parametrize("field", ["tokens", "keys", "scores"])
def test_a_device_that_draws_other_numbers_decides_nothing(field: str) -> None:
    row = row_of(2, 300)
    race = race_of(row, POSITION, DRAWS)
    race[field] += 1
    assert draw_among_leaders(POSITION, race, DRAWS) == UNDECIDED
    other = race_of(row, POSITION + 1, DRAWS)
    assert draw_among_leaders(POSITION, other, DRAWS) == UNDECIDED


@pytest.mark.parametrize("field", ["keys", "total", "possible"])
def test_infinite_keys_and_sums_that_are_no_numbers_decide_nothing(field: str) -> None:
    row, draws = np.linspace(0, 1, 300, dtype=np.float32), DRAWS._replace(top_p=0.9)
    race = race_of(row, POSITION, draws)
    assert draw_among_leaders(POSITION, race, draws) == draw_row(POSITION, row, ALL_TOKENS, draws)
    race[field] = np.inf if field == "keys" else np.nan
    assert draw_among_leaders(POSITION, race, draws) == UNDECIDED


def test_rows_that_are_not_finite_are_noticed() -> None:
    for highest in (np.nan, np.inf, -np.inf):
        row = np.full(100, -np.inf, np.float32)
        row[3] = highest
        race = np.zeros(1, RACE)[0]
        race["highest"] = highest
        assert draw_among_leaders(0, race, DRAWS) == NOT_FINITE == draw_row(0, row, ALL_TOKENS, DRAWS)


@pytest.mark.parametrize("damaged", [None, 0, 1, 2])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_acceptance_by_races_equals_that_by_all_logits(name: str, damaged: int | None) -> None:
    """Walks go on with all logits of a row whose race does not decide."""
    longest = 0
    for seed in range(40):
        logits = torch.from_numpy(np.stack([row_of(30 * seed + row, 500) for row in range(4)]))
        prompt = list(range(seed + 1))
        expected_tokens = [
            sampler_of(SAMPLINGS[name], prompt + [0] * row).chooser(logits[row][None])(0) for row in range(3)
        ]
        tree = DraftTree.of(1, expected_tokens, [ROOT, 0, 1])
        samplers = [sampler_of(SAMPLINGS[name], prompt) for _ in range(2)]
        draws = samplers[0].shortcuts.races
        assert draws
        races = np.array([race_of(logits[row].numpy(), seed + 1 + row, draws) for row in range(4)])
        if damaged is not None:
            races["keys"][damaged] += 1
        found, expected = (
            accept(tree, verified, sampler, stops=(5,), max_tokens=4)
            for verified, sampler in zip((Verified(logits, races=races), Verified(logits)), samplers, strict=True)
        )
        assert found == expected and samplers[0].context == samplers[1].context
        longest = max(longest, len(expected.tokens) if expected else 0)
    assert longest == 4


def test_only_unprocessed_draws_without_rankings_race() -> None:
    for sampling in SAMPLINGS.values():
        shortcuts = sampler_of(sampling, [0]).shortcuts
        assert shortcuts.races == shortcuts.draws and shortcuts.draws_by_row
    for sampling in (
        SamplingConfig(),
        SamplingConfig(temperature=1.0, top_k=5),
        SamplingConfig(temperature=1.0, top_k=100),
        SamplingConfig(temperature=1.0, min_p=0.1),
        SamplingConfig(temperature=1.0, repetition_penalty=1.2),
    ):
        assert sampler_of(sampling, [0]).shortcuts.races is None
