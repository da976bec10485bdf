"""What every engine must do: the tokens and logits of the library, whatever is drafted, rolled back or batched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from hdtool.runtime.config.model import SamplingConfig
from hdtool.runtime.core.engine import Engine, PassOptions
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.sequence import Request
from hdtool.runtime.core.session import decode, decode_batch
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.engines.capture import never
from hdtool.runtime.kernels.linear import compile_linear_layers
from hdtool.runtime.model.compact_layers import compact_weights
from hdtool.runtime.target.target import Target
from tests.support import fused
from tests.support.families import VOCABULARY, model_of
from tests.support.oracle import assert_same_logits, generated, plain_logits, prompt_of
from tests.support.rehearsed import Rehearsed
from tests.support.trees import WrongDrafter, tokens_to, trees

MAX_NEW_TOKENS = 20


def stock() -> tuple[Target, Any]:
    model = model_of("llama")
    return Target(model, never), model


def captured() -> tuple[Target, Any]:
    model = model_of("llama")
    target = Target(model, lambda device: Rehearsed())
    assert target.captures
    return target, model


def compiled() -> tuple[Target, Any]:
    model = fused.model_of()
    compile_linear_layers(model)
    target = Target(model)
    fused.compile_target(target)
    return target, fused.model_of()


def compiled_16_bits() -> tuple[Target, Any]:
    model = fused.model_of(dtype=torch.bfloat16)
    compact_weights(model)
    compile_linear_layers(model)
    target = Target(model)
    fused.compile_target(target)
    return target, fused.model_of(dtype=torch.bfloat16)


ENGINES: dict[str, Callable[[], tuple[Target, Any]]] = {
    "stock": stock,
    "captured": captured,
    "compiled": compiled,
    "compiled, 16 bits": compiled_16_bits,
}
made: dict[str, tuple[Target, Any]] = {}
"""Engines are made once: making one compiles and proves it."""


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Target, Any]:
    """An engine, and the library's model with its weights."""
    name = request.param
    fused.widen(monkeypatch)
    if name not in made:
        made[name] = ENGINES[name]()
    return made[name]


def said(engine: Engine[Any], prompt: Sequence[int], drafter: Any = None, **sampling: Any) -> list[int]:
    sampler = Sampler(SamplingConfig(**sampling), prompt)
    return [
        token
        for step in decode(
            engine, prompt, sampler, max_new_tokens=MAX_NEW_TOKENS, drafter=drafter, prefix_caching=False
        )
        for token in step.tokens
    ]


def test_plain_decoding_says_what_the_library_says(engine: tuple[Target, Any]) -> None:
    target, model = engine
    for length in (1, 7, 150):
        assert said(target, prompt_of(length)) == generated(model, prompt_of(length), MAX_NEW_TOKENS)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafts_that_lie_change_no_token(engine: tuple[Target, Any], temperature: float) -> None:
    target, _ = engine
    for seed in range(4):
        prompt = prompt_of(5 + 9 * seed)
        plain = said(target, prompt, temperature=temperature, seed=seed)
        drafter = WrongDrafter(len(prompt), plain, VOCABULARY, seed)
        assert said(target, prompt, drafter, temperature=temperature, seed=seed) == plain
        assert drafter.accepted > 0, "drafts that are never accepted test little"


def test_each_node_of_a_tree_has_the_logits_of_its_path(engine: tuple[Target, Any]) -> None:
    target, model = engine
    cache = target.allocate()

    @settings(max_examples=12, deadline=None)
    @given(tree=trees(VOCABULARY), length=st.integers(1, 40))
    def check(tree: DraftTree, length: int) -> None:
        context = prompt_of(length)
        target.prefill(cache, 0, context, room=64)
        (verified,) = target.verify(cache, [tree], [PassOptions(walk=True, wants_maxima=True)])
        for node in range(-1, len(tree)):
            assert_same_logits(verified.logits[node + 1], plain_logits(model, [*context, *tokens_to(tree, node)]))
        if (known := verified.known_argmax()) is not None:
            assert known[0].tolist() == verified.logits.argmax(-1).tolist()
        target.commit(cache, 0, [])

    check()


def test_rejected_nodes_leave_nothing_behind(engine: tuple[Target, Any]) -> None:
    """Steps with random trees and random accepted paths; the logits are those of the accepted tokens alone."""
    target, model = engine
    cache = target.allocate()

    @settings(max_examples=8, deadline=None)
    @given(steps=st.lists(st.tuples(trees(VOCABULARY), st.randoms(use_true_random=False)), min_size=2, max_size=5))
    def check(steps: list[tuple[DraftTree, Any]]) -> None:
        context = prompt_of(11)
        target.prefill(cache, 0, context, room=128)
        for tree, random in steps:
            target.verify(cache, [tree])
            path = _path(tree, random.randrange(-1, len(tree)))
            target.commit(cache, 0, path)
            context = [*context, tree.root, *tree.tokens[path].tolist()]
            assert cache.slots[0].tokens == context
        (last,) = target.verify(cache, [DraftTree.bare(3)])
        assert_same_logits(last.logits[0], plain_logits(model, [*context, 3]))

    check()


