"""Describes model types by how their layers differ from Llama's.

A description applies only to Transformers' own classes, and only while their modules and configuration have no
attributes or settings beyond those listed here. A release of Transformers that adds an attribute or setting may compute
something else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch.nn import Module

from hdtool.runtime.program.mixer_parts import ExpertKind, deepseek_experts, qwen_experts
from hdtool.runtime.program.side_block import SideNames

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
LLAMA_NORMS = ("input_layernorm", "", "post_attention_layernorm", "")
SANDWICH = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
POST_NORMS = ("", "post_attention_layernorm", "", "post_feedforward_layernorm")

ATTRIBUTES = frozenset({
    "attention_dropout", "attention_type", "gradient_checkpointing", "head_dim", "hidden_size", "intermediate_size",
    "is_causal", "is_sliding", "layer_idx", "layer_type", "num_attention_heads", "num_key_value_groups",
    "num_key_value_heads", "scaling", "sliding_window",
})  # fmt: skip
"""Attributes that layers, attention and MLPs of any family may have; see ``Family.knows``."""
SETTINGS = frozenset({
    "attention_bias", "attention_dropout", "bos_token_id", "eos_token_id", "head_dim", "hidden_act",
    "hidden_activation", "hidden_size", "initializer_range", "intermediate_size", "layer_types",
    "max_position_embeddings", "mlp_bias", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
    "pad_token_id", "rms_norm_eps", "rope_parameters", "sliding_window", "tie_word_embeddings", "use_cache",
    "vocab_size",
})  # fmt: skip
"""Settings that any family may have."""
EXPERT_SETTINGS = frozenset({
    "decoder_sparse_step", "first_k_dense_replace", "mlp_only_layers", "moe_intermediate_size", "n_group",
    "n_routed_experts", "n_shared_experts", "norm_topk_prob", "num_experts", "num_experts_per_tok",
    "num_local_experts", "output_router_logits", "routed_scaling_factor", "router_aux_loss_coef",
    "router_jitter_noise", "shared_expert_intermediate_size", "topk_group",
})  # fmt: skip
"""Settings that are read only by the modules of a mixture of experts, or only in training."""


@dataclass(frozen=True)
class NormKind:
    """How a norm scales rows and applies its weight."""

    offset: float = 0.0
    """Constant added to the weight before it is applied."""
    rounds: bool = True
    """True if normalized rows are rounded to the model's dtype before the weight is applied, not only after."""
    is_centered: bool = False
    """True for a LayerNorm, which subtracts a row's mean first; False for an RMSNorm."""
    has_bias: bool = False

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of a norm module's parameters."""
        return ("weight", "bias") if self.has_bias else ("weight",)


ROUNDED_FIRST = NormKind()


@dataclass(frozen=True)
class Names:
    """Names of a layer's modules, and of the decoder's embedding, last norm and rotary module."""

    attention: str = "self_attn"
    mlp: str = "mlp"
    """Name of the MLP or mixture of experts."""
    gate: str = "gate_proj"
    up: str = "up_proj"
    """Name of the up projection; empty for MLPs without a gate, which activate the output of ``gate`` alone."""
    gate_up: str = "gate_up_proj"
    """Name of the module that joins the gate and up projections."""
    down: str = "down_proj"
    activation: str | None = None
    """Name of the MLP's activation module; None for the usual name, empty for a SiLU that isn't a module."""
    out: str = "o_proj"
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    embedding: str = "embed_tokens"
    last_norm: str = "norm"
    rotary: str = "rotary_emb"


@dataclass(frozen=True)
class LayerKind:
    """The sublayers of a layer, their norms and factors, and how their outputs are added to hidden states."""

    norms: tuple[str, str, str, str] = LLAMA_NORMS
    """Names of the norms before and after attention, and before and after the MLP; an empty name means no norm."""
    norms_of_mixers: tuple[str, str, str, str] | None = None
    """Names of the norms in layers with a mixer; None if ``norms`` applies to these layers as well."""
    mixers: Collection[str] = ()
    """Attribute names of the mixers that layers may have."""
    adds_mixers: bool = False
    """True if layers have a mixer besides attention; both read the same normalized rows, and both outputs are added."""
    is_single: bool = False
    """True if each layer has a single sublayer: a mixer, attention, an MLP or a mixture of experts."""
    is_parallel: bool = False
    """True if attention and MLP read the same normalized rows, and both outputs are added to the hidden states."""
    added_router: str = ""
    """Class name of the router for experts that layers may have in addition to their MLP."""
    has_inputs: bool = False
    """True if layers may have a per-layer input in addition to hidden states."""
    residual: str = ""
    """Name of the layer attribute with the factor that scales what attention and MLP add to hidden states."""
    factor: str = ""
    """Name of the layer buffer that scales the layer's output."""
    factors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Maps a matmul to the paths of the layer's attributes whose product scales the matmul's output.

    The matmuls are ``queries``, ``keys``, ``values``, ``out``, ``mixer_out``, ``gate`` and ``down``.
    """
    widens: str = ""
    """Name of the layer attribute that is true if hidden states are float32 whatever the model's dtype."""


