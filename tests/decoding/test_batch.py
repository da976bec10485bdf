"""Several answers at once: each is the one that it would have been alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.config import SamplingConfig
from hdtool.runtime.decode import decode_batch
from hdtool.runtime.drafter import NoDraft
from hdtool.runtime.drafters.hierarchy.drafter import Hierarchy
from hdtool.runtime.loop import Request
from hdtool.runtime.model.cache.batch_slots import BatchSlots
from hdtool.runtime.model.target import Target
from hdtool.runtime.sampling.sampler import Sampler
from hdtool.runtime.tree import DraftTree
from tests.support.decoding import SAMPLINGS, run, said
from tests.support.families import FAMILIES, VOCABULARY, model_of
from tests.support.oracle import assert_same_logits, plain_logits, prompt_of
from tests.support.trees import path_to, tokens_to, trees

LENGTHS = (1, 40, 7, 90, 23, 7, 61)


def requests(sampling: SamplingConfig, drafting: bool = False) -> Iterator[Request[int]]:
    for length in LENGTHS:
        drafter = Hierarchy(budget=FixedBudget(9)) if drafting else NoDraft()
        yield Request(length, prompt_of(length), Sampler(sampling, prompt_of(length)), drafter)


def one_after_another(asked: Iterator[Request[int]]) -> Callable[[], Request[int] | None]:
    return lambda: next(asked, None)


@cache
def given_alone(sampling: SamplingConfig) -> tuple[frozenset[int], list[list[int]]]:
    """Stop tokens, and answers of which some end at one."""
    target = Target(model_of("llama"))
    stops = frozenset(said(run(target, prompt_of(LENGTHS[1]), sampling))[20:21])
    return stops, [said(run(target, prompt_of(length), sampling, stops=stops)) for length in LENGTHS]


@pytest.mark.each_value
@pytest.mark.parametrize("drafting", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("size", [1, 3, 8])
def test_each_answer_is_the_one_given_alone(size: int, sampling: SamplingConfig, drafting: bool) -> None:
    target = Target(model_of("llama"))
    stops, alone = given_alone(sampling)
    ask = one_after_another(requests(sampling, drafting))
    answers: list[tuple[int, list[int]]] = []
    going: dict[int, list[int]] = {}
    for request, step in decode_batch(target, ask, size, max_new_tokens=48, stops=stops):
        going.setdefault(id(request), []).extend(step.tokens)
        if step.finish:
            answers.append((request.key, going.pop(id(request))))
    assert not going
    assert sorted(answers) == sorted(zip(LENGTHS, alone, strict=True))
    assert len(set(map(len, alone))) > 1, "answers that end at the same step free no slot early"


@pytest.mark.parametrize("family", FAMILIES)
def test_trees_of_a_batch_get_the_logits_of_their_plain_paths(family: str) -> None:
    model = model_of(family)
    target = Target(model)

    @settings(max_examples=6)
    @given(st.lists(st.tuples(trees(VOCABULARY, most=8), st.integers(1, 60)), min_size=1, max_size=4), st.data())
    def check(drawn: list[tuple[DraftTree, int]], data: st.DataObject) -> None:
        slots = BatchSlots(target, 4)
        contexts = [prompt_of(length) for _, length in drawn]
        for slot, context in enumerate(contexts):
            slots.prefill(slot, context, room=20)
            slots.commit(slot, [])
        for _ in range(2):
            logits = slots.verify([tree for tree, _ in drawn])
            for slot, (tree, _) in enumerate(drawn):
                assert logits[slot].shape == (len(tree) + 1, VOCABULARY)
                node = data.draw(st.integers(-1, len(tree) - 1))
                path = contexts[slot] + tokens_to(tree, node)
                assert_same_logits(logits[slot][node + 1], plain_logits(model, path))
                slots.commit(slot, path_to(tree, node))
                contexts[slot] = path
        if len(drawn) > 1:
            slots.move(len(drawn) - 1, to=0)
            contexts[0] = contexts.pop()
        last = slots.verify([DraftTree.bare(5) for _ in contexts])
        for found, context in zip(last, contexts, strict=True):
            assert_same_logits(found[0], plain_logits(model, [*context, 5]))

    check()


def test_the_cache_grows_for_a_longer_request_in_a_running_batch() -> None:
    target = Target(model_of("llama"))
    slots = BatchSlots(target, 2)
    short, long = prompt_of(3), prompt_of(200)
    slots.prefill(0, short, room=4)
    slots.commit(0, [])
    slots.prefill(1, long, room=4)
    slots.commit(1, [])
    for logits, context in zip(slots.verify([DraftTree.bare(5)] * 2), (short, long), strict=True):
        assert_same_logits(logits[0], plain_logits(target.model, [*context, 5]))


def test_the_next_request_is_taken_only_when_a_slot_is_free() -> None:
    target = Target(model_of("llama"))
    events: list[str] = []

    def told() -> Iterator[Request[int]]:
        for request in requests(SamplingConfig()):
            events.append("asked")
            yield request

    for _, step in decode_batch(target, one_after_another(told()), 2, max_new_tokens=3):
        if step.finish:
            events.append("done")
    for place, event in enumerate(events):
        asked, done = events[: place + 1].count("asked"), events[: place + 1].count("done")
        assert asked - done <= 2, event
    assert torch.is_inference_mode_enabled() is False