def _path(tree: DraftTree, node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = int(tree.parents[node])
    return path[::-1]


def test_a_slot_computes_what_it_computes_alone(engine: tuple[Target, Any]) -> None:
    target, model = engine
    cache, alone = target.allocate(4), target.allocate()
    contexts = [prompt_of(length) for length in (3, 40, 12, 27)]
    several = [DraftTree.of(5, [8, 9, 10], [-1, 0, -1]), DraftTree.bare(4), DraftTree.of(6, [1] * 9, [-1] * 9)]
    for slot, context in enumerate(contexts):
        target.prefill(cache, slot, context)
    verified = target.verify(cache, several)
    for slot, tree in enumerate(several):
        found = verified[slot].logits.clone()
        for node in range(-1, len(tree)):
            assert_same_logits(found[node + 1], plain_logits(model, [*contexts[slot], *tokens_to(tree, node)]))
        target.prefill(alone, 0, contexts[slot])
        if target.compiled:  # rows have the bits of single ones
            assert torch.equal(found, target.verify(alone, [tree])[0].logits)
            verified = target.verify(cache, several)


def test_requests_are_replaced_and_each_gets_its_own_answer(engine: tuple[Target, Any]) -> None:
    target, model = engine
    prompts = [prompt_of(length) for length in (9, 31, 4, 17, 60, 2, 25)]
    expected = [generated(model, prompt, 3 + 4 * number) for number, prompt in enumerate(prompts)]
    waiting = iter(range(len(prompts)))

    def next_request() -> Request[int] | None:
        number = next(waiting, None)
        if number is None:
            return None
        prompt = prompts[number]
        drafter = WrongDrafter(len(prompt), expected[number], VOCABULARY, number)
        sampler = Sampler(SamplingConfig(), prompt)
        return Request(number, prompt, sampler, drafter, max_new_tokens=len(expected[number]))

    found: list[list[int]] = [[] for _ in prompts]
    for request, step in decode_batch(target, next_request, 3, max_new_tokens=0):
        found[request.key] += step.tokens
    assert found == expected


def test_a_prompt_is_read_on_from_any_of_its_tokens(engine: tuple[Target, Any]) -> None:
    target, model = engine
    cache, context = target.allocate(), prompt_of(90)
    target.prefill(cache, 0, prompt_of(70))
    for start in (0, 1, 37, 89):
        if start:
            target.prefill(cache, 0, context[:start])
        after = target.prefill(cache, 0, context[start:], start)
        assert cache.slots[0].tokens == context
        assert_same_logits(after.logits[0], plain_logits(model, context))


def test_a_pass_with_logits_that_are_no_numbers_is_computed_again_without_drafts(engine: tuple[Target, Any]) -> None:
    target, model = engine
    for slots, slot in ((1, 0), (3, 1)):
        cache, context = target.allocate(slots), prompt_of(15)
        for each in range(slots):
            target.prefill(cache, each, context)
        tree = DraftTree.of(5, [8, 9], [-1, 0])
        target.verify(cache, [tree] * slots)
        with torch.inference_mode():
            for tensor in cache.slots[slot].kv.storage.tensors:
                tensor.narrow(3, 16, 2).fill_(torch.nan)
        again = target.recompute(cache, slot, 5)
        assert_same_logits(again.logits[0], plain_logits(model, [*context, 5]))
        target.commit(cache, slot, [])
        assert cache.slots[slot].tokens == [*context, 5]


def test_a_cache_grows_without_losing_what_it_holds(engine: tuple[Target, Any]) -> None:
    target, model = engine
    cache, context = target.allocate(2), prompt_of(20)
    target.prefill(cache, 0, context)
    target.prefill(cache, 1, prompt_of(6))
    before = cache.capacity
    while cache.capacity == before:
        target.verify(cache, [DraftTree.of(5, [8, 9], [-1, 0]), DraftTree.bare(3)])
        target.commit(cache, 0, [0, 1])
        target.commit(cache, 1, [])
        context += [5, 8, 9]
    verified = target.verify(cache, [DraftTree.bare(2), DraftTree.bare(2)])
    assert_same_logits(verified[0].logits[0], plain_logits(model, [*context, 2]))