@dataclass(frozen=True)
class AttentionKind:
    """How attention computes queries, keys, values and scores."""

    class_name: str = ""
    """Class name of attention modules, if modules of other kinds have the same name; otherwise empty."""
    has_latents: bool = False
    """True if attention computes all heads' keys and values from one cached vector per token; see ``LatentParts``."""
    latent_gate: str = ""
    """Name of the linear layer whose sigmoids scale a latent attention's heads; empty if they aren't scaled."""
    joins_qkv: bool = False
    """True if a single projection computes queries, keys and values."""
    projections: Callable[[Any], tuple[str, ...]] = lambda attention: PROJECTIONS
    """Returns the names of an attention module's query, key and value projections.

    Without a value projection, the keys are also the values. With only a query projection, the layer reads the keys and
    values of an earlier layer of the same type.
    """
    shared_kv_attribute: str = ""
    """Name of the attention attribute that is true if later layers read the module's keys and values."""
    value_norm: str = ""
    """Name of the values' norm, which has no weight; empty if values aren't normalized."""
    norms_all_heads: bool = False
    """True if norms of queries and keys span all heads instead of one."""
    norms_each_head: bool = False
    """True if norms of queries and keys span one head, with a separate weight for each head."""
    varies_heads: bool = False
    """True if the number of heads and their width may vary between layers."""
    gates_heads: bool = False
    """True if each query head has an output gate."""
    softcap: str = ""
    """Name of the attention attribute that holds the softcap of attention scores."""
    has_sinks: bool = False
    is_causal: bool = True
    """Value of the ``is_causal`` attribute of attention modules."""


@dataclass(frozen=True)
class RotaryKind:
    """How rotary positions are applied to queries and keys."""

    rotates: Callable[[Any], bool] = lambda attention: True
    """Returns True for attention modules that use rotary positions."""
    is_partial: bool = False
    """True if rotary positions may cover only the first part of a head."""
    is_interleaved: bool = False
    """True if rotary pairs are adjacent elements instead of elements half a head apart."""
    splits_pairs: bool = False
    """True if rotary pairs are adjacent elements that rotation writes to different halves; only in latent attention."""
    has_half_tables: bool = False
    """True if the rotary module returns cosines and sines for half a head, to be repeated for the other half."""
    has_paired_tables: bool = False
    """True if the rotary module returns each cosine and sine twice in a row; heads are then rotated in float32."""


@dataclass(frozen=True)
class MlpKind:
    """The activations and projections of MLPs."""

    activations: frozenset[str] = frozenset({"silu"})
    joins_gate: bool = False
    """True if a single projection computes the gate and up outputs."""


@dataclass(frozen=True)
class EndsKind:
    """How a family's embeddings and logits differ from Llama's: factors, a softcap and placeholder tokens."""

    embedding: str = ""
    """Name of the decoder attribute with the factor that scales embeddings."""
    placeholders: tuple[str, ...] = ()
    """Names of settings that hold the placeholder token ids of a multimodal model."""
    logit_divisor: str = ""
    """Name of the setting that logits are divided by."""
    logit_factor: str = ""
    """Name of the setting that logits are multiplied by."""
    logit_softcap: str = ""
    """Name of the setting that holds the softcap of logits."""
    bounding: tuple[str, ...] = ("ForCausalLM",)
    """Class-name suffixes of models that apply ``logit_divisor``, ``logit_factor`` and ``logit_softcap``."""

    @property
    def logit_settings(self) -> tuple[str, ...]:
        """Names of the settings that change logits."""
        return tuple(filter(None, (self.logit_divisor, self.logit_factor, self.logit_softcap)))


