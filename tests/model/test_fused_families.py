"""The fused pass of families that are described beside Llama: right, or not used."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, GraniteConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from hdtool.runtime.core.tree import ROOT, DraftTree
from hdtool.runtime.engines.captured import fused_pass
from hdtool.runtime.engines.captured.fused_pass import fuse
from hdtool.runtime.engines.reference.operations import Norm, Residual
from hdtool.runtime.model.pass_inputs import StepInput
from hdtool.runtime.program.hybrid_families import DESCRIBED
from hdtool.runtime.program.latent_families import LATENT_FAMILIES
from hdtool.runtime.program.llama_like_families import FAMILIES, LLAMA_NORMS, Family, settings_of
from hdtool.runtime.program.mixer_parts import epsilon_of
from hdtool.runtime.program.model_parts import EngineSupport, model_parts
from hdtool.runtime.target.target import Target
from tests.support.described import (
    EXPERTS,
    LATENT_MODELS,
    LAYER_NORM_MODELS,
    LOCAL_AND_GLOBAL,
    MODELS,
    WINDOWS,
    assert_right,
    model_of,
)
from tests.support.families import SHAPE, random_model
from tests.support.fused import widen
from tests.support.interpreted import interpreted_kernels
from tests.support.one_sequence import OneSequence
from tests.support.oracle import assert_same_logits, plain_logits, prompt_of
from tests.support.rehearsed import captured_of, direct

RARER = (
    "gemma4, keys of two layers",
    "phi, norms of heads",
    "glm4",
    "granite",
    "olmo2",
    "smollm3",
    "gemma4",
    "gemma4, experts beside MLPs",
    "lfm2",
    "bamba",
    "bailing_hybrid",
    "kimi_linear",
    "falcon_h1",
    "mamba2",
    "nemotron_h",
    "zamba2",
    *LATENT_MODELS,
    *LAYER_NORM_MODELS,
)
BY_KERNELS = (
    *("gemma3", "deepseek_v3, longer contexts", "phi3, a part rotated", "qwen3_5"),
    *(pytest.param(name, marks=pytest.mark.exhaustive) for name in RARER),
)


def is_fused(model: Any) -> bool:
    return Target(model, direct).is_fused


@pytest.mark.parametrize("name", BY_KERNELS)
@pytest.mark.long
def test_trees_get_the_logits_of_forward_by_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    widen(monkeypatch)
    with interpreted_kernels():
        model = model_of(name)
        target = Target(model, direct)
        assert target.is_fused and not captured_of(target)._passes[0].reads_extent
        assert_right(model, target, ((6,), (3,)), (40,))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.one_in(4)
def test_an_engine_of_llamas_computes_none_of_them(name: str) -> None:
    llamas: EngineSupport[Module] = EngineSupport(
        lambda one: hasattr(one, "in_features"), lambda one: True, lambda one: True
    )
    assert model_parts(model_of(name), llamas) is None
    assert model_parts(model_of(name), replace(llamas, families=FAMILIES))


def test_a_setting_that_a_release_adds_is_noticed() -> None:
    class Later(GraniteConfig):
        """Declares a setting more."""

        def __init__(self, *, attention_temperature: float = 1.0, **others: Any) -> None:
            super().__init__(**others)

    assert settings_of(Later) - settings_of(GraniteConfig) == {"attention_temperature"}
    model = model_of("granite")
    target = Target(model, direct)
    assert fuse(target.stock, target.facts)
    Later.__module__ = GraniteConfig.__module__
    model.model.config.__class__ = Later
    assert fuse(target.stock, target.facts) is None


def test_clipped_queries_are_left_to_the_library() -> None:
    torch.manual_seed(0)
    model: Any = random_model("Olmoe", without=("head_dim",), **EXPERTS, clip_qkv=0.5).eval()
    assert not is_fused(model)
    assert is_fused(model_of("olmoe"))


def test_a_model_with_images_has_a_fused_pass_over_text() -> None:
    text = {**SHAPE, **WINDOWS, "rope_parameters": LOCAL_AND_GLOBAL}
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
        "patch_size": 8,
    }  # fmt: skip
    torch.manual_seed(0)
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model: Any = Gemma3ForConditionalGeneration(config).eval()
    target = Target(model, direct)
    assert target.is_fused
    assert_right(model, target, ((6, 0, 20),))
    # Its class would leave a bound of logits out, which the text model alone has.
    model.model.language_model.config.final_logit_softcapping = 3.0
    assert fuse(target.stock, target.facts) is None


@pytest.mark.parametrize("name", ["gemma3", "olmo2"])
def test_norms_that_are_written_in_place_count(name: str) -> None:
    model = copy.deepcopy(model_of(name))
    target = Target(model, direct)
    one, context, tree = OneSequence(target), prompt_of(30), DraftTree.of(5, [2, 9], [ROOT, 0])
    for _ in range(2):
        one.prefill(context)
        assert_same_logits(one.verify(tree)[2], plain_logits(model, [*context, 5, 2, 9]))
        with torch.no_grad():
            for layer in model.model.layers:
                layer.post_feedforward_layernorm.weight.mul_(-2)
                layer.self_attn.k_norm.weight.add_(1)
    assert target.is_fused


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe", "mixtral", "olmoe"])
def test_experts_are_chosen_on_the_device_in_the_pass_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(name)
    model.set_experts_implementation("eager")
    calls, grouped = [], ALL_EXPERTS_FUNCTIONS["grouped_mm"]

    def counted(*given: Any) -> Any:
        calls.append(name)
        return grouped(*given)

    monkeypatch.setitem(type(ALL_EXPERTS_FUNCTIONS)._global_mapping, "grouped_mm", counted)
    target = Target(model, direct)
    assert target.is_fused and calls
    calls.clear()
    expected = plain_logits(model, [*prompt_of(30), 5])
    assert not calls and model.config._experts_implementation == "eager"
    one = OneSequence(target)
    one.prefill(prompt_of(30))
    assert not calls
    assert_same_logits(one.verify(DraftTree.bare(5))[0], expected)
    assert len(calls) == model.config.num_hidden_layers


@pytest.mark.parametrize("name", [name for name in MODELS | LAYER_NORM_MODELS if "," not in name])
@pytest.mark.one_in(3)
def test_norms_round_where_those_of_the_library_do(name: str) -> None:
    """In float16: Triton's interpreter cuts numbers to bfloat16, where GPUs round them."""
    torch.manual_seed(0)
    kind = DESCRIBED[name].norm
    norm: Any = model_of(name).half().model.get_submodule(DESCRIBED[name].names.last_norm)
    norm.weight.data = torch.randn_like(norm.weight)
    rows = torch.randn(60, len(norm.weight)).half()
    epsilon, bias = epsilon_of(norm, kind.parameters) or 0.0, norm._parameters.get("bias")
    with interpreted_kernels():
        operations = fused_pass.triton_operations(rows.device)
        assert operations
        found, other = (
            operations.add_norm(rows.clone(), None, Residual(None, Norm(norm.weight, epsilon, each, bias)))
            for each in (kind, replace(kind, rounds=not kind.rounds))
        )
    expected = norm(rows)
    assert (found != expected).float().mean() < 0.01 < 0.1 < (other != expected).float().mean()


