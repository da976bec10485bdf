"""Prompt lookup against the library's own."""

from __future__ import annotations

import random
from typing import cast

import pytest
import torch
from hypothesis import example, given, strategies as st
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from hdtool.builders.evaluation.recording import RecordedTurn
from hdtool.builders.evaluation.replay import ReplayMethod, replay_method
from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.acceptance_rates import Probs
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.drafters.published.lookup_methods import PromptLookup
from hdtool.runtime.settings.decoding import DecodeConfig
from hdtool.runtime.settings.draft_sources import SourceId
from hdtool.runtime.stores.store_set import StoreSet
from tests.support.trees import check_integrity


def library(context: list[int], tokens: int, longest: int) -> list[int]:
    generator = PromptLookupCandidateGenerator(
        num_output_tokens=tokens, max_matching_ngram_size=longest, max_length=10**6
    )
    candidates, _ = generator.get_candidates(cast(torch.LongTensor, torch.tensor([context])))
    ids: list[int] = candidates[0, len(context) :].tolist()
    return ids


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 12), st.integers(1, 4))
@example([5], 10, 3)
@example([5, 5], 10, 3)
def test_drafts_what_transformers_drafts(context: list[int], tokens: int, longest: int) -> None:
    drafter = PromptLookup(tokens, longest)
    drafter.begin(context)
    tree = drafter.draft(context)
    check_integrity(tree)
    assert tree.root == context[-1]
    assert tree.tokens.tolist() == library(context, tokens, longest)
    assert tree.parents.tolist() == list(range(-1, len(tree) - 1))
    assert set(tree.sources.tolist()) <= {SourceId.CONTEXT}


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=9), min_size=2, max_size=20))
def test_a_context_may_grow_and_a_new_one_begin(steps: list[list[int]]) -> None:
    drafter = PromptLookup()
    for first in range(2):
        context = list(steps[first])
        drafter.begin(context)
        trees = []
        for fresh in steps[first + 1 :]:
            context += fresh
            trees.append((drafter.draft(context), library(context, 10, 3)))
            drafter.observe(Accepted([], fresh), Verified(torch.empty(1, 0)))
        # Compared at the end: a tree must not change when the context grows.
        for tree, expected in trees:
            assert tree.tokens.tolist() == expected


def accept_lengths(prompt: list[int], answer: list[int]) -> list[int]:
    """Return the number of tokens per step; the first step is the prefill."""
    lengths: list[int] = []
    done = 0
    while done < len(answer):
        draft = library(prompt + answer[:done], 10, 3) if done else []
        rest = answer[done:-1]
        taken = 0
        while taken < min(len(draft), len(rest)) and draft[taken] == rest[taken]:
            taken += 1
        lengths.append(taken + 1)
        done += taken + 1
    return lengths


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.lists(st.integers(0, 3), min_size=1, max_size=60))
def test_a_replay_takes_the_steps_of_an_independent_count(prompt: list[int], answer: list[int]) -> None:
    turn = RecordedTurn("one", "", 0, prompt, answer)
    played = replay_method(ReplayMethod("pld", DecodeConfig("pld")), [turn], StoreSet())
    assert played.turns[0].accept_lengths.tolist() == accept_lengths(prompt, answer)


def test_the_independent_count_on_a_case_by_hand() -> None:
    """Behind [7, 8] stand 9, 1, 2, 7: all drafted, and taken as far as the answer goes on so."""
    prompt, answer = [7, 8, 9, 1, 2, 7], [8, 9, 1, 5, 8, 9]
    assert accept_lengths(prompt, answer) == [1, 3, 1, 1]


@pytest.mark.parametrize("size", [31_000, 32_768])
def test_long_contexts(size: int) -> None:
    """The only match of three tokens stands far from either end."""
    rng = random.Random(size)
    context = [rng.randrange(1000) for _ in range(size)]
    context[17_000:17_005] = [1001, 1002, 1003, 7, 8]
    context[-3:] = [1001, 1002, 1003]
    drafter = PromptLookup()
    drafter.begin(context[:-1])
    tree = drafter.draft(context)
    assert tree.tokens.tolist() == library(context, 10, 3) == context[17_003:17_013]
    assert drafter.seconds[SourceId.CONTEXT] > 0


class Recorded(FixedBudget):
    """A fixed budget that keeps the probabilities it was asked about."""

    def choose_size(self, probs: Probs) -> int:
        asked.append(probs.tolist())
        return super().choose_size(probs)


asked: list[list[float]] = []


def step(drafter: PromptLookup, context: list[int], answer: list[int]) -> int:
    """How many tokens are drafted; ``answer`` is what the step adds to the context."""
    drafted = len(drafter.draft(context))
    drafter.observe(Accepted([], answer), Verified(torch.empty(1, 0)))
    context += answer
    return drafted


def test_only_what_the_budget_takes_is_sent() -> None:
    context = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    for most, sent in ((0, 0), (2, 2), (64, 6)):
        drafter = PromptLookup(budget=FixedBudget(most))
        drafter.begin(context)
        assert drafter.draft(context).tokens.tolist() == context[3 : 3 + sent]


@pytest.mark.parametrize("sent", [1, 5])
def test_probabilities_follow_the_answers_after_matches_of_a_length(sent: int) -> None:
    """Also of tokens that were not sent: the answer shows whether they would have been accepted."""
    asked.clear()
    drafter, fresh = PromptLookup(budget=Recorded(sent)), iter(range(100, 10_000))
    context = [1, 2, 3, 4, 5, 6]
    drafter.begin(context)
    for _ in range(60):
        context += [next(fresh), 1, 2, 3]
        assert step(drafter, context, [4, 5, next(fresh)]) == sent  # a match of three tokens: two of what follows fit
        context += [next(fresh), 2]
        assert step(drafter, context, [next(fresh)]) == sent  # a match of one token: nothing fits
    long, short = asked[-2], asked[-1]
    assert long[0] > 0.9 > 0.2 > short[0]
    assert len(long) == sent
    if sent > 1:
        assert long[1] > 0.9 * long[0] and long[2] < 0.2
