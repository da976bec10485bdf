"""Compiled passes: the same bits and answers in all described families, and the states of hybrids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import Module

from hdtool.runtime.caches.states import SlotStates
from hdtool.runtime.config.model import SamplingConfig
from hdtool.runtime.core.prefix_cache import PrefixCache
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.sequence import Request
from hdtool.runtime.core.session import Session
from hdtool.runtime.core.tree import ROOT, DraftTree
from hdtool.runtime.engines.cpu.tree_pass import PROMPT_CHUNK
from hdtool.runtime.kernels.linear import compile_linear_layers
from hdtool.runtime.program.hybrid_families import HYBRID_FAMILIES
from hdtool.runtime.target.target import Target
from tests.support import families
from tests.support.decoding import SAMPLINGS, all_answered, answered, assert_drafts_keep, output_tokens, run
from tests.support.described import (
    DENSE_MODELS,
    DESCRIBED_MODELS,
    compiled_of,
    compiles_as,
    nemotron_h,
    target_of,
)
from tests.support.families import VOCABULARY
from tests.support.fused import after, compiled, logits_of, widen
from tests.support.one_sequence import OneSequence
from tests.support.oracle import assert_same_logits, generated, plain_logits, prompt_of
from tests.support.trees import WrongDrafter, path_to, tokens_to

KINDS = (
    "granitemoehybrid", "lfm2", "qwen3_5", "qwen3_5_moe", "qwen3_next", "falcon_h1", "mamba2", "nemotron_h",
    "kimi_linear", "bailing_hybrid", "zamba2",
)  # fmt: skip
BUSH = DraftTree.of(3, [5, 8, 13, 21, 34, 55, 2, 9, 11], [ROOT, 0, 0, 2, ROOT, 4, 2, 3, ROOT])
"""Several nodes have several children, and later nodes follow earlier ones."""


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    widen(monkeypatch)
    monkeypatch.setitem(families.SHAPE, "head_dim", 32)


@pytest.mark.parametrize("name", DESCRIBED_MODELS)
@pytest.mark.one_in(4)
def test_a_row_has_the_same_bits_in_every_pass(name: str) -> None:
    """In a tree, decoded alone, in a batch, after an accepted path of a tree, and in a prompt."""
    target, context = compiled_of(name), prompt_of(40)
    of_tree = logits_of(target, context, BUSH)
    for node in range(len(BUSH)):
        tokens, alone = tokens_to(BUSH, node), after(target, context)
        for token in tokens:
            found = alone.verify(DraftTree.bare(token)).clone()
            alone.commit()
        assert torch.equal(found[0], of_tree[node + 1])
        assert torch.equal(after(target, [*context, *tokens]).verified.logits[0], of_tree[node + 1])
        drafted, again = after(target, [*context, *tokens]), after(target, context)
        again.verify(BUSH)
        again.commit(path_to(BUSH, node))
        assert torch.equal(again.verify(BUSH), drafted.verify(BUSH).clone())
    cache = target.allocate(2)
    for slot in range(2):
        target.prefill(cache, slot, context, room=64)
    both = target.verify(cache, [DraftTree.bare(7), BUSH])
    assert torch.equal(both[1].logits, of_tree)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.one_in(3)
def test_a_prompt_has_the_same_bits_however_it_is_cut(name: str) -> None:
    target, prompt = compiled_of(name), prompt_of(PROMPT_CHUNK + 40)
    whole = logits_of(target, prompt)
    for first in (1, 2, 77, PROMPT_CHUNK, PROMPT_CHUNK + 1):
        cut = after(target, prompt[:first], room=200)
        cut.prefill(prompt[first:], first)
        assert torch.equal(cut.verify(BUSH)[:1], logits_of(target, prompt, BUSH)[:1])
    assert len(whole) == 7


@pytest.mark.parametrize("name", [*DENSE_MODELS, *KINDS])
@pytest.mark.one_in(4)
def test_threads_change_no_bit(name: str) -> None:
    found, threads = [], torch.get_num_threads()
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            target = compiled_of(name)
            one = after(target, prompt_of(90))
            one.verify(BUSH)
            one.commit([0, 2, 3])
            found.append(one.verify(BUSH).clone())
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


@pytest.mark.parametrize("sampling", ["greedy", "T 0.7"])
@pytest.mark.parametrize("name", DESCRIBED_MODELS)
@pytest.mark.one_in(5)
def test_answers_are_those_of_plain_decoding(name: str, sampling: str) -> None:
    target, usual, prompt = compiled_of(name), target_of(name), prompt_of(30)
    expected = output_tokens(run(usual, prompt, SAMPLINGS[sampling], max_new_tokens=24))
    assert output_tokens(run(target, prompt, SAMPLINGS[sampling], max_new_tokens=24)) == expected
    for seed in range(3):
        assert_drafts_keep(expected, target, prompt, SAMPLINGS[sampling], max_new_tokens=24, seed=seed)
    assert compiled(target).passes > 40


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.one_in(3)
def test_several_answers_at_once_and_conversations_in_turn(name: str) -> None:
    """Answers of different lengths leave a batch and others take their slots, whose states move."""
    target, usual = compiled_of(name), target_of(name)
    prompts = [prompt_of(length) for length in (25, 60, 33, 140)]
    expected = [output_tokens(run(usual, prompt, SamplingConfig(), max_new_tokens=20)) for prompt in prompts]
    requests = [
        Request(number, prompt, Sampler(SamplingConfig(), prompt), WrongDrafter(len(prompt), truth, VOCABULARY, number))
        for number, (prompt, truth) in enumerate(zip(prompts, expected, strict=True))
    ]
    assert all_answered(Session(target, target.allocate(3), max_new_tokens=20), requests) == expected

    one = Session[int](target, target.allocate(1), max_new_tokens=20, prefixes=PrefixCache(1 << 24))
    for prompt, answer in zip(prompts, expected, strict=True):
        assert answered(one, prompt)[0] == answer
    again = [*prompts[0], *expected[0], *prompt_of(5)]
    continued, cached = answered(one, again)
    assert continued == output_tokens(run(usual, again, SamplingConfig(), max_new_tokens=20)) and cached >= 25


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.one_in(3)
def test_turns_go_on_from_kept_states(name: str) -> None:
    """And other conversations, shorter ones as well, begin with states of their own."""
    target, turns = compiled_of(name), [prompt_of(30)]
    one = OneSequence(target)
    for length in (12, 25):
        one.read_on(turns[-1])
        for token in (5, 8):
            one.verify(DraftTree.of(token, [9, 4], [ROOT, ROOT]))
            one.commit([1])
            turns[-1] = [*turns[-1], token, 4]
        turns.append([*turns[-1], *prompt_of(length)])
        assert_same_logits(one.read_on(turns[-1])[0], plain_logits(target.model, turns[-1]))
        assert one.cached_tokens > 20
    for other in (prompt_of(9), prompt_of(1), prompt_of(50)):
        assert_same_logits(one.read_on(other)[0], plain_logits(target.model, other))
        assert_same_logits(one.verify(BUSH)[-1], plain_logits(target.model, [*other, *tokens_to(BUSH, 8)]))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.one_in(3)
def test_a_path_is_accepted_in_a_cache_that_has_grown_since(name: str) -> None:
    target, context = compiled_of(name), prompt_of(20)
    one = after(target, context)
    one.verify(BUSH)
    one.cache.reserve(2000)
    slot = one.cache.slots[0]
    assert slot.states
    other = after(target, context)
    other.verify(BUSH)
    kept = other.cache.slots[0].kept
    assert isinstance(kept, SlotStates) and kept.of_tree
    kept.of_tree.commit(0, [0, 1, 3], slot.states)
    other.commit([0, 2])
    assert other.cache.slots[0].states
    for names, stack in slot.states.stacks.items():
        assert torch.equal(stack, other.cache.slots[0].states.stacks[names])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.one_in(3)
def test_a_path_is_accepted_after_other_passes(name: str) -> None:
    """Another sequence is read and verified on the same model before it."""
    target, context = compiled_of(name), prompt_of(20)
    one, usual = after(target, context), after(target, context)
    usual.verify(BUSH)
    usual.commit([0, 1])
    expected = usual.verify(BUSH).clone()
    one.verify(BUSH)
    after(target, prompt_of(50)).verify(BUSH)
    one.commit([0, 1])
    assert torch.equal(one.verify(BUSH), expected)


def test_a_library_pass_goes_on_from_compiled_ones() -> None:
    target, prompt = compiled_of("qwen3_5"), prompt_of(50)
    one = after(target, prompt[:30])
    one.verify(BUSH)
    one.commit([0, 2])
    read = [*prompt[:30], *tokens_to(BUSH, 2), *prompt[30:]]
    with torch.inference_mode():
        target.stock_passes.read(read[one.length :], one.cache.slots[0])
    assert_same_logits(one.verify(BUSH)[0], plain_logits(target.model, [*read, 3]))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.one_in(3)
def test_weights_written_in_place_are_used(name: str) -> None:
    target = compiled_of(name)
    with torch.no_grad():
        for part, weight in target.model.named_parameters():
            if "conv" in part or "A_log" in part:
                weight.mul_(0.5)
    prompt = prompt_of(30)
    assert_same_logits(after(target, prompt).verify(BUSH)[0], plain_logits(target.model, [*prompt, 3]))
    assert compiled(target).is_current


def test_factors_written_in_place_are_used() -> None:
    target, prompt = compiled_of("falcon_h1"), prompt_of(30)
    with torch.no_grad():
        for layer in target.model.model.layers:
            layer.mamba.mup_vector[..., :140] *= 0.5
    assert_same_logits(after(target, prompt).verify(BUSH)[0], plain_logits(target.model, [*prompt, 3]))
    assert compiled(target).is_current


@pytest.mark.parametrize("length", [1, 20, PROMPT_CHUNK + 9])
def test_time_steps_have_a_bound_in_prompts_alone(length: int) -> None:
    """As in transformers' passes of several tokens, and not where it decodes."""
    torch.manual_seed(0)
    model: Any = nemotron_h(time_step_min=0.5, max_position_embeddings=2048).eval()
    model.generation_config.eos_token_id = None
    compile_linear_layers(model)
    target, prompt = Target(model), prompt_of(length)
    target.compile()
    assert target.compiled and not target.facts.continues
    expected = generated(model, prompt, 24)
    for seed in range(3):
        assert_drafts_keep(expected, target, prompt, SamplingConfig(), max_new_tokens=24, seed=seed)
    longer = [*prompt, *expected, *prompt_of(7)]
    assert output_tokens(run(target, longer, SamplingConfig(), max_new_tokens=24)) == generated(model, longer, 24)
    assert compiled(target).passes > 24