@dataclass(frozen=True)
class Family:
    """How a model type's layers differ from Llama's."""

    norm: NormKind = ROUNDED_FIRST
    names: Names = Names()
    layer: LayerKind = LayerKind()
    attention: AttentionKind = AttentionKind()
    rotary: RotaryKind = RotaryKind()
    mlp: MlpKind = MlpKind()
    experts: ExpertKind | None = None
    """Description of the mixture of experts in some layers; None if no layer has one."""
    side: SideNames | None = None
    """Module names of the ``SideBlock`` in layers with attention; None if attention isn't part of such a block."""
    ends: EndsKind = EndsKind()
    attributes: frozenset[str] = frozenset()
    """Known module attributes in addition to ``ATTRIBUTES``."""
    settings: frozenset[str] = frozenset()
    """Known settings in addition to ``SETTINGS``."""
    required: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Maps settings to their allowed values; with any other value, the description doesn't apply."""

    @property
    def gates_mlp(self) -> bool:
        return bool(self.names.up)

    def knows(self, module: Module) -> bool:
        """Return True if the description covers all attributes of a module."""
        layer = self.layer
        known = {*ATTRIBUTES, *self.attributes, self.attention.softcap, layer.residual, layer.widens}
        known |= {
            "training",
            "config",
            *(path.rpartition(".")[2] for paths in layer.factors.values() for path in paths),
        }
        return all(name in known or name.startswith("_") for name in vars(module))

    def holds_for(self, model: Module, config: Any) -> bool:
        """Return True if a model's classes and settings match the description."""
        named = self.attention.softcap, self.layer.residual, self.ends.embedding, *self.ends.logit_settings
        known = {*SETTINGS, *self.settings, *named}
        if not settings_of(type(config)) <= known or not is_of_package(model, package_of(config)):
            return False
        if any(getattr(config, name, None) not in values for name, values in self.required.items()):
            return False
        changes_logits = any(getattr(config, name) is not None for name in self.ends.logit_settings)
        return not changes_logits or type(model).__name__.endswith(self.ends.bounding)


