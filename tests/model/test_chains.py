"""Chains of drafts by replay, for models that cannot verify trees: exact, from caches that no pass changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hdtool.data.errors import FamilyError
from hdtool.runtime.caches.replay_slots import ReplayedCaches, bytes_of, tensors_of
from hdtool.runtime.core.session import Session
from hdtool.runtime.core.tree import ROOT, DraftTree
from hdtool.runtime.engines.stock import chain_passes
from hdtool.runtime.target.target import Target
from tests.support.decoding import all_answered, answer_of, output_tokens, request, run
from tests.support.families import VOCABULARY, random_model
from tests.support.oracle import generated, prompt_of
from tests.support.trees import WrongDrafter
from tests.sweep.models import tiny_model


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("zaya"))


def test_each_step_of_several_answers_has_one_pass(target: Target) -> None:
    prompts = [prompt_of(length) for length in (25, 60, 33)]
    expected = [generated(target.model, prompt, 12) for prompt in prompts]
    requests = [
        request(number, prompt, WrongDrafter(len(prompt), truth, VOCABULARY, number))
        for number, (prompt, truth) in enumerate(zip(prompts, expected, strict=True))
    ]
    passes = target.log.passes
    assert all_answered(Session[int](target, target.allocate(3), max_new_tokens=12), requests) == expected
    assert target.log.passes <= passes + 3 + 11


def test_a_changed_end_of_a_long_prompt_goes_on_from_a_kept_cache(target: Target) -> None:
    prompt = prompt_of(300)
    answer_of(target, prompt, max_new_tokens=8)
    other = [*prompt[:290], *prompt_of(12)]
    steps = run(target, other, max_new_tokens=8)
    assert output_tokens(steps) == generated(target.model, other, 8) and steps[0].cached_tokens == 300 - 32
    kept = target.cache.slots[0].kept
    assert isinstance(kept, ReplayedCaches)
    parts = [one.states for one in kept.older]
    assert [one.length for one in kept.older] == [268, 302]
    assert bytes_of(parts) < 0.75 * sum(bytes_of([part]) for part in parts), "a beginning is a part of what follows"


def test_a_kept_cache_stays_as_it_is(target: Target) -> None:
    prompt = prompt_of(40)
    target.cache.slots[0].cut(0)
    target.prefill(target.cache, 0, prompt)
    slot = target.cache.slots[0]
    kept = slot.kept
    assert isinstance(kept, ReplayedCaches)
    before = {place: tensor.clone() for place, tensor in tensors_of(kept.filled.states).items()}
    filled = kept.filled
    for drafts in ([], [1], [2, 3, 4]):
        target.verify(target.cache, [DraftTree.of(5, drafts, range(ROOT, len(drafts) - 1))])
    assert all(torch.equal(before[place], tensor) for place, tensor in tensors_of(filled.states).items())
    target.commit(target.cache, 0, [0])
    assert kept.filled is filled and slot.tokens[filled.length :] == [5, 2]


def test_an_interrupted_answer_leaves_the_conversation_usable(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = target.model, prompt_of(45)
    expected = generated(model, prompt, 30)
    call, calls = target.stock.call, 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        output = call(*args, **kwargs)
        if calls == 6:
            raise KeyboardInterrupt
        return output

    monkeypatch.setattr(target.stock, "call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(target, prompt, max_new_tokens=30, drafter=WrongDrafter(45, expected, VOCABULARY, 2))
    monkeypatch.undo()
    said_before = target.cache.slots[0].tokens
    again = [*said_before, *prompt_of(7)]
    steps = run(target, again, max_new_tokens=12)
    assert output_tokens(steps) == generated(model, again, 12) and steps[0].cached_tokens >= 45


def test_a_pass_that_overflows_is_made_again_without_drafts(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = target.model, prompt_of(45)
    expected = generated(model, prompt, 16)
    call = target.stock.call

    def overflowing(ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output = call(ids, *args, **kwargs)
        if kwargs.get("logits_to_keep", 1) > 1:
            output.logits.fill_(float("nan"))
        return output

    monkeypatch.setattr(target.stock, "call", overflowing)
    drafter = WrongDrafter(45, expected, VOCABULARY, 2)
    assert answer_of(target, prompt, max_new_tokens=16, drafter=drafter) == expected


def test_hidden_states_are_those_of_the_accepted_tokens() -> None:
    model: Any = tiny_model("bloom")
    target, prompt = Target(model), prompt_of(20)
    target.watch_hidden()
    expected = generated(model, prompt, 16)
    run(target, prompt, max_new_tokens=16, drafter=WrongDrafter(20, expected, VOCABULARY, 3))
    slot = target.cache.slots[0]
    hidden = slot.all_hidden()
    assert hidden is not None and len(hidden) == len(slot.tokens)
    with torch.inference_mode():
        plain = model.base_model(torch.tensor([slot.tokens])).last_hidden_state[0]
    assert torch.allclose(hidden, plain, atol=1e-3)


def test_many_waiting_tokens_are_read_without_drafts(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_passes, "MAX_WAITING", 2)
    prompt = prompt_of(33)
    expected = generated(target.model, prompt, 30)
    steps = run(target, prompt, max_new_tokens=30, drafter=WrongDrafter(33, expected, VOCABULARY, 1))
    assert output_tokens(steps) == expected and any(not len(step.tree) for step in steps)


def test_trees_are_cut_to_their_first_chain() -> None:
    tree = DraftTree.of(7, [1, 2, 3, 4, 5], [ROOT, ROOT, 1, 0, 3])
    chain = tree.first_chain()
    assert not tree.is_chain and chain.is_chain and chain.all_tokens == [7, 1, 4, 5]
    assert chain.first_chain() is chain and DraftTree.bare(3).is_chain


def test_a_wrong_pass_over_several_tokens_is_refused_with_both_reasons() -> None:
    layers = ["linear_attention", "full_attention"]
    with pytest.raises(FamilyError, match=r"small tree .*; a chain .* passes over several tokens .*Use generate"):
        Target(random_model("MiniMax", layer_types=layers, block_size=16, num_local_experts=4))


def test_a_state_outside_of_the_cache_is_refused_by_name() -> None:
    shape: dict[str, Any] = {"num_key_value_heads": 1, "attention_window_size": 32, "num_hidden_layers": 3}
    with pytest.raises(FamilyError, match="conv1d_state is a state outside of the cache"):
        Target(random_model("RecurrentGemma", without=("head_dim",), **shape))
