"""A description that is wrong, or a model that differs from its description, is left to transformers' code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch.nn import Identity, Module, Parameter

from hdtool.runtime.engines.captured.fused_pass import fuse
from hdtool.runtime.engines.cpu import compile_and_check
from hdtool.runtime.engines.cpu.compiled_support import COMPILED
from hdtool.runtime.engines.reference import program_support
from hdtool.runtime.program.hybrid_families import DESCRIBED
from hdtool.runtime.program.llama_like_families import GEMMA_NORM, Family, NormKind
from hdtool.runtime.program.mixer_parts import ExpertKind
from hdtool.runtime.program.side_block import SideNames
from hdtool.runtime.target.target import Target
from tests.support.described import model_of, target_of
from tests.support.rehearsed import direct

pytestmark = pytest.mark.usefixtures("wide_heads")


def experts_of(name: str, **changes: Any) -> ExpertKind:
    known = DESCRIBED[name].experts
    assert known
    return replace(known, **changes)


def side_with(**lists: str) -> SideNames:
    """Return the description of Zamba 2's side blocks with the adapters of an attention's matmuls in other lists."""
    known = DESCRIBED["zamba2"].side
    assert known
    changed = {matmul: f"shared_transformer.self_attn.{name}" for matmul, name in lists.items()}
    return replace(known, adapters={**known.adapters, **changed})


NORMS = DESCRIBED["gemma4"].layer.norms
FACTORS = DESCRIBED["falcon_h1"].layer.factors
Change = Callable[[Any], None]
OWN_KEYS: dict[str, Any] = {"attention.projections": lambda attention: ("q_proj", "k_proj", "v_proj")}
WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "no offset": ("gemma3", {"norm": NormKind()}),
    "no bound of scores": ("gemma2", {"attention.softcap": ""}),
    "no bound of logits": ("gemma2", {"ends.logit_softcap": ""}),
    "norms before instead of after": (
        "olmo2",
        {"layer.norms": ("post_attention_layernorm", "", "post_feedforward_layernorm", "")},
    ),
    "another order of norms": (
        "gemma3",
        {"layer.norms": (*DESCRIBED["gemma3"].layer.norms[2:], *DESCRIBED["gemma3"].layer.norms[:2])},
    ),
    "no multiplier of embeddings": ("granite", {"ends.embedding": ""}),
    "no multiplier of what layers add": ("granite", {"layer.residual": ""}),
    "no divisor of logits": ("granite", {"ends.logit_divisor": ""}),
    "positions in all layers": ("smollm3", {"rotary.rotates": lambda attention: True}),
    "no positions": ("gemma3", {"rotary.rotates": lambda attention: False}),
    "pairs of halves": ("glm4", {"rotary.is_interleaved": False}),
    "pairs side by side": ("phi3", {"rotary.is_interleaved": True}),
    "no sinks": ("gpt_oss", {"attention.has_sinks": False}),
    "norms of single heads": ("olmo2", {"attention.norms_all_heads": False}),
    "no centering": ("cohere", {"norm": NormKind(rounds=False)}),
    "one sublayer after the other": ("cohere", {"layer.is_parallel": False}),
    "no factor of logits": ("cohere", {"ends.logit_factor": ""}),
    "tables of halves": ("cohere", {"rotary.has_paired_tables": False}),
    "positions in every layer": ("cohere2", {"rotary.rotates": lambda attention: True}),
    "pairs in a part": ("phi", {"rotary.is_interleaved": True}),
    "parallel sublayers": ("starcoder2", {"layer.is_parallel": True}),
    "no bias of norms": ("starcoder2", {"norm": NormKind(rounds=False, is_centered=True)}),
    "halves of latent attention": ("deepseek_v3", {"rotary.splits_pairs": False}),
    "pairs that stay": ("deepseek_v3", {"rotary.splits_pairs": False, "rotary.is_interleaved": True}),
    "pairs that move": ("deepseek_v2", {"rotary.splits_pairs": True, "rotary.is_interleaved": False}),
    "no latent vectors": ("youtu", {"attention.has_latents": False}),
    "no gates of latent attention": ("bailing_hybrid", {"attention.latent_gate": ""}),
    "halves in a hybrid": ("bailing_hybrid", {"rotary.splits_pairs": False}),
    "positions in a hybrid": ("kimi_linear", {"rotary.rotates": lambda attention: True}),
    "adapters of keys for values": (
        "zamba2",
        {"side": side_with(keys="linear_v_adapter_list", values="linear_k_adapter_list")},
    ),
    "no positions beside a mixer": ("zamba2", {"rotary.rotates": lambda attention: False}),
    "another mixture in a hybrid": ("kimi_linear", {"experts": DESCRIBED["bailing_hybrid"].experts}),
}
WRONG_FOR_CPUS: dict[str, tuple[str, dict[str, Any]]] = {
    "no softmax": ("qwen2_moe", {"experts": experts_of("qwen2_moe", has_sigmoids=True)}),
    "no gate of the shared expert": ("qwen2_moe", {"experts": experts_of("qwen2_moe", shared_gate="")}),
    "no sigmoids": ("glm4_moe", {"experts": experts_of("glm4_moe", has_sigmoids=False)}),
    "no correction": ("glm4_moe", {"experts": experts_of("glm4_moe", correction="")}),
    "no shared expert": ("glm4_moe", {"experts": experts_of("glm4_moe", shared="")}),
    "routing weights of sum 1": ("deepseek_v2", {"experts": experts_of("deepseek_v2", renormalizes=True)}),
    "another sum of routing weights": ("glm4_moe", {"experts": experts_of("glm4_moe", sum_offset=0.1)}),
    "no gates of heads": ("qwen3_5", {"attention.gates_heads": False}),
    "no offset of norms": ("qwen3_5", {"norm": DESCRIBED["lfm2"].norm}),
    "no residual factor": ("granitemoehybrid", {"layer.residual": ""}),
    "positions beside a scan": ("granitemoehybrid", {"rotary.rotates": lambda attention: True}),
    "no factor of keys": (
        "falcon_h1",
        {
            "layer.factors": {**FACTORS, "keys": FACTORS["values"]},
            "attributes": frozenset({"channels_attn", "key_multiplier"}),
        },
    ),
    "two factors of mixers": (
        "falcon_h1",
        {"layer.factors": {**FACTORS, "mixer_out": (*FACTORS["out"], *FACTORS["mixer_out"])}},
    ),
    "gate and up exchanged": ("lfm2", {"names": replace(DESCRIBED["lfm2"].names, gate="w3", up="w1")}),
    "weights of norms with an offset": ("gemma4", {"norm": GEMMA_NORM}),
    "another order of norms of varied layers": ("gemma4", {"layer.norms": (*NORMS[2:], *NORMS[:2])}),
    "no bound of logits of varied layers": ("gemma4", {"ends.logit_softcap": ""}),
    "no positions in varied layers": ("gemma4_unified", {"rotary.rotates": lambda attention: False}),
    "no norm of values": ("gemma4_unified", {"attention.value_norm": ""}),
    "no factor": ("gemma4_unified", {"layer.factor": ""}),
    "no inputs of layers": ("gemma4", {"layer.has_inputs": False}),
    "values of their own": ("gemma4_unified", OWN_KEYS),
    "keys of its own": ("gemma4", OWN_KEYS),
    "no keys that later layers read": ("gemma4", {"attention.shared_kv_attribute": "is_kv_shared_layer"}),
    "heads of one shape": ("gemma4", {"attention.varies_heads": False}),
    "no experts": ("gemma4, experts beside MLPs", {"layer.added_router": ""}),
}
"""On a GPU, transformers computes experts."""


def with_change(family: Family, change: tuple[str, Any]) -> Family:
    """Return a description with another value of a field, which is named with its record, if it has one, and a dot."""
    record, _, name = change[0].rpartition(".")
    if not record:
        return replace(family, **{name: change[1]})
    return replace(family, **{record: replace(getattr(family, record), **{name: change[1]})})


def describe_wrongly(fault: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a model whose description is now wrong."""
    name, changes = (WRONG | WRONG_FOR_CPUS)[fault]
    family = name.partition(",")[0]
    known = DESCRIBED[family]
    # What the structure alone would show must not hide what the numbers show.
    settings = known.settings | {known.ends.embedding, known.layer.residual, *known.ends.logit_settings}
    attributes = known.attributes | {known.attention.softcap, known.layer.residual}
    relaxed = replace(known, settings=settings, attributes=attributes)
    wrong = {**DESCRIBED, family: reduce(with_change, changes.items(), relaxed)}
    monkeypatch.setattr(compile_and_check, "COMPILED", replace(COMPILED, families=wrong))
    monkeypatch.setattr(program_support, "DESCRIBED", wrong)
    return name


