"""Model types whose layers differ from Llama's, each described by what it adds.

A description holds for the library's own classes of that type, and only while their modules have no attribute and their
configuration no setting beyond those named here: a release that adds one may compute something else with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.nn import Module

from hdtool.runtime.engines.mixer_parts import ExpertKind, qwen_experts

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
LLAMA_NORMS = ("input_layernorm", "", "post_attention_layernorm", "")
SANDWICH = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
AFTER = ("", "post_attention_layernorm", "", "post_feedforward_layernorm")

ATTRIBUTES = frozenset({
    "attention_dropout", "attention_type", "gradient_checkpointing", "head_dim", "hidden_size", "intermediate_size",
    "is_causal", "is_sliding", "layer_idx", "layer_type", "num_attention_heads", "num_key_value_groups",
    "num_key_value_heads", "scaling", "sliding_window",
})  # fmt: skip
"""Attributes of layers, attention and MLPs that this package reads, or that change nothing beside a window."""
SETTINGS = frozenset({
    "attention_bias", "attention_dropout", "bos_token_id", "eos_token_id", "head_dim", "hidden_act",
    "hidden_activation", "hidden_size", "initializer_range", "intermediate_size", "layer_types",
    "max_position_embeddings", "mlp_bias", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
    "pad_token_id", "rms_norm_eps", "rope_parameters", "sliding_window", "tie_word_embeddings", "use_cache",
    "vocab_size",
})  # fmt: skip
"""Settings of configurations that modules of all families read."""
OF_EXPERTS = frozenset({
    "decoder_sparse_step", "first_k_dense_replace", "mlp_only_layers", "moe_intermediate_size", "n_group",
    "n_routed_experts", "n_shared_experts", "norm_topk_prob", "num_experts", "num_experts_per_tok",
    "num_local_experts", "output_router_logits", "routed_scaling_factor", "router_aux_loss_coef",
    "router_jitter_noise", "shared_expert_intermediate_size", "topk_group",
})  # fmt: skip
"""Settings that mixtures of experts, which the library computes, read themselves, or that training alone reads."""


@dataclass(frozen=True)
class NormKind:
    """How an RMSNorm multiplies normed rows by its weight."""

    offset: float = 0.0
    """Added to the weight."""
    rounds: bool = True
    """Whether rows are rounded to the model's dtype before they are multiplied, and not only after it."""


ROUNDED_FIRST = NormKind()


@dataclass(frozen=True)
class Names:
    """Names of modules of a layer, and of the last norm and the rotary positions of the decoder."""

    mlp: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    gate_up: str = "gate_up_proj"
    """Of one matrix that gives both."""
    down: str = "down_proj"
    activation: str | None = None
    """Of the activation of an MLP, if it has another name than usual; empty for a SiLU that is no module."""
    out: str = "o_proj"
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    last_norm: str = "norm"
    rotary: str = "rotary_emb"