class Kernels:
    """Counts kernels instead of launching them."""

    def __init__(self, found: Counter[str]) -> None:
        self._found = found

    def __getattr__(self, name: str) -> Kernels:
        return self

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *given, **constants: self._found.update(["kernel"])


class Matmuls(TorchDispatchMode):
    def __init__(self, found: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._found.update(["matmul"] * (func._opname in ("addmm", "linear", "mm")))
        return func(*args, **(kwargs or {}))


KERNELS = {"gemma3": 6, "gemma2": 6, "granite": 6, "olmo2": 7, "phi3": 6}
"""Kernels of a layer, beside four matmuls."""


@pytest.mark.parametrize("name", KERNELS)
def test_a_layer_takes_few_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from hdtool.runtime.engines.cuda import triton_operations
    from hdtool.runtime.engines.cuda.triton_operations import TritonOperations

    target = Target(model_of(name), direct)
    monkeypatch.setattr(fused_pass, "triton_operations", TritonOperations)
    found = fuse(target.stock, target.facts)
    assert found
    cache, told = target.allocate(1), StepInput(target.device, 1)
    told.send(1, 4)
    counted = []
    for layers in (2, 1):
        launched: Counter[str] = Counter()
        found._layers._layers = found._layers._layers[:layers]
        storage = replace(cache.storage, layers=cache.storage.layers[:layers])
        monkeypatch.setattr(triton_operations, "triton_kernels", Kernels(launched))
        with torch.inference_mode(), Matmuls(launched):
            found.run(told.tensors(1, 4), storage, 0)
        counted.append(launched)
    assert counted[0] - counted[1] == {"kernel": KERNELS[name], "matmul": 4}


def test_all_descriptions_are_tested_and_differ_from_llamas() -> None:
    assert {name.split(",")[0] for name in MODELS} == FAMILIES.keys()
    assert {name.split(",")[0] for name in LATENT_MODELS} == LATENT_FAMILIES.keys()
    for family in FAMILIES.values():
        plain = Family()
        assert replace(family, settings=plain.settings, required=plain.required, attributes=plain.attributes) != plain
    assert Family().layer.norms == LLAMA_NORMS


def test_states_may_have_weights_in_float32_in_a_model_of_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Transformers loads Bailing's models."""
    widen(monkeypatch)
    model = model_of("bailing_hybrid").bfloat16()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if any(kept in name for kept in model._keep_in_fp32_modules_strict):
            tensor.data = tensor.data.float()
    assert is_fused(model)
