"""Random numbers of seed, position and token: uniform, unrelated, and the same for ever."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hdtool.runtime.core.exponential_race import ExponentialRace
from tests.support.samplers import race_winner


def test_draws_are_keyed_by_seed_position_and_token() -> None:
    draws = ExponentialRace(7)
    assert draws.uniforms(5, 100).tolist() == ExponentialRace(7).uniforms(5, 200)[:100].tolist()
    others = [
        draws.uniforms(5, 100),
        draws.uniforms(6, 100),
        ExponentialRace(8).uniforms(5, 100),
        ExponentialRace(7 + 2**63).uniforms(5, 100),
    ]
    assert len({number for row in others for number in row.tolist()}) == 400


def test_draws_are_uniform_and_unrelated() -> None:
    rows = np.stack([ExponentialRace(seed).uniforms(position, 500) for seed in range(4) for position in range(50)])
    assert rows.min() >= 0 and rows.max() < 1
    share = np.histogram(rows, bins=20, range=(0, 1))[0] / rows.size
    np.testing.assert_allclose(share, 0.05, atol=0.0025)
    related = np.corrcoef(rows)
    assert np.abs(related - np.eye(len(rows))).max() < 0.25  # six standard deviations


def test_draws_equal_pinned_values() -> None:
    """Whoever wrote a seed down gets the same answer from every later version."""
    assert ExponentialRace(0).uniforms(0, 2).round(12).tolist() == PINNED[0]
    assert ExponentialRace(2**64 - 1).uniforms(5000, 2).round(12).tolist() == PINNED[1]


PINNED = [[0.338052454196, 0.269130271226], [0.808300189932, 0.071769562068]]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.lists(st.floats(0, 1, width=32), min_size=1))
def test_the_smallest_exponential_time_wins(seed: int, position: int, weights: list[float]) -> None:
    rates = np.array(weights, np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        times = -np.log1p(-ExponentialRace(seed).uniforms(position, len(rates))) / rates
    expected = int(times.argmin()) if rates.any() else -1
    assert race_winner(ExponentialRace(seed), position, rates) == expected


@pytest.mark.parametrize("rates", [[0.0, 0.0], [np.nan, np.nan], []])
def test_no_token_is_drawn_without_probabilities(rates: list[float]) -> None:
    assert race_winner(ExponentialRace(0), 3, np.array(rates, np.float32)) == -1
