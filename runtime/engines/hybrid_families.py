"""Model types with recurrent layers or short convolutions beside attention, each described by what it adds to Llama."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hdtool.runtime.engines.expert_parts import ExpertKind, qwen_experts
from hdtool.runtime.engines.mixer_parts import (
    DELTA_RULE,
    DELTA_RULE_APART,
    DELTA_RULE_BY_HEADS,
    MAMBA2,
    SHORT_CONVOLUTION,
)
from hdtool.runtime.engines.model_families import (
    AFTER,
    GEMMA_NORM,
    LLAMA_NORMS,
    OF_EXPERTS,
    ROUNDED_AFTER,
    Family,
    Names,
)

OF_DELTA_RULES = frozenset({
    "linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads",
    "linear_value_head_dim",
})  # fmt: skip
LFM2_NORMS = ("operator_norm", "", "ffn_norm", "")
OF_LFM2 = Names(
    mlp="feed_forward",
    gate="w1",
    up="w3",
    down="w2",
    activation="",
    out="out_proj",
    head_norms=("q_layernorm", "k_layernorm"),
    last_norm="embedding_norm",
)
HYBRID_FAMILIES: Mapping[str, Family] = {
    "granitemoehybrid": Family(
        names=Names(mlp="shared_mlp", gate_up="input_linear", down="output_linear", activation="activation"),
        mixers={"mamba": {"GraniteMoeHybridMambaLayer": MAMBA2}},
        joins_gate=True,
        rotates=lambda attention: attention.config.position_embedding_type == "rope",
        residual="residual_multiplier",
        embedding="embedding_multiplier",
        logit_divisor="logits_scaling",
        attributes=frozenset({"block_type", "block_sparse_moe", "has_experts", "input_size", "mamba", "self_attn"}),
        settings=OF_EXPERTS
        | {
            "attention_multiplier", "mamba_chunk_size", "mamba_conv_bias", "mamba_d_conv", "mamba_d_head",
            "mamba_d_state", "mamba_expand", "mamba_n_groups", "mamba_n_heads", "mamba_proj_bias",
            "position_embedding_type", "shared_intermediate_size", "time_step_limit",
        },
        experts=ExpertKind(
            "GraniteMoeHybridMoE", "GraniteMoeHybridTopKRouter", gate="router", beside="block_sparse_moe"
        ),
        required={"position_embedding_type": (None, "rope")},
    ),
    "lfm2": Family(
        norms=LFM2_NORMS,
        names=OF_LFM2,
        mixers={"conv": {"Lfm2ShortConv": SHORT_CONVOLUTION}},
        attributes=frozenset({"is_attention_layer"}),
        settings=frozenset({
            "block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of", "conv_L_cache", "conv_bias",
            "full_attn_idxs", "norm_eps",
        }),
    ),
    "lfm2_moe": Family(
        norms=LFM2_NORMS,
        names=replace(OF_LFM2, rotary="pos_emb"),
        mixers={"conv": {"Lfm2MoeShortConv": SHORT_CONVOLUTION}},
        experts=ExpertKind(
            "Lfm2MoeSparseMoeBlock", "Lfm2MoeTopKRouter", has_sigmoids=True, correction="expert_bias", added=1e-6
        ),
        attributes=frozenset({"is_attention_layer"}),
        settings=OF_EXPERTS | {"conv_L_cache", "conv_bias", "norm_eps", "num_dense_layers", "use_expert_bias"},
    ),
    "olmo_hybrid": Family(
        mixers={"linear_attn": {"OlmoHybridGatedDeltaNet": DELTA_RULE_APART}},
        norms=AFTER,
        norms_of_mixers=LLAMA_NORMS,
        norm=ROUNDED_AFTER,
        norms_all_heads=True,
        rotates=lambda attention: (attention.config.rope_parameters or {}).get("rope_theta") is not None,
        settings=OF_DELTA_RULES
        | {
            "linear_a_log_max", "linear_a_log_min", "linear_allow_neg_eigval", "linear_dt_init_floor", "linear_dt_max",
            "linear_dt_min",
        },
    ),
    "qwen3_next": Family(
        mixers={"linear_attn": {"Qwen3NextGatedDeltaNet": DELTA_RULE_BY_HEADS}},
        norm=GEMMA_NORM,
        gates_heads=True,
        is_partial=True,
        experts=qwen_experts("Qwen3Next"),
        attributes=frozenset({"block_type"}),
        settings=OF_DELTA_RULES | OF_EXPERTS,
    ),
    "qwen3_5": Family(
        mixers={"linear_attn": {"Qwen3_5GatedDeltaNet": DELTA_RULE}},
        norm=GEMMA_NORM,
        gates_heads=True,
        is_partial=True,
        attributes=frozenset({"block_type"}),
        settings=OF_DELTA_RULES,
    ),
    "qwen3_5_moe": Family(
        mixers={"linear_attn": {"Qwen3_5MoeGatedDeltaNet": DELTA_RULE}},
        norm=GEMMA_NORM,
        gates_heads=True,
        is_partial=True,
        experts=qwen_experts("Qwen3_5Moe"),
        attributes=frozenset({"block_type"}),
        settings=OF_DELTA_RULES | OF_EXPERTS,
    ),
}  # fmt: skip
"""By the name of the library's package of a model type."""