@pytest.mark.parametrize("fault", WRONG | WRONG_FOR_CPUS)
@pytest.mark.one_in(2)
def test_a_wrong_description_is_not_compiled(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not target_of(describe_wrongly(fault, monkeypatch)).compile()


@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.one_in(2)
def test_a_wrong_description_is_not_captured(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not Target(model_of(describe_wrongly(fault, monkeypatch)), direct).is_fused


def a_new_attribute(module: Any) -> None:
    module.temperature = 1.0


def a_module_more(module: Any) -> None:
    module.add_module("more", Identity())


def a_parameter_more(module: Any) -> None:
    module.register_parameter("more", Parameter(torch.ones(1)))


def a_buffer_more(module: Any) -> None:
    module.register_buffer("more", torch.ones(4))


def changed(output: Any) -> Any:
    return output + 0.01 if isinstance(output, torch.Tensor) else (output[0] + 0.01, *output[1:])


def a_hook(module: Any) -> None:
    module.register_forward_hook(lambda module, inputs, output: changed(output))


def a_replaced_forward(module: Any) -> None:
    usual = module.forward
    module.forward = lambda *given, **named: changed(usual(*given, **named))


def a_class_of_another_package(module: Any) -> None:
    """As remote code brings it."""
    module.__class__ = type("Own", (type(module),), {})


def another_dtype(module: Any) -> None:
    next(module.parameters()).data = next(module.parameters()).data.double()


OF_BLOCKS = a_new_attribute, a_parameter_more, a_buffer_more, a_hook, a_replaced_forward, a_class_of_another_package
OF_NORMS = a_hook, a_replaced_forward, a_class_of_another_package
PLACES: dict[tuple[str, str], tuple[Change, ...]] = {
    ("gemma3", "layers.1.self_attn"): (*OF_BLOCKS, a_module_more),
    ("gemma3", "layers.0.mlp"): (*OF_BLOCKS, a_module_more),
    ("gemma3", "layers.0.pre_feedforward_layernorm"): OF_NORMS,
    ("glm4_moe", "layers.1.mlp"): (*OF_BLOCKS, a_module_more),
    ("glm4_moe", "layers.1.mlp.gate"): (a_new_attribute, a_buffer_more, a_replaced_forward, another_dtype),
    ("glm4_moe", "layers.1.mlp.shared_experts"): (a_new_attribute, *OF_NORMS),
    ("qwen3_5", "layers.0.linear_attn"): OF_BLOCKS,
    ("qwen3_5", "layers.0.linear_attn.conv1d"): (another_dtype,),
    ("qwen3_5", "layers.2.linear_attn.norm"): OF_NORMS,
    ("gemma4", "layers.1"): (a_new_attribute, a_module_more),
    ("gemma4, experts beside MLPs", "layers.1.router"): (a_new_attribute, a_replaced_forward),
    ("zamba2", "layers.1"): (*OF_BLOCKS, a_module_more),
    ("zamba2", "layers.1.mamba_decoder"): (*OF_BLOCKS, a_module_more),
    ("zamba2", "layers.1.shared_transformer"): (*OF_BLOCKS, a_module_more),
    ("zamba2", "layers.1.shared_transformer.self_attn"): (*OF_BLOCKS, a_module_more),
    ("zamba2", "layers.1.shared_transformer.feed_forward.gate_up_proj_adapter_list.0"): (
        a_module_more,
        *OF_NORMS,
    ),
}
"""Changes of modules, by model and place."""
CHANGED = [
    pytest.param(name, place, change, id=f"{name}, {place}, {change.__name__}")
    for (name, place), changes in PLACES.items()
    for change in changes
]


@pytest.mark.parametrize(("name", "place", "change"), CHANGED)
@pytest.mark.one_in(2)
def test_a_module_that_differs_is_not_compiled(name: str, place: str, change: Change) -> None:
    target = target_of(name)
    change(target.model.model.get_submodule(place))
    assert not target.compile()


@pytest.mark.parametrize(
    ("name", "place", "change"),
    [
        *(case for case in CHANGED if case.values[0] == "gemma3"),
        ("qwen3_5", "layers.2.linear_attn.norm", a_hook),  # Triton kernels compute this norm
    ],
)
def test_a_module_that_differs_is_not_captured(name: str, place: str, change: Change) -> None:
    assert_not_captured(name, lambda model: change(model.model.get_submodule(place)))


def assert_not_captured(name: str, change: Change) -> None:
    model = model_of(name)
    target = Target(model, direct)
    assert fuse(target.stock, target.facts)
    change(model)
    assert fuse(target.stock, target.facts) is None


def of_the_same_name(module: Module, **methods: Any) -> type:
    """Return a subclass with the same name and module, like a class that a new release of transformers has changed."""
    own = type(module)
    return type(own.__name__, (own,), {"__module__": own.__module__, **methods})


def value_at(place: str, value: Any) -> Change:
    """Return a change of a value in a model or its configuration."""
    parent, _, name = place.rpartition(".")
    return lambda model: setattr(attrgetter(parent)(model), name, value)


def larger_norm(place: str) -> Change:
    """Return a change of a norm by too little for a comparison of 16-bit logits to notice."""

    def change(model: Any) -> None:
        norm = attrgetter(place)(model)
        plain = type(norm).forward
        norm.__class__ = of_the_same_name(norm, forward=lambda self, rows: 1.001 * plain(self, rows))

    return change


def a_python_activation(model: Any) -> None:
    activation = model.model.layers[0].mlp.act_fn
    activation.act = activation._gelu_tanh_python


def positions_by_length(model: Any) -> None:
    model.model.rotary_emb.rope_type = {**model.model.rotary_emb.rope_type, "full_attention": "dynamic"}


def another_epsilon(model: Any) -> None:
    def normed(self: Any, rows: torch.Tensor) -> torch.Tensor:
        return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 2 * self.eps)

    norm = model.model.layers[0].input_layernorm
    norm.__class__ = of_the_same_name(norm, _norm=normed)


def a_float32_norm(model: Any) -> None:
    model.double()
    model.model.layers[0].input_layernorm.float()


OF_GEMMA3: dict[str, Change] = {
    "both directions": value_at("config.use_bidirectional_attention", True),
    "scores that it does not bound": value_at("config.attn_logit_softcapping", 50.0),
    "a Python activation": a_python_activation,
    "positions by length": positions_by_length,
    "another norm": larger_norm("model.layers.1.self_attn.k_norm"),
    "another epsilon": another_epsilon,
    "a float32 norm": a_float32_norm,
}


@pytest.mark.parametrize("change", OF_GEMMA3.values(), ids=OF_GEMMA3)
def test_what_a_description_does_not_name_is_left_to_the_library(change: Change) -> None:
    assert_not_captured("gemma3", change)
    target = target_of("gemma3")
    change(target.model)
    assert not target.compile()


def other_inputs(model: Any) -> None:
    plain = model.model.project_per_layer_inputs
    model.model.project_per_layer_inputs = lambda *given: 1.01 * plain(*given)


def another_router(model: Any) -> None:
    router = model.model.layers[1].router
    plain = type(router).forward
    router.__class__ = of_the_same_name(router, forward=lambda self, rows: plain(self, 1.01 * rows + 0.01))


def experts_of_the_library(model: Any) -> None:
    experts = model.model.layers[1].experts
    experts.__class__ = experts.__dict__.pop("_usual")


LAYERS = "model.layers"
OF_OTHERS: dict[str, tuple[str, Change]] = {
    "a dilated convolution": ("qwen3_5", value_at(f"{LAYERS}.0.linear_attn.conv1d.dilation", (2,))),
    "another activation": ("qwen3_5", value_at(f"{LAYERS}.0.linear_attn.activation", "gelu")),
    "limited time steps": ("granitemoehybrid", value_at(f"{LAYERS}.0.mamba.time_step_limit", (0.0, 0.5))),
    "another norm of values": ("gemma4", larger_norm(f"{LAYERS}.1.self_attn.v_norm")),
    "another activation of inputs": ("gemma4", value_at(f"{LAYERS}.1.act_fn", torch.nn.SiLU())),
    "other inputs": ("gemma4", other_inputs),
    "inputs of another package": ("gemma4", lambda model: a_class_of_another_package(model.model)),
    "a norm of inputs without a weight": (
        "gemma4",
        lambda model: delattr(model.model.per_layer_projection_norm, "weight"),
    ),
    "both directions of all": ("gemma4", value_at("config.use_bidirectional_attention", "all")),
    "factors for each number": ("gemma4", value_at(f"{LAYERS}.0.layer_scalar", torch.ones(64))),
    "another epsilon of the router": (
        "gemma4, experts beside MLPs",
        value_at(f"{LAYERS}.1.router.norm.eps", 0.1),
    ),
    "another router": ("gemma4, experts beside MLPs", another_router),
    "experts of the library": ("gemma4, experts beside MLPs", experts_of_the_library),
}


@pytest.mark.parametrize(("name", "change"), OF_OTHERS.values(), ids=OF_OTHERS)
def test_a_model_that_differs_is_not_compiled(name: str, change: Change) -> None:
    target = target_of(name)
    change(target.model)
    assert not target.compile()