@dataclass(frozen=True)
class Family:
    """What the layers of a model type compute, where it is not what Llama's do."""

    norms: tuple[str, str, str, str] = LLAMA_NORMS
    """Names of the norms before and after attention, and before and after the MLP; empty for none."""
    norm: NormKind = ROUNDED_FIRST
    names: Names = field(default_factory=Names)
    mixers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Names of modules in the place of attention, and what those of which class compute."""
    norms_of_mixers: tuple[str, str, str, str] | None = None
    """Names of the norms in layers with such a module, if others are there."""
    gates_heads: bool = False
    """Whether each query head has a gate beside it, for what it attends to."""
    activations: frozenset[str] = frozenset({"silu"})
    joins_qkv: bool = False
    """Whether one matrix gives queries, keys and values."""
    projections: Callable[[Any], tuple[str, ...]] = field(default=lambda attention: PROJECTIONS)
    """Which modules give queries, keys and values: values are keys where the third one is missing, and keys and values
    those of an earlier layer of the same kind where there is but one."""
    keeps: str = ""
    """The attribute of attention that says whether later layers read its keys and values."""
    value_norm: str = ""
    """The name of a norm of values, which has no weight."""
    varies_heads: bool = False
    """Whether the heads of layers may differ in number and width."""
    factor: str = ""
    """The buffer of a layer by which it multiplies its output."""
    has_inputs: bool = False
    """Whether layers may have inputs beside hidden states."""
    joins_gate: bool = False
    """Whether one matrix gives gate and up."""
    norms_all_heads: bool = False
    """Whether the norms of queries and keys are over all heads together."""
    is_partial: bool = False
    """Whether rotary positions may turn the first part of a head only."""
    is_interleaved: bool = False
    """Whether rotary positions turn each number with the next one, and not with that half of the part away."""
    has_half_tables: bool = False
    """Whether the rotary module gives cosines and sines for the first half of a head alone, and the other has them."""
    rotates: Callable[[Any], bool] = field(default=lambda attention: True)
    """Whether this attention has rotary positions."""
    softcap: str = ""
    """The attribute of attention that bounds its scores."""
    has_sinks: bool = False
    residual: str = ""
    """The attribute of a layer by which it multiplies what it adds."""
    embedding: str = ""
    """The attribute of the decoder by which it multiplies the embeddings."""
    logit_divisor: str = ""
    """The setting by which logits are divided."""
    logit_softcap: str = ""
    """The setting that bounds the logits."""
    bounding: tuple[str, ...] = ("ForCausalLM",)
    """How the names of the classes end that change logits so."""
    placeholders: tuple[str, ...] = ()
    """The settings of a multimodal model that name tokens which stand for something else than text."""
    experts: ExpertKind | None = None
    """The mixture of experts in some layers."""
    beside: str = ""
    """The class of what chooses experts that layers may have beside their MLP, with norms of their own."""
    attributes: frozenset[str] = frozenset()
    """Attributes of modules that other families do not have."""
    settings: frozenset[str] = frozenset()
    """Settings that other families do not have."""
    required: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """The values of settings for which the description holds."""

    def knows(self, module: Module) -> bool:
        """Whether all that a module of a layer holds is in the description."""
        known = {*ATTRIBUTES, *self.attributes, self.softcap, self.residual, "training", "config"}
        return all(name in known or name.startswith("_") for name in vars(module))

    def holds_for(self, model: Module, config: Any) -> bool:
        """Whether a model of the family computes as described, by its classes and its settings."""
        own = {self.softcap, self.residual, self.embedding, self.logit_divisor, self.logit_softcap}
        known = {*SETTINGS, *self.settings, *own}
        if not settings_of(type(config)) <= known or not is_of_package(model, package_of(config)):
            return False
        if any(getattr(config, name, None) not in values for name, values in self.required.items()):
            return False
        changes_logits = any(
            getattr(config, name) is not None for name in (self.logit_divisor, self.logit_softcap) if name
        )
        return not changes_logits or type(model).__name__.endswith(self.bounding)


LLAMA = Family()
GELU = frozenset({"gelu_tanh", "gelu"})
GEMMA_NORM, ROUNDED_AFTER = NormKind(offset=1.0, rounds=False), NormKind(rounds=False)
ONE_WAY = {"use_bidirectional_attention": (None, False)}
FAMILIES: Mapping[str, Family] = {
    "ernie4_5_moe": Family(
        is_interleaved=True,
        experts=ExpertKind(
            "Ernie4_5_MoeSparseMoeBlock",
            "Ernie4_5_MoeTopKRouter",
            shared="shared_experts",
            correction="gate.moe_statics.e_score_correction_bias",
        ),
        settings=frozenset({
            "moe_intermediate_size", "moe_k", "moe_layer_end_index", "moe_layer_interval", "moe_layer_start_index",
            "moe_norm_min", "moe_num_experts", "moe_num_shared_experts", "output_router_logits", "router_aux_loss_coef",
            "use_bias",
        }),
    ),
    "exaone4": Family(
        norms=AFTER,
        rotates=lambda attention: attention.sliding_window is None or attention.is_sliding,
        attributes=frozenset({"sliding_window_pattern"}),
        settings=frozenset({"sliding_window_pattern"}),
    ),
    "gemma": Family(
        norm=GEMMA_NORM,
        activations=GELU,
        settings=frozenset({"use_bidirectional_attention"}),
        required=ONE_WAY,
    ),
    "gemma2": Family(
        norms=SANDWICH,
        norm=GEMMA_NORM,
        activations=GELU,
        softcap="attn_logit_softcapping",
        logit_softcap="final_logit_softcapping",
        settings=frozenset({"query_pre_attn_scalar", "use_bidirectional_attention"}),
        required=ONE_WAY,
    ),
    "gemma3": Family(
        norms=SANDWICH,
        norm=GEMMA_NORM,
        activations=GELU,
        logit_softcap="final_logit_softcapping",
        attributes=frozenset({"attn_logit_softcapping"}),
        settings=frozenset({"attn_logit_softcapping", "query_pre_attn_scalar", "use_bidirectional_attention"}),
        required={**ONE_WAY, "attn_logit_softcapping": (None,)},
    ),
    "glm": Family(joins_gate=True, is_partial=True, is_interleaved=True),
    "glm4": Family(
        norms=("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
        joins_gate=True,
        is_partial=True,
        is_interleaved=True,
    ),
    "glm4_moe": Family(
        is_partial=True,
        experts=ExpertKind(
            "Glm4MoeMoE",
            "Glm4MoeTopkRouter",
            shared="shared_experts",
            has_sigmoids=True,
            correction="gate.e_score_correction_bias",
            added=1e-20,
        ),
        attributes=frozenset({"rope_parameters", "use_qk_norm"}),
        settings=OF_EXPERTS | {"num_mtp_layers", "use_qk_norm"},
    ),
    "gpt_oss": Family(
        norm=ROUNDED_AFTER,
        has_sinks=True,
        has_half_tables=True,
        experts=ExpertKind("GptOssMLP", "GptOssTopKRouter", gate="router"),
        settings=OF_EXPERTS | {"swiglu_alpha", "swiglu_limit"},
    ),
    "granite": Family(
        residual="residual_multiplier",
        embedding="embedding_multiplier",
        logit_divisor="logits_scaling",
        settings=frozenset({"attention_multiplier"}),
    ),
    "granitemoe": Family(
        names=Names(mlp="block_sparse_moe"),
        residual="residual_multiplier",
        embedding="embedding_multiplier",
        logit_divisor="logits_scaling",
        experts=ExpertKind("GraniteMoeMoE", "GraniteMoeTopKRouter", gate="router"),
        settings=OF_EXPERTS | {"attention_multiplier"},
    ),
    "mixtral": Family(experts=ExpertKind("MixtralSparseMoeBlock", "MixtralTopKRouter"), settings=OF_EXPERTS),
    "olmo2": Family(norms=AFTER, norm=ROUNDED_AFTER, norms_all_heads=True),
    "olmo3": Family(norms=AFTER, norm=ROUNDED_AFTER, norms_all_heads=True),
    "olmoe": Family(
        norms_all_heads=True,
        experts=ExpertKind("OlmoeSparseMoeBlock", "OlmoeTopKRouter"),
        settings=OF_EXPERTS | {"clip_qkv"},
        required={"clip_qkv": (None,)},
    ),
    "phi3": Family(
        joins_qkv=True,
        joins_gate=True,
        is_partial=True,
        settings=frozenset({"embd_pdrop", "original_max_position_embeddings", "resid_pdrop"}),
        required={"resid_pdrop": (0.0,)},
    ),
    "qwen2_moe": Family(
        experts=qwen_experts("Qwen2Moe"),
        settings=OF_EXPERTS | {"max_window_layers", "qkv_bias", "use_sliding_window"},
    ),
    "qwen3_moe": Family(
        experts=ExpertKind("Qwen3MoeSparseMoeBlock", "Qwen3MoeTopKRouter"),
        settings=OF_EXPERTS | {"use_sliding_window"},
    ),
    "smollm3": Family(
        rotates=lambda attention: bool(attention.use_rope),
        attributes=frozenset({"use_rope"}),
        settings=frozenset({"no_rope_layer_interval", "no_rope_layers", "use_sliding_window"}),
    ),
}  # fmt: skip
"""By the name of the library's package of a model type."""


