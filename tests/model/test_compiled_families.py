"""Compiled passes of the families beside Llama, of which the suite of engines tests logits, bits and answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Linear
from transformers import Gemma4Config, Gemma4ForConditionalGeneration

from hdtool.runtime.caches.recurrent_states import SlotStates
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.drafters.drafter_factory import drafter_for
from hdtool.runtime.engines.cpu import compile_and_check
from hdtool.runtime.engines.cpu.tree_pass import PROMPT_CHUNK
from hdtool.runtime.kernels.compact_weight import CompactWeight, is_compact
from hdtool.runtime.kernels.packed_matrix import packed_int8
from hdtool.runtime.model.compact_layers import compact_weights, replace_parameter
from hdtool.runtime.program.model_parts import model_parts
from hdtool.runtime.settings.decoding import DecodeConfig
from hdtool.runtime.settings.draft_sources import SourceId
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import load
from hdtool.runtime.target.target import Target
from tests.support import families
from tests.support.conformance import BUSH
from tests.support.decoding import answer_of, assert_lossless, output_tokens, run
from tests.support.described import (
    DESCRIBED_MODELS,
    assert_right,
    compiled_of,
    model_of,
    nemotron_h,
    target_of,
)
from tests.support.fused import TREE, after, compile_target, compiled, logits_of, with_compiled_layers
from tests.support.one_sequence import OneSequence
from tests.support.oracle import assert_same_logits, generated, plain_logits, prompt_of
from tests.support.published_drafters import assistant, let_all_layers_share
from tests.support.trees import tokens_to

pytestmark = pytest.mark.usefixtures("wide_heads")

KINDS = (
    "granitemoehybrid", "lfm2", "qwen3_5", "qwen3_5_moe", "qwen3_next", "falcon_h1", "mamba2", "nemotron_h",
    "kimi_linear", "bailing_hybrid", "zamba2",
)  # fmt: skip


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
        target.stock_passes.prefill(read[one.length :], one.cache.slots[0])
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
    model = nemotron_h(time_step_min=0.5, max_position_embeddings=2048)
    target, prompt = with_compiled_layers(model), prompt_of(length)
    compile_target(target)
    assert not target.facts.continues
    expected = generated(model, prompt, 24)
    assert_lossless(target, prompt, max_new_tokens=24, expected=expected, seeds=range(3))
    longer = [*prompt, *expected, *prompt_of(7)]
    assert answer_of(target, longer, max_new_tokens=24) == generated(model, longer, 24)
    assert compiled(target).passes > 24


@pytest.mark.parametrize("name", DESCRIBED_MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.one_in(8)
def test_weights_in_16_bits_give_the_bits_of_float32(name: str, dtype: torch.dtype) -> None:
    found = []
    for is_narrow in (False, True):
        model = model_of(name)
        for weight in model.parameters():
            weight.data = weight.data.to(dtype).float()
        if is_narrow:
            compact_weights(model)
        target = with_compiled_layers(model)
        compile_target(target)
        found.append(logits_of(target, prompt_of(40), BUSH))
    assert torch.equal(*found)


def test_a_head_of_which_no_whole_vectors_are_rotated_is_the_librarys() -> None:
    assert not with_compiled_layers(families.random_model("Glm", partial_rotary_factor=0.375)).compile()


@pytest.mark.parametrize("name", ["gemma3", "qwen3_moe"])
def test_outputs_of_layers_are_those_of_the_library(name: str) -> None:
    """Beside the input of the output layer, of prompts, trees and batches."""
    target, usual = compiled_of(name), target_of(name)
    found = list[list[torch.Tensor]]()
    for one in (target, usual):
        columns = [one.watch_hidden(), one.watch_hidden([1, 0])]
        assert columns == [slice(0, 64), slice(64, 192)]
        cache = one.allocate(2)
        hidden = [one.prefill(cache, slot, prompt_of(length), room=64).hidden for slot, length in ((0, 150), (1, 9))]
        hidden += [verified.hidden for verified in one.verify(cache, [TREE, TREE])]
        found.append([rows.clone() for rows in hidden if rows is not None])
    assert compiled(target).is_current and usual.compiled is None
    assert len(found[0]) == len(found[1]) == 4
    for own, expected in zip(*found, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("length", [2, 40, PROMPT_CHUNK + 30])
@pytest.mark.parametrize("name", ["gemma4", "gemma4, keys of two layers"])
def test_the_last_row_of_a_prompt_has_the_bits_of_one_alone(name: str, length: int) -> None:
    """Layers that keep no keys compute that row only, unless the hidden states of all are wanted."""
    target, prompt = compiled_of(name), prompt_of(length)
    one = OneSequence(target)
    last = one.prefill(prompt[:1], room=length + 8).clone()
    for token in prompt[1:]:
        last = one.verify(DraftTree.bare(token)).clone()
        one.commit([])
    assert torch.equal(one.prefill(prompt), last)
    hidden = list[torch.Tensor | None]()
    for watched in (target, target_of(name)):
        watched.watch_hidden()
        cache = watched.allocate(1)
        hidden.append(watched.prefill(cache, 0, prompt).hidden)
    assert torch.equal(one.prefill(prompt), last)
    own, expected = hidden
    assert own is not None and expected is not None and len(own) == length
    torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-4)


def test_an_assistant_drafts_from_compiled_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_all_layers_share(monkeypatch)
    target, usual = compiled_of("gemma4"), target_of("gemma4")
    for one in (target, usual):
        with torch.no_grad():
            one.model.lm_head.weight[3:] *= 0.1  # some drafts are accepted by chance
    folder, prompt = str(assistant(tmp_path, target.model)), prompt_of(20)
    drafters = [
        drafter_for(DecodeConfig("drafter", draft_tokens=6, drafter=folder), one, StoreSet()) for one in (target, usual)
    ]
    plain = answer_of(usual, prompt, SamplingConfig(), max_new_tokens=40)
    found = [
        run(one, prompt, SamplingConfig(), max_new_tokens=40, drafter=drafter)
        for one, drafter in zip((target, usual), drafters, strict=True)
    ]
    assert compiled(target).is_current
    assert [output_tokens(steps) for steps in found] == [plain, plain]
    drafted = [[step.tree.tokens.tolist() for step in steps] for steps in found]
    assert drafted[0] == drafted[1]
    assert SourceId.DRAFTER in {source for step in found[0] for source in step.tree.sources.tolist()}


def multimodal_target() -> Target:
    settings = model_of("gemma4").config
    config = Gemma4Config(text_config=settings, image_token_id=90, video_token_id=91, audio_token_id=92)
    config.vision_config = config.audio_config = None
    torch.manual_seed(1)
    model: Any = Gemma4ForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = None
    return with_compiled_layers(model)


def test_text_of_a_multimodal_model_is_compiled() -> None:
    """A pass over ids that stand for images is the library's, which reads padding in their place."""
    target = multimodal_target()
    target.compile()
    assert target.compiled
    assert_right(target.model, target, ((6, 0, 20),))
    for token in (89, 90, 91, 92):
        one = after(target, prompt_of(20))
        before = target.compiled.passes
        found = one.verify(DraftTree.of(5, [token], [-1]))
        assert (target.compiled.passes > before) == (token == 89)
        assert_same_logits(found[1], plain_logits(target.model, [*prompt_of(20), 5, token]))


