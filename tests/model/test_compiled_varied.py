"""Compiled passes of models whose layers differ in their heads, inputs and keys: right, or not used."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Identity, Linear
from transformers import Gemma4Config, Gemma4ForConditionalGeneration
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextModel

from hdtool.data import demo
from hdtool.runtime.config.decoding import DecodeConfig
from hdtool.runtime.config.model import ModelConfig, SamplingConfig
from hdtool.runtime.config.source_names import SourceId
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.drafters.methods import drafter_for
from hdtool.runtime.engines.cpu import proof
from hdtool.runtime.engines.cpu.tree_pass import PROMPT_CHUNK
from hdtool.runtime.kernels.compact_weight import CompactWeight, is_compact
from hdtool.runtime.kernels.experts import compile_experts
from hdtool.runtime.kernels.linear import compile_linear_layers
from hdtool.runtime.kernels.packed_matrix import packed_int8
from hdtool.runtime.model.compact_layers import replace_parameter
from hdtool.runtime.program.model_families import GEMMA_NORM, VARIED_FAMILIES
from hdtool.runtime.program.model_parts import model_parts
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import load
from hdtool.runtime.target.target import Target
from tests.support import families
from tests.support.decoding import output_tokens, run
from tests.support.described import assert_right, compiled_of, compiles_as, model_of, of_the_same_name, target_of
from tests.support.fused import after, compiled, logits_of, widen
from tests.support.one_sequence import OneSequence
from tests.support.oracle import assert_same_logits, plain_logits, prompt_of
from tests.support.published_drafters import assistant, let_all_layers_share

WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "weights of norms with an offset": ("gemma4", {"norm": GEMMA_NORM}),
    "another order of norms": (
        "gemma4",
        {"norms": (*VARIED_FAMILIES["gemma4"].norms[2:], *VARIED_FAMILIES["gemma4"].norms[:2])},
    ),
    "no bound of logits": ("gemma4", {"logit_softcap": ""}),
    "no positions": ("gemma4_unified", {"rotates": lambda attention: False}),
    "no norm of values": ("gemma4_unified", {"value_norm": ""}),
    "no factor": ("gemma4_unified", {"factor": ""}),
    "no inputs of layers": ("gemma4", {"has_inputs": False}),
    "values of their own": ("gemma4_unified", {"projections": lambda attention: ("q_proj", "k_proj", "v_proj")}),
    "keys of its own": ("gemma4", {"projections": lambda attention: ("q_proj", "k_proj", "v_proj")}),
    "no keys that later layers read": ("gemma4", {"shared_kv_attribute": "is_kv_shared_layer"}),
    "heads of one shape": ("gemma4", {"varies_heads": False}),
    "no experts": ("gemma4, experts beside MLPs", {"added_router": ""}),
}


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    widen(monkeypatch)
    monkeypatch.setitem(families.SHAPE, "head_dim", 32)


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
    plain = output_tokens(run(usual, prompt, SamplingConfig(), max_new_tokens=40))
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
    compile_linear_layers(model)
    return Target(model)


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
def test_a_checkpoint_in_16_bits_is_compiled_at_each_start(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later start uses the proof of the earlier one; the embeddings of layers stay in 16 bits."""
    monkeypatch.setenv("HDTOOL_HOME", str(tmp_path / "home"))
    model_of(name).bfloat16().save_pretrained(tmp_path / "model")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(demo.MODEL) / file, tmp_path / "model")
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
        compile_linear_layers(model)
        compile_experts(model)
        target = Target(model)
        target.compile()
        assert target.compiled and (not is_int8 or target.compiled.use_int8_activations())
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


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_description_is_not_used(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not compiles_as(*WRONG[fault], monkeypatch)


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

    monkeypatch.setattr(proof, "model_parts", other_sources)
    assert not target.compile()


def a_new_attribute(model: Any) -> None:
    model.model.layers[1].self_attn.temperature = 1.0


def a_module_more(model: Any) -> None:
    model.model.layers[1].router = Identity()


def another_norm_of_values(model: Any) -> None:
    norm = model.model.layers[1].self_attn.v_norm
    plain = type(norm).forward
    norm.__class__ = of_the_same_name(norm, forward=lambda self, rows: 1.001 * plain(self, rows))


def another_activation_of_inputs(model: Any) -> None:
    model.model.layers[1].act_fn = torch.nn.SiLU()


def other_inputs(model: Any) -> None:
    plain = model.model.project_per_layer_inputs
    model.model.project_per_layer_inputs = lambda *given: 1.01 * plain(*given)


def inputs_of_another_package(model: Any) -> None:
    class Own(Gemma4TextModel):
        """As remote code brings it."""

    model.model.__class__ = Own


def a_norm_of_inputs_without_a_weight(model: Any) -> None:
    del model.model.per_layer_projection_norm.weight


def both_directions(model: Any) -> None:
    model.config.use_bidirectional_attention = "all"


def factors_for_each_number(model: Any) -> None:
    layer = model.model.layers[0]
    layer.layer_scalar = torch.ones(64)


CHANGES: Mapping[str, Callable[[Any], None]] = {
    change.__name__.replace("_", " "): change
    for change in (
        a_new_attribute,
        a_module_more,
        another_norm_of_values,
        another_activation_of_inputs,
        other_inputs,
        inputs_of_another_package,
        a_norm_of_inputs_without_a_weight,
        both_directions,
        factors_for_each_number,
    )
}


def a_temperature_of_the_router(model: Any) -> None:
    model.model.layers[1].router.temperature = 1.0


def another_epsilon_of_the_router(model: Any) -> None:
    model.model.layers[1].router.norm.eps = 0.1


def another_router(model: Any) -> None:
    router = model.model.layers[1].router
    plain = type(router).forward
    router.__class__ = of_the_same_name(router, forward=lambda self, rows: plain(self, 1.01 * rows + 0.01))


def a_replaced_router(model: Any) -> None:
    router = model.model.layers[1].router
    router.forward = lambda rows: type(router).forward(router, rows)


def experts_of_the_library(model: Any) -> None:
    experts = model.model.layers[1].experts
    own = experts.__dict__.pop("_usual")
    experts.__class__ = own


OF_EXPERTS: Mapping[str, Callable[[Any], None]] = {
    change.__name__.replace("_", " "): change
    for change in (
        a_temperature_of_the_router,
        another_epsilon_of_the_router,
        another_router,
        a_replaced_router,
        experts_of_the_library,
    )
}


@pytest.mark.parametrize("change", OF_EXPERTS)
def test_a_mixture_that_differs_is_not_compiled(change: str) -> None:
    target = target_of("gemma4, experts beside MLPs")
    OF_EXPERTS[change](target.model)
    assert not target.compile()


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_differs_is_not_compiled(change: str) -> None:
    target = target_of("gemma4")
    CHANGES[change](target.model)
    assert not target.compile()
