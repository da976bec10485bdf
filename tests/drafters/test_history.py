"""The history: earlier answers speed up later ones, of this process and of a batch, and change none of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from hdtool.builders.evaluation.recording import accept_recorded
from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.core.request import Request
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.session import decode, decode_batch
from hdtool.runtime.drafters.drafter_factory import drafters_for
from hdtool.runtime.drafters.hierarchy.hierarchy import Hierarchy
from hdtool.runtime.settings.decoding import DecodeConfig
from hdtool.runtime.settings.draft_sources import SourceId
from hdtool.runtime.settings.model import SamplingConfig
from hdtool.runtime.stores.history_store import History
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.target import Target
from tests.support.decoding import SAMPLINGS, answer_of, output_tokens, run
from tests.support.families import FAMILIES, model_of
from tests.support.oracle import prompt_of
from tests.support.trees import check_integrity

GREEDY = SamplingConfig()
NO_LOGITS = Verified(torch.empty(0))


def drafting(history: History, nodes: int = 24) -> Hierarchy:
    return Hierarchy(budget=FixedBudget(nodes), history=history)


@pytest.mark.each_value
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_plain_decoding(family: str, sampling: SamplingConfig) -> None:
    """Asked again, an answer is drafted from the history; asked by another seed, from what is now wrong."""
    target, history = Target(model_of(family)), History()
    drafter, other = drafting(history), drafting(history)
    steps = []
    for length in (9, 30, 9, 30):
        plain = answer_of(target, prompt_of(length), sampling)
        for one in (drafter, other):
            made = run(target, prompt_of(length), sampling, drafter=one)
            assert output_tokens(made) == plain
            steps.append(len(made))
    assert sum(steps[4:]) < sum(steps[:4]), "the history makes no difference"


def test_samples_of_one_prompt_draft_from_each_other_while_they_are_answered() -> None:
    target, prompt = Target(model_of("llama")), prompt_of(12)
    history, accepted = History(), 0
    waiting = [Request(number, prompt, Sampler(GREEDY, prompt), drafting(history)) for number in range(3)]
    answers: dict[int, list[int]] = {0: [], 1: [], 2: []}

    def next_request() -> Request[int] | None:
        """The second and the third begin when the first is some steps ahead."""
        return waiting.pop(0) if waiting and (len(waiting) == 3 or len(answers[0]) > 8) else None

    for request, step in decode_batch(target, next_request, 3, max_new_tokens=32):
        answers[request.key] += step.tokens
        accepted += int((step.tree.sources[step.path] == SourceId.HISTORY).sum())
    assert list(answers.values()) == [answer_of(target, prompt, GREEDY)] * 3
    assert accepted > 0


def test_a_row_that_is_behind_drafts_from_the_row_ahead() -> None:
    history = History()
    ahead, behind = drafting(history), drafting(history)
    text = [5, 9, 2, 7, 8, 3, 1, 6, 4]
    ahead.begin([1, 2, 3])
    behind.begin([1, 2, 3])
    ahead.observe(Accepted([], text), NO_LOGITS)
    behind.observe(Accepted([], text[:1]), NO_LOGITS)
    tree = behind.draft([1, 2, 3, *text[:1]])
    path = accept_recorded(tree, [*text[1:], 0]).path
    assert tree.tokens[path].tolist() == text[1:]
    assert SourceId.HISTORY in tree.sources[path]
    tree = ahead.draft([1, 2, 3, *text])
    assert SourceId.HISTORY not in tree.sources, "its own answer is left to the context table"


def test_an_answer_that_is_broken_off_is_remembered_as_far_as_it_went() -> None:
    target, prompt, history = Target(model_of("llama")), prompt_of(9), History()
    steps = decode(target, prompt, Sampler(GREEDY, prompt), max_new_tokens=40, drafter=drafting(history))
    begun = [next(steps).tokens, next(steps).tokens, next(steps).tokens]
    steps.close()
    later = run(target, prompt, GREEDY, 40, drafter=drafting(history))
    assert output_tokens(later)[: sum(map(len, begun))] == [token for tokens in begun for token in tokens]
    assert any(SourceId.HISTORY in step.sources for step in later)


def test_prompts_are_remembered_only_on_demand() -> None:
    question, answer = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26], [30, 31]
    for prompts in (False, True):
        history = History(prompts=prompts)
        first = drafting(history)
        first.begin(question)
        first.observe(Accepted([], answer), NO_LOGITS)
        second = drafting(history)
        second.begin([40, *question[:2]])
        tree = second.draft([40, *question[:2]])
        assert (tree.tokens.tolist()[:4] == question[2:6]) == prompts


def test_drafters_of_one_model_share_a_history_unless_there_is_none() -> None:
    target = Target(model_of("llama"))
    for config, expected in (
        (DecodeConfig(batch_size=3, draft_tokens=8), 1),
        (DecodeConfig(batch_size=3, draft_tokens=8, history="none"), 0),
        (DecodeConfig(batch_size=3, draft_tokens=8, sources="CMS"), 0),
        (DecodeConfig("hd-paper", batch_size=3), 0),
    ):
        drafters = drafters_for(config, target, StoreSet())
        histories = [getattr(drafter, "_history", None) for drafter in drafters]
        shared = {id(history) for history in histories if history}
        assert len(shared) == expected


@given(st.lists(st.lists(st.integers(0, 4), max_size=200), max_size=6), st.integers(6, 9))
def test_a_small_ring_runs_over(answers: list[list[int]], bits: int) -> None:
    """Whatever is overwritten while two answers are appended in turn, trees stay whole."""
    history = History(max_tokens=1 << bits)
    drafters = drafting(history), drafting(history)
    contexts: list[list[int]] = [[0], [1]]
    for number, answer in enumerate(answers):
        drafter, context = drafters[number % 2], contexts[number % 2]
        if number % 3 == 0:
            drafter.begin(context)
        for at in range(0, len(answer), 7):
            drafter.observe(Accepted([], answer[at : at + 7]), NO_LOGITS)
            context += answer[at : at + 7]
            tree = drafter.draft(context)
            check_integrity(tree)
            assert all(0 <= token <= 4 for token in tree.tokens.tolist())