def family_of(layer: Module, families: Mapping[str, Family]) -> Family | None:
    """The description of a layer of the library; None for any other layer."""
    return families.get(package_of(layer))


def package_of(thing: object) -> str:
    """The library's package of a model type in which the class of this is; empty if it is elsewhere."""
    root, *parts = type(thing).__module__.split(".")
    return parts[1] if root == "transformers" and len(parts) == 3 and parts[0] == "models" else ""


def is_of_package(thing: object, package: str) -> bool:
    return bool(package) and package_of(thing) == package


def settings_of(config: type) -> frozenset[str]:
    """The settings that a class of configurations declares beside those of all."""
    from transformers import PretrainedConfig

    own, common = (inspect.signature(each).parameters for each in (config, PretrainedConfig))
    named = {
        name for name, one in own.items() if one.kind is not one.VAR_KEYWORD and one.kind is not one.VAR_POSITIONAL
    }
    return frozenset(named - common.keys())


def _projections_of_gemma4(attention: Any) -> tuple[str, ...]:
    if attention.is_kv_shared_layer:
        return PROJECTIONS[:1]
    return PROJECTIONS[:2] if attention.use_alternative_attention else PROJECTIONS


def _gemma4(**changes: Any) -> Family:
    return Family(
        norms=SANDWICH,
        norm=ROUNDED_AFTER,
        activations=GELU,
        projections=_projections_of_gemma4,
        keeps="store_full_length_kv",
        value_norm="v_norm",
        varies_heads=True,
        factor="layer_scalar",
        logit_softcap="final_logit_softcapping",
        bounding=("ForCausalLM", "ForConditionalGeneration"),
        placeholders=("image_token_id", "video_token_id", "audio_token_id"),
        attributes=frozenset({
            "enable_moe_block", "hidden_size_per_layer_input", "is_kv_shared_layer", "store_full_length_kv",
            "use_alternative_attention", "v_proj",
        }),
        settings=frozenset({
            "attention_k_eq_v", "enable_moe_block", "hidden_size_per_layer_input", "moe_intermediate_size",
            "num_experts", "num_kv_shared_layers", "top_k_experts", "use_bidirectional_attention",
            "use_double_wide_mlp", "vocab_size_per_layer_input",
        }),
        **{"required": {"use_bidirectional_attention": (None, False, "vision")}, **changes},
    )  # fmt: skip


VARIED_FAMILIES: Mapping[str, Family] = {
    "gemma4": _gemma4(has_inputs=True, beside="Gemma4TextRouter"),
    "gemma4_unified": _gemma4(),
}
"""By the name of the library's package of a model type."""
