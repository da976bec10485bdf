"""The minimum draft probability by batch and time of passes."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from hdtool.runtime.budget.min_probability import MIN_FLOOR, NO_DRAFT_ABOVE, MinProbability


def throughput(min_probability: MinProbability, rows: int, seconds: Callable[[int], float], passes: int) -> float:
    """Tokens per second of simulated passes, which take ``seconds`` by their tokens and follow the minimum."""
    chance, emitted, passed = random.Random(1), 0, 0.0
    for _ in range(passes):
        floor = min_probability.floor(rows)
        probs = [chance.random() for _ in range(4 * rows)]
        sent = [odd for odd in probs if odd >= floor and floor < NO_DRAFT_ABOVE]
        taken = sum(chance.random() < odd for odd in sent)
        tokens = rows + len(sent)
        min_probability.observe(rows, tokens, rows + taken, seconds(tokens) * chance.uniform(0.9, 1.1))
        emitted, passed = emitted + rows + taken, passed + seconds(tokens)
    return emitted / passed


def estimated(
    rows: int, seconds: Callable[[int], float], passes: int = 300, min_probability: MinProbability | None = None
) -> MinProbability:
    """The estimate after simulated passes."""
    min_probability = min_probability or MinProbability()
    throughput(min_probability, rows, seconds, passes)
    return min_probability


def test_a_pass_with_room_takes_every_draft() -> None:
    assert estimated(8, lambda tokens: 0.02).floor(8) < 0.1


def test_nothing_pays_if_each_token_costs_as_much_as_the_first() -> None:
    assert estimated(8, lambda tokens: 1e-3 * tokens).floor(8) >= 0.75


def test_the_minimum_probability_grows_with_the_batch() -> None:
    floors = [estimated(rows, lambda tokens: 0.01 + 1e-4 * tokens).floor(rows) for rows in (1, 8, 32, 128)]
    assert floors == sorted(floors)
    assert floors[0] < 0.1 < floors[-1]


def test_the_minimum_probability_maximizes_tokens_per_second() -> None:
    """With given costs and uniform probabilities, the best minimum can be computed."""
    rows, base, each = 16, 0.01, 2e-4

    def rate(floor: float) -> float:
        sent = 4 * rows * (1 - floor)
        return float((rows + sent * (1 + floor) / 2) / (base + each * (rows + sent)))

    best = max(np.arange(0.02, 0.98, 0.01), key=rate)
    assert estimated(rows, lambda tokens: base + each * tokens, 1000).floor(rows) == pytest.approx(best, abs=0.1)


def test_the_prior_depends_on_the_batch() -> None:
    assert MinProbability().floor(1) == MIN_FLOOR
    assert MinProbability().floor(8) < 0.1
    assert MinProbability().floor(256) == 0.5


def test_a_token_is_expected_to_cost_more_on_a_cpu() -> None:
    assert MinProbability(on_cpu=True).floor(1) == pytest.approx(1 / 33)
    assert MinProbability(on_cpu=True).floor(32) == 0.5
    first = MinProbability(on_cpu=True)
    first.observe(8, 8, 8, 0.1)
    assert first.floor(8) == pytest.approx(0.2), "one pass says nothing of the cost of a token"


@pytest.mark.parametrize("rows", [8, 32])
def test_little_is_lost_while_a_cpus_costs_are_learned(rows: int) -> None:
    """Where each token costs as much as the first, all drafts lose time, so plain decoding is the best."""
    plain = 1000.0
    unknown, on_cpu = (throughput(MinProbability(on_cpu=cpu), rows, lambda t: t / plain, 40) for cpu in (False, True))
    assert on_cpu > max(unknown, 0.9 * plain)


def test_the_estimate_extends_to_other_batch_sizes() -> None:
    min_probability = estimated(2, lambda tokens: 0.01 + 1e-4 * tokens)
    assert min_probability.floor(200) > 4 * min_probability.floor(2)


def test_drafting_is_tried_again_after_it_did_not_pay() -> None:
    min_probability = estimated(8, lambda tokens: 1e-3 * tokens)
    assert estimated(8, lambda tokens: 0.01, 2000, min_probability).floor(8) < 0.1


def test_a_fixed_minimum_is_used_as_it_is() -> None:
    assert estimated(8, lambda tokens: 1e-3 * tokens, min_probability=MinProbability(0.3)).floor(8) == 0.3


def test_only_passes_over_the_same_requests_count() -> None:
    """Other passes include prefill, so their time does not measure drafts."""
    rows, lengths, sent = np.arange(3), np.array([10, 20, 30]), np.array([0, 2, 4])
    for grown, counts in (([1, 3, 5], 1), ([1, 1, 1], 1), ([2, 3, 5], 0), ([1, 0, 5], 0), ([1, 3, 500], 0)):
        min_probability = MinProbability()
        min_probability.record_drafts(0.0, rows, lengths, sent)
        min_probability.begin_step(0.5, rows, lengths + grown)
        unchanged = MinProbability()
        assert (min_probability.floor(200) != unchanged.floor(200)) == bool(counts)
        unchanged.record_drafts(0.0, rows, lengths, sent)
        unchanged.begin_step(0.5, rows[:2], (lengths + grown)[:2])
        assert unchanged.floor(200) == MinProbability().floor(200)


def test_a_stalled_pass_has_little_weight() -> None:
    calm, stalled = (estimated(8, lambda tokens: 0.01 + 1e-4 * tokens) for _ in range(2))
    calm.observe(8, 20, 12, 0.012)
    stalled.observe(8, 20, 12, 60.0)
    assert stalled.floor(8) < 2 * calm.floor(8)