FACTORS = HYBRID_FAMILIES["falcon_h1"].factors
WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "no gates of heads": ("qwen3_5", {"gates_heads": False}),
    "no offset of norms": ("qwen3_5", {"norm": HYBRID_FAMILIES["lfm2"].norm}),
    "no gates of latent attention": ("bailing_hybrid", {"latent_gate": ""}),
    "halves of latent attention": ("bailing_hybrid", {"splits_pairs": False}),
    "no residual factor": ("granitemoehybrid", {"residual": ""}),
    "positions": ("granitemoehybrid", {"rotates": lambda attention: True}),
    "no factor of keys": (
        "falcon_h1",
        {
            "factors": {**FACTORS, "keys": FACTORS["values"]},
            "attributes": frozenset({"channels_attn", "key_multiplier"}),
        },
    ),
    "two factors of mixers": (
        "falcon_h1",
        {"factors": {**FACTORS, "mixer_out": (*FACTORS["out"], *FACTORS["mixer_out"])}},
    ),
    "gate and up exchanged": (
        "lfm2",
        {"names": replace(HYBRID_FAMILIES["lfm2"].names, gate="w3", up="w1")},
    ),
}


@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.one_in(3)
def test_a_wrong_description_is_not_used(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not compiles_as(*WRONG[fault], monkeypatch)


def _mixers(model: Any, kind: str) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__.endswith(kind)]