LLAMA = Family()
GELU = frozenset({"gelu_tanh", "gelu"})
GEMMA_NORM, ROUNDED_AFTER = NormKind(offset=1.0, rounds=False), NormKind(rounds=False)
OLMO2 = Family(norm=ROUNDED_AFTER, layer=LayerKind(norms=POST_NORMS), attention=AttentionKind(norms_all_heads=True))
CAUSAL_ONLY = {"use_bidirectional_attention": (None, False)}
FAMILIES: Mapping[str, Family] = {
    "ernie4_5_moe": Family(
        rotary=RotaryKind(is_interleaved=True),
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
        layer=LayerKind(norms=POST_NORMS),
        rotary=RotaryKind(rotates=lambda attention: attention.sliding_window is None or attention.is_sliding),
        attributes=frozenset({"sliding_window_pattern"}),
        settings=frozenset({"sliding_window_pattern"}),
    ),
    "gemma": Family(
        norm=GEMMA_NORM,
        mlp=MlpKind(activations=GELU),
        settings=frozenset({"use_bidirectional_attention"}),
        required=CAUSAL_ONLY,
    ),
    "gemma2": Family(
        norm=GEMMA_NORM,
        layer=LayerKind(norms=SANDWICH),
        attention=AttentionKind(softcap="attn_logit_softcapping"),
        mlp=MlpKind(activations=GELU),
        ends=EndsKind(logit_softcap="final_logit_softcapping"),
        settings=frozenset({"query_pre_attn_scalar", "use_bidirectional_attention"}),
        required=CAUSAL_ONLY,
    ),
    "gemma3": Family(
        norm=GEMMA_NORM,
        layer=LayerKind(norms=SANDWICH),
        mlp=MlpKind(activations=GELU),
        ends=EndsKind(logit_softcap="final_logit_softcapping"),
        attributes=frozenset({"attn_logit_softcapping"}),
        settings=frozenset({"attn_logit_softcapping", "query_pre_attn_scalar", "use_bidirectional_attention"}),
        required={**CAUSAL_ONLY, "attn_logit_softcapping": (None,)},
    ),
    "glm": Family(rotary=RotaryKind(is_partial=True, is_interleaved=True), mlp=MlpKind(joins_gate=True)),
    "glm4": Family(
        layer=LayerKind(
            norms=("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
        ),
        rotary=RotaryKind(is_partial=True, is_interleaved=True),
        mlp=MlpKind(joins_gate=True),
    ),
    "glm4_moe": Family(
        rotary=RotaryKind(is_partial=True),
        experts=deepseek_experts("Glm4Moe"),
        attributes=frozenset({"rope_parameters", "use_qk_norm"}),
        settings=EXPERT_SETTINGS | {"num_mtp_layers", "use_qk_norm"},
    ),
    "gpt_oss": Family(
        norm=ROUNDED_AFTER,
        attention=AttentionKind(has_sinks=True),
        rotary=RotaryKind(has_half_tables=True),
        experts=ExpertKind("GptOssMLP", "GptOssTopKRouter", gate="router"),
        settings=EXPERT_SETTINGS | {"swiglu_alpha", "swiglu_limit"},
    ),
    "granite": Family(
        layer=LayerKind(residual="residual_multiplier"),
        ends=EndsKind(embedding="embedding_multiplier", logit_divisor="logits_scaling"),
        settings=frozenset({"attention_multiplier"}),
    ),
    "granitemoe": Family(
        names=Names(mlp="block_sparse_moe"),
        layer=LayerKind(residual="residual_multiplier"),
        experts=ExpertKind("GraniteMoeMoE", "GraniteMoeTopKRouter", gate="router"),
        ends=EndsKind(embedding="embedding_multiplier", logit_divisor="logits_scaling"),
        settings=EXPERT_SETTINGS | {"attention_multiplier"},
    ),
    "mixtral": Family(experts=ExpertKind("MixtralSparseMoeBlock", "MixtralTopKRouter"), settings=EXPERT_SETTINGS),
    "olmo2": OLMO2,
    "olmo3": OLMO2,
    "olmoe": Family(
        attention=AttentionKind(norms_all_heads=True),
        experts=ExpertKind("OlmoeSparseMoeBlock", "OlmoeTopKRouter"),
        settings=EXPERT_SETTINGS | {"clip_qkv"},
        required={"clip_qkv": (None,)},
    ),
    "phi3": Family(
        attention=AttentionKind(joins_qkv=True),
        rotary=RotaryKind(is_partial=True),
        mlp=MlpKind(joins_gate=True),
        settings=frozenset({"embd_pdrop", "original_max_position_embeddings", "resid_pdrop"}),
        required={"resid_pdrop": (0.0,)},
    ),
    "qwen2_moe": Family(
        experts=qwen_experts("Qwen2Moe"),
        settings=EXPERT_SETTINGS | {"max_window_layers", "qkv_bias", "use_sliding_window"},
    ),
    "qwen3_moe": Family(
        experts=ExpertKind("Qwen3MoeSparseMoeBlock", "Qwen3MoeTopKRouter"),
        settings=EXPERT_SETTINGS | {"use_sliding_window"},
    ),
    "smollm3": Family(
        rotary=RotaryKind(rotates=lambda attention: bool(attention.use_rope)),
        attributes=frozenset({"use_rope"}),
        settings=frozenset({"no_rope_layer_interval", "no_rope_layers", "use_sliding_window"}),
    ),
}  # fmt: skip
"""Families by the name of their package in ``transformers.models``."""


def package_of(thing: object) -> str:
    """Return the name of the package in ``transformers.models`` that defines an object's class, or an empty string."""
    root, *parts = type(thing).__module__.split(".")
    return parts[1] if root == "transformers" and len(parts) == 3 and parts[0] == "models" else ""


def is_of_package(thing: object, package: str) -> bool:
    return bool(package) and package_of(thing) == package


def settings_of(config: type) -> frozenset[str]:
    """Return the names of the settings that a configuration class adds to those of ``PretrainedConfig``."""
    from transformers import PretrainedConfig

    declared, common = (inspect.signature(cls).parameters for cls in (config, PretrainedConfig))
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    named = {name for name, parameter in declared.items() if parameter.kind not in variadic}
    return frozenset(named - common.keys())


def _projections_of_gemma4(attention: Any) -> tuple[str, ...]:
    if attention.is_kv_shared_layer:
        return PROJECTIONS[:1]
    return PROJECTIONS[:2] if attention.use_alternative_attention else PROJECTIONS


GEMMA4 = Family(
    norm=ROUNDED_AFTER,
    layer=LayerKind(norms=SANDWICH, added_router="Gemma4TextRouter", has_inputs=True, factor="layer_scalar"),
    attention=AttentionKind(
        projections=_projections_of_gemma4,
        shared_kv_attribute="store_full_length_kv",
        value_norm="v_norm",
        varies_heads=True,
    ),
    mlp=MlpKind(activations=GELU),
    ends=EndsKind(
        logit_softcap="final_logit_softcapping",
        bounding=("ForCausalLM", "ForConditionalGeneration"),
        placeholders=("image_token_id", "video_token_id", "audio_token_id"),
    ),
    attributes=frozenset({
        "enable_moe_block", "hidden_size_per_layer_input", "is_kv_shared_layer", "store_full_length_kv",
        "use_alternative_attention", "v_proj",
    }),
    settings=frozenset({
        "attention_k_eq_v", "enable_moe_block", "hidden_size_per_layer_input", "moe_intermediate_size",
        "num_experts", "num_kv_shared_layers", "top_k_experts", "use_bidirectional_attention",
        "use_double_wide_mlp", "vocab_size_per_layer_input",
    }),
    required={"use_bidirectional_attention": (None, False, "vision")},
)  # fmt: skip
VARIED_FAMILIES: Mapping[str, Family] = {
    "gemma4": GEMMA4,
    "gemma4_unified": replace(GEMMA4, layer=replace(GEMMA4.layer, added_router="", has_inputs=False)),
}
"""Families whose layers may differ in heads and inputs, by the name of their package in ``transformers.models``."""
