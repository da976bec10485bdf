"""Contexts that are kept, and prompts that are read in pieces after them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hdtool.runtime.config import SamplingConfig
from hdtool.runtime.drafter import NoDraft, WrappedDrafter
from hdtool.runtime.loop import Loop, Request
from hdtool.runtime.model.cache.batch_slots import ROOM
from hdtool.runtime.model.target import Target
from hdtool.runtime.prefix_cache import LEAST, PrefixCache
from hdtool.runtime.prompt_reader import PromptReader
from hdtool.runtime.sampling.sampler import Sampler
from hdtool.runtime.sequence import Step
from tests.support.decoding import answered, run, said
from tests.support.families import FAMILIES, model_of
from tests.support.oracle import assert_same_logits, plain_logits, prompt_of

GREEDY = SamplingConfig()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_read_in_pieces_has_the_logits_of_one_read_at_once(family: str) -> None:
    target = Target(model_of(family))

    @settings(max_examples=8)
    @given(st.integers(1, 90), st.integers(1, 40), st.integers(0, 90))
    def check(length: int, most: int, shared: int) -> None:
        prompt = prompt_of(length)
        first = PromptReader(target, prompt)
        while (logits := first.read(most)) is None:
            pass
        assert_same_logits(logits[0], plain_logits(target.model, prompt))
        other = [*prompt[:shared], *prompt_of(23)]
        second = PromptReader(target, other, (first.cache, min(shared, length)))
        logits = second.read()
        assert logits is not None
        assert_same_logits(logits[0], plain_logits(target.model, other))
        assert second.cached_tokens in (0, min(shared, length))

    check()


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_the_next_turn_of_a_conversation_is_answered_as_without_a_cache(family: str) -> None:
    target = Target(model_of(family))
    batch = Loop[int](target, 2, max_new_tokens=20, prefixes=PrefixCache(2**30))
    prompt = prompt_of(40)
    answer, cached = answered(batch, prompt)
    assert (answer, cached) == (said(run(target, prompt, GREEDY, 20)), 0)
    later = [*prompt, *answer, *prompt_of(9)]
    again, cached = answered(batch, later)
    assert again == said(run(target, later, GREEDY, 20))
    assert cached == len(prompt) + len(answer) - 1
    assert answered(batch, later, owner="another")[1] == 0
    branch = [*prompt[:30], *prompt_of(12)]
    assert answered(batch, branch)[0] == said(run(target, branch, GREEDY, 20))


def test_contexts_are_dropped_in_the_order_of_their_use() -> None:
    target = Target(model_of("llama"))
    size = target.new_cache(64).storage.bytes
    kept = PrefixCache(2 * size)
    prompts = [[number] * 40 for number in range(3)]
    for prompt in prompts[:2]:
        kept.keep("", prompt, target.new_cache(40))
    assert kept.longest("", prompts[0]) is not None
    kept.keep("", prompts[2], target.new_cache(40))
    assert kept.bytes == 2 * size
    found = [kept.longest("", prompt) is not None for prompt in prompts]
    assert found == [True, False, True]
    kept.keep("", [*prompts[2], 1], target.new_cache(41))
    assert kept.bytes == 2 * size, "a context that begins another one is not kept beside it"
    kept.keep("", prompt_of(LEAST - 1), target.new_cache(40))
    assert kept.longest("", prompt_of(LEAST - 1)) is None
    PrefixCache(size - 1).keep("", prompts[0], target.new_cache(40))


def test_an_answer_longer_than_the_room_of_its_slot() -> None:
    target = Target(model_of("llama"))
    prompt = prompt_of(5)
    batch = Loop[int](target, 2, max_new_tokens=ROOM + 200)
    assert answered(batch, prompt)[0] == said(run(target, prompt, GREEDY, ROOM + 200))
    assert not torch.is_inference_mode_enabled()


def test_a_request_that_is_removed_leaves_the_others() -> None:
    target = Target(model_of("llama"))
    batch = Loop[int](target, 3, max_new_tokens=30)
    requests = [Request(n, prompt_of(5 + n), Sampler(GREEDY, prompt_of(5 + n)), NoDraft()) for n in range(3)]
    tokens: dict[int, list[int]] = {}
    outcomes = [batch.add(request) for request in requests]
    for turn in range(31):
        for request, step in outcomes:
            assert isinstance(step, Step)
            tokens.setdefault(request.key, []).extend(step.tokens)
        if turn == 6:
            batch.remove(requests[0])
        outcomes = batch.step() if len(batch) else []
    assert len(tokens[0]) < 30
    for number in (1, 2):
        assert tokens[number] == said(run(target, prompt_of(5 + number), GREEDY, 30))


def test_an_answer_that_ends_before_its_prompt_is_read_ends_its_drafter() -> None:
    class Counting(WrappedDrafter):
        ends = 0

        def end(self) -> None:
            self.ends += 1

    drafter, prompt = Counting(NoDraft()), prompt_of(40)
    batch = Loop[int](Target(model_of("llama")), 2, max_new_tokens=5)
    reading = batch.start(Request(0, prompt, Sampler(GREEDY, prompt), drafter))
    assert not reading.read(8)
    reading.end()
    assert drafter.ends == 1 and len(batch) == 0
    assert answered(batch, prompt)[0] == said(run(Target(model_of("llama")), prompt, GREEDY, 5))