def a_dilated_convolution(model: Any) -> None:
    _mixers(model, "Conv1d")[0].dilation = (2,)


def a_new_attribute(model: Any) -> None:
    _mixers(model, "GatedDeltaNet")[-1].temperature = 0.9


def a_hook(model: Any) -> None:
    _mixers(model, "GatedDeltaNet")[0].register_forward_hook(lambda module, given, found: found * 1.01)


def a_replaced_forward(model: Any) -> None:
    norm = _mixers(model, "RMSNormGated")[-1]
    norm.forward = lambda *given: 1.01 * type(norm).forward(norm, *given)


def another_activation(model: Any) -> None:
    for mixer in _mixers(model, "GatedDeltaNet"):
        mixer.activation = "gelu"


def a_parameter_more(model: Any) -> None:
    mixer: Module = _mixers(model, "GatedDeltaNet")[0]
    mixer.scale = torch.nn.Parameter(torch.ones(1))


def states_in_another_dtype(model: Any) -> None:
    mixer = _mixers(model, "GatedDeltaNet")[0]
    mixer.conv1d.weight.data = mixer.conv1d.weight.data.double()


CHANGES: Sequence[Callable[[Any], None]] = (
    a_dilated_convolution,
    a_new_attribute,
    a_hook,
    a_replaced_forward,
    another_activation,
    a_parameter_more,
    states_in_another_dtype,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_model_that_differs_is_not_compiled(change: Callable[[Any], None]) -> None:
    target = target_of("qwen3_5")
    change(target.model)
    assert not target.compile()


def test_limited_time_steps_are_the_librarys() -> None:
    target = target_of("granitemoehybrid")
    for mixer in _mixers(target.model, "MambaLayer"):
        mixer.time_step_limit = (0.0, 0.5)
    assert not target.compile()