@pytest.mark.parametrize("name", ["gemma4", "gemma4, experts beside MLPs"])
def test_a_checkpoint_in_16_bits_is_compiled_at_each_start(home: Path, name: str, tmp_path: Path) -> None:
    """The later start uses the proof of the earlier one; the embeddings of layers stay in 16 bits."""
    families.saved(model_of(name).bfloat16(), tmp_path / "model")
    found = []
    for _ in range(2):
        target = load(ModelConfig(str(tmp_path / "model"), device="cpu")).target
        assert compiled(target).is_current
        found.append(logits_of(target, prompt_of(40)).clone())
        assert_right(target.model, target, ((6, 0, 20),))
        inputs: Any = target.model.model._modules.get("embed_tokens_per_layer")
        assert inputs is None or is_compact(inputs.weight)
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["gemma4", "gemma4, experts beside MLPs"])
def test_a_row_has_the_same_bits_with_activations_in_8_bits(name: str) -> None:
    """Weights are packed, as those of the library that quantizes to 8 bits."""
    found = []
    for is_int8 in (False, True):
        model = model_of(name)
        for module in [module for module in model.modules() if type(module) is Linear]:
            scales = module.weight.abs().amax(1, keepdim=True) / 127
            matrix = packed_int8((module.weight / scales).round().to(torch.int8), scales, module.in_features)
            assert matrix
            replace_parameter([(module, "weight")], CompactWeight(matrix))
        target = with_compiled_layers(model)
        passes = compile_target(target)
        assert not is_int8 or passes.use_int8_activations()
        found.append(logits_of(target, prompt_of(40)).clone())
    distance = torch.linalg.vector_norm(found[1] - found[0]) / torch.linalg.vector_norm(found[0])
    assert 1e-5 < distance < (0.3 if "experts" in name else 0.1)  # rounding may choose other experts
    alone = after(target, prompt_of(40))
    alone.verify(DraftTree.bare(3))
    alone.commit()
    assert torch.equal(alone.verify(DraftTree.bare(5))[0], found[1][1])


def test_a_factor_that_is_written_in_place_is_the_new_one() -> None:
    target = compiled_of("gemma4")
    before = logits_of(target, prompt_of(40))
    target.model.model.layers[1].layer_scalar.mul_(0.5)
    assert_right(target.model, target, ((6, 0, 20),))
    assert compiled(target).is_current and not torch.equal(logits_of(target, prompt_of(40)), before)


def test_keys_of_another_layer_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of each kind keep keys, of which later ones read those of the last."""
    target = target_of("gemma4, keys of two layers")

    def other_sources(model: Any, kind: Any) -> Any:
        parts = model_parts(model, kind)
        assert parts and [layer.kv_source for layer in parts.layers] == [None] * 4 + [2, 3]
        layers = [
            *parts.layers[:4],
            *(replace(layer, kv_source=(layer.kv_source or 0) - 2) for layer in parts.layers[4:]),
        ]
        return replace(parts, layers=layers)

    monkeypatch.setattr(compile_and_check, "model_parts", other_sources)
    assert not target.compile()
