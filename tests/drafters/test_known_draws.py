"""Known draws: candidates that the seed favors at their position are more probable."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.core.drafter import WrappedDrafter
from hdtool.runtime.core.exponential_race import ExponentialRace
from hdtool.runtime.core.session import decode
from hdtool.runtime.drafters.hierarchy.hierarchy import Hierarchy
from hdtool.runtime.settings.model import SamplingConfig
from hdtool.runtime.target.target import Target
from tests.support.families import model_of
from tests.support.samplers import race_winner, sampler_of

FOLLOWERS = (5, 6, 7, 8)
PROMPT = [token for follower in FOLLOWERS for token in (1, follower)] + [1]
"""Each of the followers came once after the last token."""


def drafted(seed: int | None) -> dict[int, float]:
    """The probability of each follower in a tree below the prompt."""
    hierarchy = Hierarchy(budget=FixedBudget(8))
    hierarchy.set_seed(seed)
    hierarchy.begin(PROMPT)
    tree = hierarchy.draft(PROMPT)
    first = np.flatnonzero(tree.parents < 0)
    return dict(zip(tree.tokens[first].tolist(), hierarchy.probs[first].tolist(), strict=True))


@pytest.mark.parametrize("seed", range(6))
def test_equal_candidates_are_ordered_by_their_times(seed: int) -> None:
    times = -np.log1p(-ExponentialRace(seed).uniforms(len(PROMPT), 10))
    recent = drafted(None)
    # Followers differ in how long ago they occurred, so probabilities are compared with those of a greedy answer.
    gains = {token: probability / recent[token] for token, probability in drafted(seed).items()}
    assert sorted(gains, key=gains.__getitem__) == sorted(gains, key=lambda token: -times[token])
    assert sum(drafted(seed).values()) <= 1


def test_a_greedy_answer_after_a_sampled_one_has_no_draws() -> None:
    hierarchy = Hierarchy(budget=FixedBudget(8))
    trees = []
    for seed in (None, 3, None):
        hierarchy.set_seed(seed)
        hierarchy.begin(PROMPT)
        trees.append((hierarchy.draft(PROMPT).tokens.tolist(), hierarchy.probs.tolist()))
    assert trees[0] == trees[2] != trees[1]


@pytest.mark.parametrize(("temperature", "expected"), [(0.0, None), (0.7, 11)])
def test_the_loop_sets_the_seed_through_drafters_around_it(temperature: float, expected: int | None) -> None:
    target = Target(model_of("llama"))
    seeds: list[int | None] = []

    class Noting(Hierarchy):
        def set_seed(self, seed: int | None) -> None:
            seeds.append(seed)
            super().set_seed(seed)

    sampler = sampler_of(SamplingConfig(temperature=temperature, seed=11), [1, 2, 3])
    drafter = WrappedDrafter(Noting(budget=FixedBudget(4)))
    list(decode(target, [1, 2, 3], sampler, max_new_tokens=4, drafter=drafter))
    assert seeds == [expected]


def test_draws_predict_samples_of_exact_estimates_better() -> None:
    """Of tokens that are drawn uniformly, the first drafted one is right more often than one in four."""
    right = {True: 0, False: 0}
    for seed in range(60):
        for knows in right:
            hierarchy = Hierarchy(budget=FixedBudget(1))
            hierarchy.set_seed(seed if knows else None)
            hierarchy.begin(PROMPT)
            drawn = race_winner(ExponentialRace(seed), len(PROMPT), uniform_over_followers())
            right[knows] += int(hierarchy.draft(PROMPT).tokens[0]) == drawn
    assert right[True] > 1.5 * right[False]


def uniform_over_followers() -> npt.NDArray[np.float32]:
    probabilities = np.zeros(10, np.float32)
    probabilities[list(FOLLOWERS)] = 0.25
    return probabilities
