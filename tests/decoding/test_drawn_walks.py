"""Acceptance of drawn tokens by one compiled call equals acceptance node by node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import LogitsProcessor, LogitsProcessorList

from hdtool.data.errors import ModelError
from hdtool.runtime.core.accept import Accepted, accept
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.kernels.compiled import Array
from hdtool.runtime.settings.model import SamplingConfig
from tests.support.samplers import processors_of
from tests.support.trees import trees

VOCABULARY = 40


class Allowing(LogitsProcessor):
    """Allows the tokens of a set."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._is_allowed = np.zeros(VOCABULARY, np.bool_)
        self._is_allowed[list(tokens)] = True

    def allowed(self, context: Sequence[int], tokens: list[int]) -> int:
        return next((place for place, token in enumerate(tokens) if not self._is_allowed[token]), len(tokens))

    def bits(self, context: Sequence[int]) -> Array:
        return np.packbits(self._is_allowed, bitorder="little")

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        return cast(torch.FloatTensor, scores.masked_fill(~torch.from_numpy(self._is_allowed), -torch.inf))


def sampler_of(config: SamplingConfig, allowed: Sequence[int], *, walks: bool) -> Sampler:
    masks: list[Any] = [Allowing(allowed)] if allowed else []
    sampler = Sampler(config, [1, 2, 3], processors=LogitsProcessorList([*masks, *processors_of(config)]))
    assert sampler.shortcuts.draws
    if not walks:
        sampler.shortcuts = sampler.shortcuts._replace(draws=None)
    return sampler


@settings(max_examples=100)
@given(
    tree=trees(VOCABULARY, max_nodes=12),
    seed=st.integers(0, 2**32),
    spread=st.sampled_from([0.3, 2.0, 8.0]),
    temperature=st.sampled_from([0.4, 1.0, 1.7]),
    top_k=st.sampled_from([None, 1, 5, 20]),
    top_p=st.sampled_from([None, 0.2, 0.9]),
    allowed=st.lists(st.integers(0, VOCABULARY - 1), max_size=30),
    broken=st.lists(st.integers(0, 12), max_size=2),
    stops=st.sets(st.integers(0, VOCABULARY - 1), max_size=5),
    most=st.integers(1, 14),
)
def test_a_walk_of_drawn_tokens_equals_choices_node_by_node(
    tree: DraftTree,
    seed: int,
    spread: float,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    allowed: list[int],
    broken: list[int],
    stops: set[int],
    most: int,
) -> None:
    """With masks, with rows that are not finite below drafts, with stop tokens and little room."""
    logits = spread * torch.randn(len(tree) + 1, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    for row in broken:
        if 0 < row <= len(tree):
            logits[row, row] = torch.nan
    config = SamplingConfig(temperature=temperature, seed=seed, top_k=top_k, top_p=top_p)
    found: list[tuple[Accepted | None, list[int], bool]] = []
    for walks in (True, False):
        sampler = sampler_of(config, allowed, walks=walks)
        accepted = accept(tree, Verified(logits), sampler, stops=stops, max_tokens=most)
        found.append((accepted, sampler.context, sampler.overflowed))
    assert found[0] == found[1]


@pytest.mark.parametrize("allowed", [[], [0, 1]])
def test_logits_that_are_not_finite_draw_nothing(allowed: list[int]) -> None:
    logits = torch.full((1, VOCABULARY), torch.nan)
    sampler = sampler_of(SamplingConfig(temperature=1.0), allowed, walks=True)
    with pytest.raises(ModelError, match="not numbers"):
        accept(DraftTree.bare(3), Verified(logits), sampler, max_tokens=4)
    drafted = DraftTree.of(3, [5], [-1])
    assert accept(drafted, Verified(logits.repeat(2, 1)), sampler, max_tokens=4) is None, (
        "computed again without the draft"
    )
    assert sampler.overflowed


def test_tokens_that_are_certain_are_not_drawn() -> None:
    logits = torch.zeros(3, VOCABULARY)
    tree = DraftTree.of(3, [5, 6], [-1, 0])
    certain = DraftTree(tree.root, tree.tokens, tree.parents, tree.sources, np.array([5, 6, -1]))
    sampler = sampler_of(SamplingConfig(temperature=1.0, seed=2), range(VOCABULARY), walks=True)
    accepted = accept(certain, Verified(logits), sampler, max_tokens=9)
    assert accepted and accepted.path == [0, 1] and accepted.tokens[:2] == [5, 6]
