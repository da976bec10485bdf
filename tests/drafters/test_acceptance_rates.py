"""Learned acceptance rates, against counts made here."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from hdtool.runtime.budget.budgeted_drafter import KindsDrafter
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.acceptance_rates import PRIOR_WEIGHT, WINDOW, AcceptanceRates
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.core.tree import ROOT, DraftTree
from hdtool.runtime.kernels.compiled import Ints
from tests.support.trees import check_integrity, trees

PRIOR = [0.5, 0.25, 1.0]


class Kinds(KindsDrafter):
    """Proposes a given tree."""

    def __init__(self, tree: DraftTree, kinds: Ints) -> None:
        super().__init__(None, PRIOR)
        self._proposed = kinds, tree

    def _propose(self, context: Sequence[int], max_nodes: int) -> tuple[Ints, DraftTree]:
        return self._proposed


@given(trees(5), st.lists(st.integers(0, 2), min_size=40, max_size=40), st.integers(0, 2**16))
def test_nodes_are_sorted_by_probability_and_rates_are_updated(tree: DraftTree, kinds: list[int], seed: int) -> None:
    rng = random.Random(seed)
    kind = np.array([kinds[node % 40] for node in range(len(tree))], np.int64)
    drafter, depths, parents = Kinds(tree, kind), tree.depths[1:].tolist(), tree.parents.tolist()
    rates: dict[tuple[int, int], tuple[float, float]] = {}

    def expected() -> list[float]:
        probs: list[float] = []
        for node, above in enumerate(parents):
            taken, asked = rates.get((int(kind[node]), depths[node]), (PRIOR[kind[node]], 1.0))
            probs.append((probs[above] if above != ROOT else 1.0) * taken / asked)
        return probs

    order = np.argsort(-np.array(expected()), kind="stable").tolist()
    drafted, path = drafter.draft([tree.root]), list[int]()
    assert drafted.tokens.tolist() == tree.tokens[order].tolist()
    while (below := np.flatnonzero(drafted.parents == (path[-1] if path else ROOT))).size and rng.random() < 0.7:
        path.append(int(rng.choice(below)))
    drafter.observe(Accepted(path, [0] * (len(path) + 1)), Verified(torch.empty(len(tree) + 1, 0)))
    accepted = {order[node] for node in path}
    for node, above in enumerate(parents):
        if above == ROOT or above in accepted:
            at = int(kind[node]), depths[node]
            taken, asked = rates.get(at, (PRIOR[at[0]] * PRIOR_WEIGHT, PRIOR_WEIGHT))
            rates[at] = taken + (node in accepted), asked + 1
    again, probs = drafter._grow([tree.root], len(tree))
    assert probs.tolist() == pytest.approx(sorted(expected(), reverse=True))
    assert all(a >= b for a, b in pairwise(probs))
    for size in range(len(tree) + 1):
        check_integrity(again.select(np.arange(size)))


def test_a_rate_is_a_moving_average_that_begins_with_its_prior() -> None:
    rates, classes = AcceptanceRates([0.4, 0.9]), np.array([0, 0, 1, 0])
    rates.learn(classes, np.array([True, False, False, True]))
    expected = [(4 + 2) / (PRIOR_WEIGHT + 3), 9 / (PRIOR_WEIGHT + 1)]
    assert rates[:].tolist() == pytest.approx(expected)
    for _ in range(20 * int(WINDOW)):
        rates.learn(classes, np.ones(4, np.bool_))
    assert (rates[:] > 0.999).all()
    for _ in range(int(WINDOW)):
        rates.learn(np.array([1]), np.zeros(1, np.bool_))
    assert rates[np.array([1])][0] == pytest.approx(np.exp(-1), abs=0.01)


def test_of_a_chain_the_tokens_up_to_the_first_refused_one_count() -> None:
    rates = AcceptanceRates([0.5] * 4)
    rates.learn_chain(np.arange(4), 2)
    high, low = 6 / 11, 5 / 11
    assert rates[:].tolist() == pytest.approx([high, high, low, 0.5])
    rates.learn_chain(np.array([3]), 1)
    assert rates[np.array([3])][0] == pytest.approx(high)
