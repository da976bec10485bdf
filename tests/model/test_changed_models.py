"""Models that change between two answers: weights, adapters and hooks, in captured steps and in what is kept."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaAttention

from hdtool.data.errors import FamilyError
from hdtool.runtime.core.prefix_cache import PrefixCache
from hdtool.runtime.core.session import Session, decode
from hdtool.runtime.core.step import Step
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.engines.captured_functions import CaptureMaker, never
from hdtool.runtime.integrations import hf_generate
from hdtool.runtime.integrations.hf_generate import Generator
from hdtool.runtime.kernels.compact_weight import is_compact
from hdtool.runtime.model.compact_layers import has_compact_weights
from hdtool.runtime.settings.model import SamplingConfig
from hdtool.runtime.target.target import Target
from tests.support import fused
from tests.support.changes import CHANGES, mlp_of, with_adapter, with_other_data, with_weights_in_place
from tests.support.decoding import answered, output_tokens
from tests.support.families import VOCABULARY, model_of
from tests.support.one_sequence import OneSequence
from tests.support.oracle import generated, prompt_of
from tests.support.rehearsed import Replayed
from tests.support.samplers import sampler_of
from tests.support.trees import WrongDrafter

MAX_NEW_TOKENS = 16
CAPTURES: dict[str, CaptureMaker] = {"passes": never, "captured": lambda device: Replayed()}
ENGINES = [*CAPTURES, "compiled", "compiled, 16 bits"]
SAMPLED = SamplingConfig(temperature=0.9, seed=3)


def own_model() -> Any:
    return copy.deepcopy(model_of("llama"))


@pytest.fixture(params=ENGINES)
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Target:
    """A target with a model of its own, of each engine."""
    if request.param in CAPTURES:
        target = Target(own_model(), CAPTURES[request.param])
        assert target.captures == (request.param == "captured")
        return target
    fused.widen(monkeypatch)
    return fused.compiled_target(dtype=torch.bfloat16 if "16" in request.param else torch.float32)


def is_compiled(target: Target) -> bool:
    return target.compiled is not None and target.compiled.is_current


def answer(target: Target, prompt: list[int], sampling: SamplingConfig, likely: list[int] | None = None) -> list[Step]:
    drafter = WrongDrafter(len(prompt), likely, VOCABULARY, seed=1) if likely else None
    return list(decode(target, prompt, sampler_of(sampling, prompt), max_new_tokens=MAX_NEW_TOKENS, drafter=drafter))


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.each_value
def test_the_next_answer_is_that_of_the_changed_model(change: Callable[[Any], None], target: Target) -> None:
    if change is with_weights_in_place and has_compact_weights(target.model):
        pytest.skip("weights in 16 bits refuse it")
    model, prompt, captures, was_compiled = target.model, prompt_of(40), target.captures, is_compiled(target)
    before = generated(model, prompt, MAX_NEW_TOKENS)
    assert output_tokens(answer(target, prompt, SamplingConfig(), before)) == before
    answer(target, prompt, SAMPLED)
    change(model)
    expected = generated(model, prompt, MAX_NEW_TOKENS)
    assert expected != before
    steps = answer(target, prompt, SamplingConfig(), expected)
    assert output_tokens(steps) == expected
    assert steps[0].cached_tokens == 0
    plain = output_tokens(answer(Target(model, never), prompt, SAMPLED))
    again = answer(target, prompt, SAMPLED, plain)
    assert output_tokens(again) == plain
    assert again[0].cached_tokens > 0
    assert target.captures == captures
    assert is_compiled(target) == (was_compiled and change is with_weights_in_place)


def test_settings_of_an_adapter_are_part_of_the_model(target: Target) -> None:
    model, prompt = target.model, prompt_of(40)
    with_adapter(model)
    adapter = mlp_of(model).down_proj

    def scale(factor: float) -> None:
        adapter._scales["default"] = factor

    answers = []
    for setting in (
        lambda: None,
        lambda: setattr(adapter, "enabled", False),
        lambda: setattr(adapter, "enabled", True),
        lambda: scale(0.25),
    ):
        setting()  # type: ignore[no-untyped-call]
        answers.append(generated(model, prompt, MAX_NEW_TOKENS))
        assert output_tokens(answer(target, prompt, SamplingConfig(), answers[-1])) == answers[-1]
    assert answers[0] == answers[2] and len({*map(tuple, answers)}) == 3


def test_nothing_is_captured_or_read_again_without_a_change() -> None:
    capture = Replayed()
    target, prompt = Target(own_model(), lambda device: capture), prompt_of(40)
    answer(target, prompt, SamplingConfig())
    recorded = capture.recorded
    for _ in range(2):
        assert answer(target, prompt, SamplingConfig())[0].cached_tokens > 0
    assert capture.recorded == recorded and target.changes == 0


def test_a_change_before_the_first_answer_is_noticed() -> None:
    model, prompt = own_model(), prompt_of(40)
    target = Target(model, lambda device: Replayed())
    with_adapter(model)
    assert output_tokens(answer(target, prompt, SamplingConfig())) == generated(model, prompt, MAX_NEW_TOKENS)


def test_an_adapter_that_is_taken_away_leaves_the_model_that_was(target: Target) -> None:
    model, prompt, was_compiled = target.model, prompt_of(40), is_compiled(target)
    before = answer(target, prompt, SAMPLED)
    with_adapter(model)
    assert output_tokens(answer(target, prompt, SAMPLED)) != output_tokens(before)
    assert not is_compiled(target)
    mlp_of(model).down_proj = mlp_of(model).down_proj.base
    again = answer(target, prompt, SAMPLED)
    assert output_tokens(again) == output_tokens(before) and again[0].cached_tokens == 0
    assert is_compiled(target) == was_compiled


def with_slightly_other_data(model: Any) -> None:
    weight = mlp_of(model).down_proj.weight
    weight.data = weight.data * (1 + 1e-6)


def with_a_step_of_an_optimizer(model: Any) -> None:
    """Change a weight by less than most of its numbers are rounded by."""
    weight = next(weight for weight in model.model.layers.parameters() if not is_compact(weight))
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=1e-9).step()


@pytest.mark.parametrize("change", [with_slightly_other_data, with_a_step_of_an_optimizer])
def test_a_change_too_small_to_show_in_a_key_voids_what_is_kept(change: Callable[[Any], None], target: Target) -> None:
    prompt = prompt_of(40)
    answer(target, prompt, SamplingConfig())
    change(target.model)
    assert answer(target, prompt, SamplingConfig())[0].cached_tokens == 0
    assert answer(target, prompt, SamplingConfig())[0].cached_tokens == len(prompt) - 2


def test_weights_that_captured_steps_read_are_not_freed_before_the_next_prompt() -> None:
    model, prompt = own_model(), prompt_of(40)
    target = Target(model, lambda device: Replayed())
    answer(target, prompt, SamplingConfig())
    memory = weakref.ref(mlp_of(model).down_proj.weight.untyped_storage())
    held = [storage.data_ptr() for storage in target._changes._memory]
    assert mlp_of(model).down_proj.weight.data_ptr() in held and memory() is not None
    with_other_data(model)
    target.notice_changes()
    assert mlp_of(model).down_proj.weight.data_ptr() in [storage.data_ptr() for storage in target._changes._memory]
    assert len(target._changes._memory) == len(held)


def test_hidden_states_are_watched_after_a_change(target: Target) -> None:
    prompt, captures = prompt_of(40), target.captures
    target.watch_hidden()
    answer(target, prompt, SamplingConfig())
    with_adapter(target.model)
    fresh = Target(target.model, never)
    fresh.watch_hidden()
    found = []
    for each in (target, fresh):
        one = OneSequence(each)
        one.prefill(prompt)
        for _ in range(2):  # the first captures, the second replays
            one.verify(DraftTree.of(3, [5, 8], [-1, 0]))
        assert one.verified.hidden is not None and len(one.verified.hidden) == 3
        found.append(one.verified.hidden)
    assert target.captures == captures
    of_target, plain = found
    assert torch.allclose(of_target, plain, atol=1e-4)


class IgnoresMasks(LlamaAttention):
    def forward(self, hidden_states: Any, attention_mask: Any = None, **options: Any) -> Any:  # type: ignore[override]
        return super().forward(hidden_states=hidden_states, attention_mask=None, **options)


def test_a_model_that_became_one_that_cannot_be_used_is_refused(target: Target) -> None:
    model, prompt, was_compiled = target.model, prompt_of(40), is_compiled(target)
    expected = output_tokens(answer(target, prompt, SamplingConfig()))
    for layer in model.model.layers:
        layer.self_attn.__class__ = IgnoresMasks
    for _ in range(2):
        with pytest.raises(FamilyError, match="does not follow tree masks"):
            answer(target, prompt, SamplingConfig())
    for layer in model.model.layers:
        layer.self_attn.__class__ = LlamaAttention
    assert output_tokens(answer(target, prompt, SamplingConfig())) == expected
    assert is_compiled(target) == was_compiled


def test_contexts_that_a_batch_keeps_are_dropped(target: Target) -> None:
    model, prompt = target.model, prompt_of(40)
    session = Session[int](target, target.allocate(2), max_new_tokens=MAX_NEW_TOKENS, prefixes=PrefixCache(1 << 24))
    assert answered(session, prompt) == (generated(model, prompt, MAX_NEW_TOKENS), 0)
    assert answered(session, prompt)[1] > 0
    with_adapter(model)
    expected = generated(model, prompt, MAX_NEW_TOKENS)
    assert answered(session, prompt) == (expected, 0)
    tokens, cached = answered(session, prompt)
    assert tokens == expected and cached > 0


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.each_value
def test_a_generator_answers_as_generate_does_with_the_changed_model(
    change: Callable[[Any], None], capture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_generate, "Target", partial(Target, capture=CAPTURES[capture]))
    model, prompt = own_model(), prompt_of(40)
    generator = Generator(WrongDrafter(40, generated(model, prompt, MAX_NEW_TOKENS), VOCABULARY, seed=2))
    targets = []
    for is_changed in (False, True):
        if is_changed:
            change(model)
        for _ in range(2):
            assert generated(model, prompt, MAX_NEW_TOKENS, custom_generate=generator) == generated(
                model, prompt, MAX_NEW_TOKENS
            )
            targets.append(generator._target)
        assert generator.stats.cached_tokens > 0
    assert targets[0] is targets[-1], "the drafter has learned from its target's answers"


def test_other_embeddings_are_another_target() -> None:
    model, prompt = own_model(), prompt_of(20)
    generator = Generator()
    generated(model, prompt, 4, custom_generate=generator)
    model.resize_token_embeddings(VOCABULARY + 5)
    assert generated(model, prompt, MAX_NEW_TOKENS, custom_generate=generator) == generated(
        model, prompt, MAX_NEW_TOKENS
    )
    assert generator._target is not None and generator._target.vocabulary == VOCABULARY + 5
