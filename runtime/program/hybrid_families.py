"""Describes model types with recurrent layers or short convolutions, and collects all described families."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hdtool.runtime.program.latent_families import (
    ATTRIBUTES as LATENT_ATTRIBUTES,
    LATENT_FAMILIES,
    SETTINGS as LATENT_SETTINGS,
)
from hdtool.runtime.program.layer_norm_families import LAYER_NORM_FAMILIES
from hdtool.runtime.program.llama_like_families import (
    EXPERT_SETTINGS,
    FAMILIES,
    GELU,
    GEMMA_NORM,
    LLAMA_NORMS,
    POST_NORMS,
    ROUNDED_AFTER,
    VARIED_FAMILIES,
    AttentionKind,
    EndsKind,
    Family,
    LayerKind,
    MlpKind,
    Names,
    RotaryKind,
)
from hdtool.runtime.program.mixer_parts import ExpertKind, deepseek_experts, qwen_experts
from hdtool.runtime.program.side_block import SideNames

DELTA_RULE_SETTINGS = frozenset({
    "linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads",
    "linear_value_head_dim",
})  # fmt: skip
MAMBA2_SETTINGS = frozenset({
    "mamba_chunk_size", "mamba_conv_bias", "mamba_d_conv", "mamba_d_head", "mamba_d_state", "mamba_expand",
    "mamba_n_groups", "mamba_n_heads", "mamba_proj_bias", "time_step_limit",
})  # fmt: skip
STATE_SETTINGS = frozenset({
    "chunk_size", "conv_kernel", "expand", "layer_norm_epsilon", "n_groups", "rescale_prenorm_residual",
    "residual_in_fp32", "time_step_floor", "time_step_limit", "time_step_max", "time_step_min", "use_bias",
    "use_conv_bias",
})  # fmt: skip
"""Settings of Mamba-2 mixers in the families ``mamba2``, ``nemotron_h`` and ``zamba2``."""
DELTA_ATTENTION = Family(
    layer=LayerKind(mixers=("self_attn",)),
    attention=AttentionKind(has_latents=True),
    attributes=LATENT_ATTRIBUTES | {"block_type"},
    settings=LATENT_SETTINGS | EXPERT_SETTINGS | {"mlp_layer_types"},
)
"""What families with Kimi's delta attention have in common."""
QWEN3_5 = Family(
    norm=GEMMA_NORM,
    layer=LayerKind(mixers=("linear_attn",)),
    attention=AttentionKind(gates_heads=True),
    rotary=RotaryKind(is_partial=True),
    attributes=frozenset({"block_type"}),
    settings=DELTA_RULE_SETTINGS,
)
SINGLE_NORM = ("norm", "", "", "")
LFM2_NORMS = ("operator_norm", "", "ffn_norm", "")
LFM2_NAMES = Names(
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
    "bailing_hybrid": replace(
        DELTA_ATTENTION,
        attention=AttentionKind(has_latents=True, latent_gate="g_proj"),
        rotary=RotaryKind(splits_pairs=True),
        experts=deepseek_experts("BailingHybrid"),
        settings=DELTA_ATTENTION.settings
        | {
            "kda_lower_bound", "kda_safe_gate", "layer_group_size", "mtp_loss_scaling_factor", "num_mtp_layers",
            "rope_theta", "short_conv_kernel_size",
        },
    ),
    "bamba": Family(
        names=Names(mlp="feed_forward", last_norm="final_layernorm"),
        layer=LayerKind(norms=("input_layernorm", "", "pre_ff_layernorm", ""), mixers=("mamba",)),
        rotary=RotaryKind(is_partial=True),
        attributes=frozenset({"block_type"}),
        settings=MAMBA2_SETTINGS | {"attn_layer_indices", "num_logits_to_keep", "z_loss_coefficient"},
    ),
    "falcon_h1": Family(
        names=Names(mlp="feed_forward", last_norm="final_layernorm"),
        layer=LayerKind(
            norms=("input_layernorm", "", "pre_ff_layernorm", ""),
            mixers=("mamba",),
            adds_mixers=True,
            factors={
                "queries": ("attention_in_multiplier",),
                "keys": ("attention_in_multiplier", "self_attn.key_multiplier"),
                "values": ("attention_in_multiplier",),
                "out": ("attn_out_multiplier",),
                "mixer_out": ("ssm_out_multiplier",),
                "gate": ("feed_forward.gate_multiplier",),
                "down": ("feed_forward.down_multiplier",),
            },
        ),
        ends=EndsKind(embedding="embedding_multiplier", logit_factor="lm_head_multiplier"),
        attributes=frozenset({"channels_attn"}),
        settings=MAMBA2_SETTINGS
        | {
            "attention_in_multiplier", "attention_out_multiplier", "key_multiplier", "mamba_d_ssm",
            "mamba_norm_before_gate", "mamba_rms_norm", "mlp_multipliers", "num_logits_to_keep", "projectors_bias",
            "ssm_in_multiplier", "ssm_multipliers", "ssm_out_multiplier",
        },
        required={"attention_bias": (False,), "mamba_proj_bias": (False,)},  # what is scaled has no bias
    ),
    "granitemoehybrid": Family(
        names=Names(mlp="shared_mlp", gate_up="input_linear", down="output_linear", activation="activation"),
        layer=LayerKind(mixers=("mamba",), residual="residual_multiplier"),
        rotary=RotaryKind(rotates=lambda attention: attention.config.position_embedding_type == "rope"),
        mlp=MlpKind(joins_gate=True),
        experts=ExpertKind(
            "GraniteMoeHybridMoE", "GraniteMoeHybridTopKRouter", gate="router", added_block="block_sparse_moe"
        ),
        ends=EndsKind(embedding="embedding_multiplier", logit_divisor="logits_scaling"),
        attributes=frozenset({"block_type", "block_sparse_moe", "has_experts", "input_size", "mamba", "self_attn"}),
        settings=EXPERT_SETTINGS
        | MAMBA2_SETTINGS
        | {"attention_multiplier", "position_embedding_type", "shared_intermediate_size"},
        required={"position_embedding_type": (None, "rope")},
    ),
    "kimi_linear": replace(
        DELTA_ATTENTION,
        rotary=RotaryKind(rotates=lambda attention: False),
        experts=deepseek_experts("KimiLinear"),
        settings=DELTA_ATTENTION.settings | {"linear_conv_kernel_dim", "linear_head_dim", "linear_num_heads"},
    ),
    "lfm2": Family(
        names=LFM2_NAMES,
        layer=LayerKind(norms=LFM2_NORMS, mixers=("conv",)),
        attributes=frozenset({"is_attention_layer"}),
        settings=frozenset({
            "block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of", "conv_L_cache", "conv_bias",
            "full_attn_idxs", "norm_eps",
        }),
    ),
    "lfm2_moe": Family(
        names=replace(LFM2_NAMES, rotary="pos_emb"),
        layer=LayerKind(norms=LFM2_NORMS, mixers=("conv",)),
        experts=ExpertKind(
            "Lfm2MoeSparseMoeBlock", "Lfm2MoeTopKRouter", has_sigmoids=True, correction="expert_bias", sum_offset=1e-6
        ),
        attributes=frozenset({"is_attention_layer"}),
        settings=EXPERT_SETTINGS | {"conv_L_cache", "conv_bias", "norm_eps", "num_dense_layers", "use_expert_bias"},
    ),
    "mamba2": Family(
        names=Names(attention="mixer", mlp="mixer", embedding="embeddings", last_norm="norm_f"),
        layer=LayerKind(norms=SINGLE_NORM, mixers=("mixer",), is_single=True, widens="residual_in_fp32"),
        settings=STATE_SETTINGS | {"num_heads", "state_size", "time_step_rank"},
    ),
    "nemotron_h": Family(
        norm=ROUNDED_AFTER,
        names=Names(
            attention="mixer", mlp="mixer", gate="up_proj", up="", embedding="embeddings", last_norm="norm_f"
        ),
        layer=LayerKind(norms=SINGLE_NORM, mixers=("mixer",), is_single=True),
        attention=AttentionKind(class_name="NemotronHAttention"),
        rotary=RotaryKind(rotates=lambda attention: False),
        mlp=MlpKind(activations=frozenset({"relu2"})),
        experts=replace(deepseek_experts("NemotronH"), identities=("fc1_latent_proj", "fc2_latent_proj")),
        attributes=frozenset({"block_type"}),
        settings=STATE_SETTINGS
        | EXPERT_SETTINGS
        | {
            "hidden_dropout", "layers_block_type", "mamba_head_dim", "mamba_hidden_act", "mamba_num_heads",
            "mamba_proj_bias", "mamba_ssm_cache_dtype", "mlp_hidden_act", "moe_latent_size",
            "moe_shared_expert_intermediate_size", "moe_shared_expert_overlap", "mtp_layers_block_type",
            "num_logits_to_keep", "num_nextn_predict_layers", "ssm_state_size", "use_mamba_kernels",
        },
    ),
    "olmo_hybrid": Family(
        norm=ROUNDED_AFTER,
        layer=LayerKind(mixers=("linear_attn",), norms=POST_NORMS, norms_of_mixers=LLAMA_NORMS),
        attention=AttentionKind(norms_all_heads=True),
        rotary=RotaryKind(
            rotates=lambda attention: (attention.config.rope_parameters or {}).get("rope_theta") is not None,
        ),
        settings=DELTA_RULE_SETTINGS
        | {
            "linear_a_log_max", "linear_a_log_min", "linear_allow_neg_eigval", "linear_dt_init_floor", "linear_dt_max",
            "linear_dt_min",
        },
    ),
    "qwen3_next": replace(QWEN3_5, experts=qwen_experts("Qwen3Next"), settings=DELTA_RULE_SETTINGS | EXPERT_SETTINGS),
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": replace(QWEN3_5, experts=qwen_experts("Qwen3_5Moe"), settings=DELTA_RULE_SETTINGS | EXPERT_SETTINGS),
    "zamba2": Family(
        names=Names(
            attention="shared_transformer.self_attn",
            mlp="shared_transformer.feed_forward",
            activation="act_fn",
            last_norm="final_layernorm",
        ),
        layer=LayerKind(
            mixers=("mamba", "mamba_decoder.mamba"),
            norms=("mamba_decoder.input_layernorm", "", "shared_transformer.pre_ff_layernorm", ""),
            norms_of_mixers=("input_layernorm", "", "", ""),
        ),
        rotary=RotaryKind(rotates=lambda attention: bool(attention.config.use_mem_rope)),
        mlp=MlpKind(joins_gate=True, activations=GELU | {"silu"}),
        side=SideNames(
            holders=("mamba_decoder", "shared_transformer"),
            norm="shared_transformer.input_layernorm",
            out="linear",
            adapters={
                "queries": "shared_transformer.self_attn.linear_q_adapter_list",
                "keys": "shared_transformer.self_attn.linear_k_adapter_list",
                "values": "shared_transformer.self_attn.linear_v_adapter_list",
                "gate_up": "shared_transformer.feed_forward.gate_up_proj_adapter_list",
            },
        ),
        attributes=frozenset({
            "attention_hidden_size", "block_id", "layer_block_map", "layer_dic", "max_position_embeddings",
            "num_fwd_mem_blocks",
        }),
        settings=STATE_SETTINGS
        | {
            "adapter_rank", "add_bias_linear", "layers_block_type", "mamba_d_conv", "mamba_d_state", "mamba_expand",
            "mamba_ngroups", "n_mamba_heads", "num_logits_to_keep", "num_mem_blocks", "use_long_context",
            "use_mamba_kernels", "use_mem_eff_path", "use_mem_rope", "use_shared_attention_adapter",
        },
    ),
}  # fmt: skip
"""Hybrid families by the name of their package in ``transformers.models``."""
DESCRIBED: Mapping[str, Family] = {
    **FAMILIES, **HYBRID_FAMILIES, **LATENT_FAMILIES, **LAYER_NORM_FAMILIES, **VARIED_FAMILIES,
}  # fmt: skip
"""All described families besides Llama's."""
