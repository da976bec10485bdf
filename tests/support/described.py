"""Tiny models of the families that hdtool's programs describe, other than Llama, and targets that run them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from hdtool.runtime.core.tree import ROOT
from hdtool.runtime.target.target import Target
from tests.support.families import ALTERNATING, VOCABULARY, WINDOW, random_model
from tests.support.fused import compile_target, with_compiled_layers
from tests.support.oracle import assert_same_logits, plain_logits, prompt_of
from tests.support.trees import bush, path_to, tokens_to

WINDOWS: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": ALTERNATING}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
MULTIPLIERS: dict[str, Any] = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 4.0,
    "residual_multiplier": 0.6,
    "logits_scaling": 3.0,
}
BOUNDS: dict[str, Any] = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
LOCAL_AND_GLOBAL: dict[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "ernie4_5_moe": lambda: random_model(
        "Ernie4_5_Moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=64, moe_num_shared_experts=2
    ),
    "ernie4_5_moe, none shared": lambda: random_model(
        "Ernie4_5_Moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=64, moe_num_shared_experts=0, use_bias=True
    ),
    "exaone4": lambda: random_model("Exaone4", **WINDOWS),
    "gemma": lambda: random_model("Gemma"),
    "gemma2": lambda: random_model("Gemma2", **WINDOWS, **BOUNDS),
    "gemma3": lambda: random_model("Gemma3Text", **WINDOWS, rope_parameters=LOCAL_AND_GLOBAL),
    "glm": lambda: random_model("Glm"),
    "glm4": lambda: random_model("Glm4"),
    "glm4_moe": lambda: random_model(
        "Glm4Moe",
        use_qk_norm=True,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    "glm4_moe, groups": lambda: random_model(
        "Glm4Moe",
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=64,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=False,
        first_k_dense_replace=0,
    ),
    "gpt_oss": lambda: random_model("GptOss", **WINDOWS, **EXPERTS, rope_parameters=YARN),
    "granite": lambda: random_model("Granite", **MULTIPLIERS),
    "granitemoe": lambda: random_model("GraniteMoe", without=("head_dim",), **EXPERTS, **MULTIPLIERS),
    "mixtral": lambda: random_model("Mixtral", **EXPERTS),
    "olmo2": lambda: random_model("Olmo2"),
    "olmo3": lambda: random_model("Olmo3", **WINDOWS),
    "olmoe": lambda: random_model("Olmoe", without=("head_dim",), **EXPERTS),
    "phi3": lambda: random_model("Phi3"),
    "phi3, a part rotated": lambda: random_model("Phi3", partial_rotary_factor=0.5),
    "qwen2_moe": lambda: random_model(
        "Qwen2Moe",
        **EXPERTS,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=192,
        decoder_sparse_step=2,
        num_hidden_layers=4,
        mlp_only_layers=[3],
    ),
    "qwen3_moe": lambda: random_model("Qwen3Moe", **EXPERTS, moe_intermediate_size=64),
    "qwen3_moe, some dense": lambda: random_model("Qwen3Moe", **EXPERTS, moe_intermediate_size=64, mlp_only_layers=[0]),
    "smollm3": lambda: random_model("SmolLM3", no_rope_layers=[1, 0]),
}

DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "partial_rotary_factor": 0.5,
}
MAMBA: dict[str, Any] = {
    "num_local_experts": 0,
    "shared_intermediate_size": 64,
    "layer_types": ["mamba", "attention", "mamba"],
    "num_hidden_layers": 3,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 32,
    "mamba_n_groups": 2,
}
SCAN: dict[str, Any] = {"num_hidden_layers": 3, **{key: MAMBA[key] for key in MAMBA if key.startswith("mamba_")}}
SCALES: dict[str, Any] = {
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.4,
    "attention_in_multiplier": 0.8,
    "attention_out_multiplier": 0.7,
    "key_multiplier": 0.6,
    "mlp_multipliers": [0.9, 0.3],
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.5,
    "ssm_multipliers": [0.7, 0.6, 0.5, 1.1, 1.3],
}


SIDE: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layers_block_type": ["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid", "linear_attention"],
    "num_key_value_heads": 4,
    "num_mem_blocks": 2,
    "adapter_rank": 64,
    "n_mamba_heads": 8,
    "mamba_d_state": 32,
    "mamba_ngroups": 2,
    "time_step_min": 1e-9,
    "initializer_range": 0.1,  # with a larger range, these layers amplify rounding
}
"""Settings of a model with blocks of attention and MLP beside mixers; its first block is used in two layers."""


def nemotron_h(**changes: Any) -> PreTrainedModel:
    """Create a model with layers of a mixer, an MLP or attention alone."""
    settings: dict[str, Any] = {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 32,
        "n_groups": 2,
        "mlp_bias": True,
    }
    return random_model("NemotronH", without=("num_hidden_layers",), **{**settings, **changes})


HYBRID_MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "bailing_hybrid": lambda: random_model("BailingHybrid", **CHANNEL_DELTA),
    "bailing_hybrid, unbounded decays": lambda: random_model(
        "BailingHybrid", **CHANNEL_DELTA, kda_safe_gate=False, rope_parameters=YARN
    ),
    "bamba": lambda: random_model("Bamba", **SCAN, attn_layer_indices=[1], mamba_proj_bias=True, attention_bias=True),
    "falcon_h1": lambda: random_model(
        "FalconH1", **SCAN, **SCALES, mamba_d_ssm=128, without=("head_dim",), num_attention_heads=2
    ),
    "falcon_h1, norms": lambda: random_model(
        "FalconH1",
        **SCAN,
        mamba_d_ssm=128,
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
        projectors_bias=True,
        mlp_bias=True,
        without=("head_dim",),
        num_attention_heads=2,
    ),
    "falcon_h1, norms before gates": lambda: random_model(
        "FalconH1",
        **{**SCAN, "mamba_n_groups": 1},
        mamba_d_ssm=128,
        mamba_rms_norm=True,
        without=("head_dim",),
        num_attention_heads=2,
    ),
    "granitemoehybrid": lambda: random_model(
        "GraniteMoeHybrid", without=("head_dim",), num_attention_heads=2, **MAMBA, **MULTIPLIERS
    ),
    "granitemoehybrid, positions": lambda: random_model(
        "GraniteMoeHybrid",
        without=("head_dim",),
        position_embedding_type="rope",
        num_attention_heads=2,
        **{**MAMBA, "mamba_n_groups": 1, "mamba_conv_bias": False},
    ),
    "granitemoehybrid, experts": lambda: random_model(
        "GraniteMoeHybrid", without=("head_dim",), num_attention_heads=2, **{**MAMBA, **EXPERTS}, **MULTIPLIERS
    ),
    "lfm2": lambda: random_model(
        "Lfm2", num_hidden_layers=4, layer_types=["conv", "conv", "full_attention", "conv"], conv_L_cache=3
    ),
    "lfm2, biases and four taps": lambda: random_model(
        "Lfm2", layer_types=["full_attention", "conv"], conv_L_cache=4, conv_bias=True
    ),
    "lfm2_moe": lambda: random_model(
        "Lfm2Moe",
        **EXPERTS,
        num_hidden_layers=4,
        layer_types=["conv", "full_attention", "conv", "full_attention"],
        moe_intermediate_size=64,
        num_dense_layers=1,
        routed_scaling_factor=1.5,
    ),
    "lfm2_moe, no correction": lambda: random_model(
        "Lfm2Moe",
        **EXPERTS,
        layer_types=["full_attention", "conv"],
        moe_intermediate_size=64,
        num_dense_layers=0,
        use_expert_bias=False,
        norm_topk_prob=False,
    ),
    "kimi_linear": lambda: random_model("KimiLinear", **KIMI),
    "kimi_linear, latent queries": lambda: random_model(
        "KimiLinear", **{**KIMI, "q_lora_rank": 64}, linear_conv_kernel_dim=3, attention_bias=True
    ),
    "mamba2": lambda: random_model(
        "Mamba2", num_heads=8, head_dim=16, state_size=32, n_groups=2, chunk_size=8, num_hidden_layers=3
    ),
    "nemotron_h": lambda: nemotron_h(time_step_min=1e-9),
    "nemotron_h, experts": lambda: nemotron_h(
        time_step_min=1e-9,
        layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
        n_routed_experts=8,
        moe_intermediate_size=64,
        moe_shared_expert_intermediate_size=128,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
    ),
    "olmo_hybrid": lambda: random_model(
        "OlmoHybrid", without=("head_dim",), num_attention_heads=2, **DELTA, linear_value_head_dim=32
    ),
    "olmo_hybrid, no positions": lambda: random_model(
        "OlmoHybrid",
        without=("head_dim",),
        num_attention_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": None},
        linear_allow_neg_eigval=False,
        **{**DELTA, "linear_num_key_heads": 4},
        linear_value_head_dim=32,
    ),
    "qwen3_5": lambda: random_model("Qwen3_5Text", **DELTA, linear_value_head_dim=16),
    "qwen3_next": lambda: random_model(
        "Qwen3Next",
        **DELTA,
        **EXPERTS,
        linear_value_head_dim=16,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        mlp_only_layers=[1],
    ),
    "qwen3_5_moe": lambda: random_model(
        "Qwen3_5MoeText",
        **DELTA,
        **EXPERTS,
        linear_value_head_dim=16,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    ),
    "qwen3_5, wide values": lambda: random_model("Qwen3_5Text", **DELTA, linear_value_head_dim=80),
    "zamba2": lambda: random_model(
        "Zamba2", without=("head_dim",), **SIDE, use_shared_attention_adapter=True, use_mem_rope=True
    ),
    "zamba2, one block": lambda: random_model(
        "Zamba2", without=("head_dim",), **{**SIDE, "num_key_value_heads": 2, "num_mem_blocks": 1}, add_bias_linear=True
    ),
}
"""Models with recurrent layers or short convolutions. Heads of width 80 are computed in wide and in narrow columns."""

GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": 2 * ALTERNATING,
    "sliding_window": WINDOW,
    "global_head_dim": 64,
    "hidden_size_per_layer_input": 0,
}
INPUTS: dict[str, Any] = {"hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": VOCABULARY}
SHARED: dict[str, Any] = {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}
VARIED_MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "gemma4": lambda: random_model("Gemma4Text", **{**GEMMA4, **INPUTS, **SHARED}, final_logit_softcapping=3.0),
    "gemma4, heads of one width": lambda: random_model("Gemma4Text", **{**GEMMA4, "global_head_dim": 32}),
    "gemma4, keys of two layers": lambda: random_model(
        "Gemma4Text",
        **{**GEMMA4, **INPUTS, **SHARED, "num_hidden_layers": 6, "layer_types": 3 * ALTERNATING},
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
    ),
    "gemma4, experts beside MLPs": lambda: random_model(
        "Gemma4Text",
        **GEMMA4,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=64,
        attention_k_eq_v=True,
    ),
    "gemma4_unified": lambda: random_model("Gemma4UnifiedText", **GEMMA4, attention_k_eq_v=True),
}
"""Models whose head width differs between layers."""

LAYER_NORM_MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "cohere": lambda: random_model("Cohere", logit_scale=0.3),
    "cohere, norms of each head": lambda: random_model("Cohere", use_qk_norm=True, attention_bias=True),
    "cohere2": lambda: random_model("Cohere2", without=("head_dim",), num_attention_heads=2, **WINDOWS),
    "phi": lambda: random_model("Phi", partial_rotary_factor=0.5),
    "phi, norms of heads": lambda: random_model(
        "Phi", without=("head_dim",), num_attention_heads=2, qk_layernorm=True, hidden_act="gelu_pytorch_tanh"
    ),
    "starcoder2": lambda: random_model("Starcoder2", sliding_window=WINDOW),
    "starcoder2, no biases": lambda: random_model("Starcoder2", use_bias=False, hidden_act="gelu"),
}
"""Models with LayerNorms instead of RMSNorms."""

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 96,
    "qk_rope_head_dim": 32,
    "head_dim": 32,
    "qk_nope_head_dim": 16,
    "v_head_dim": 48,
}
LATENT_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
}
CHANNEL_DELTA: dict[str, Any] = {
    **LATENT,
    **LATENT_EXPERTS,
    "q_lora_rank": None,
    "num_local_experts": 8,
    "n_shared_experts": 1,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "num_hidden_layers": 3,
}
"""Settings of delta attention, whose states have a decay for each channel of the keys, beside latent attention."""
KIMI: dict[str, Any] = {**CHANNEL_DELTA, "linear_num_heads": 3, "linear_head_dim": 64}
LATENT_MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "deepseek_v2": lambda: random_model("DeepseekV2", **{**LATENT, "q_lora_rank": None}, **LATENT_EXPERTS),
    "deepseek_v2, groups": lambda: random_model(
        "DeepseekV2", **LATENT, **LATENT_EXPERTS, topk_method="group_limited_greedy", mlp_bias=True
    ),
    "deepseek_v3": lambda: random_model("DeepseekV3", **LATENT, **LATENT_EXPERTS),
    "deepseek_v3, one projection of queries": lambda: random_model(
        "DeepseekV3", **{**LATENT, "q_lora_rank": None}, **LATENT_EXPERTS, attention_bias=True, rms_norm_eps=0.05
    ),
    "deepseek_v3, longer contexts": lambda: random_model(
        "DeepseekV3", **LATENT, **LATENT_EXPERTS, rope_parameters={**YARN, "mscale_all_dim": 1.0}
    ),
    "glm4_moe_lite": lambda: random_model("Glm4MoeLite", **LATENT, **LATENT_EXPERTS),
    "youtu": lambda: random_model("Youtu", **LATENT, embedding_initializer_range=0.5),
}
"""Models that cache one latent vector for the keys and values of all heads."""

DENSE_MODELS = MODELS | VARIED_MODELS | LATENT_MODELS | LAYER_NORM_MODELS
DESCRIBED_MODELS = DENSE_MODELS | HYBRID_MODELS


def model_of(name: str) -> Any:
    """Create a model with random norms, sinks, biases, decays, skips and scaling factors, so that each one matters."""
    torch.manual_seed(0)
    model = DESCRIBED_MODELS[name]()
    for part, buffer in model.named_buffers():
        if part.endswith("layer_scalar"):
            buffer.copy_(torch.rand_like(buffer) + 0.5)
    for part, weight in model.named_parameters():
        if any(word in part for word in ("norm", "sinks", "bias", "A_log", ".D", "router.scale", "expert_scale")):
            weight.data = torch.rand_like(weight) + 0.5
    for part, buffer in model.named_buffers():
        if "bias" in part:
            buffer.copy_(torch.rand_like(buffer))
    return model


def target_of(name: str) -> Target:
    """Create a target with compiled matmuls and experts, which otherwise runs transformers' code."""
    return with_compiled_layers(model_of(name))


def compiled_of(name: str) -> Target:
    """Create a target that is compiled as a whole."""
    target = target_of(name)
    compile_target(target)
    return target


def assert_right(
    model: Any, target: Target, sizes: tuple[tuple[int, ...], ...], lengths: tuple[int, ...] = (40, 3, 75)
) -> None:
    """Assert that batches of trees have the logits of plain passes.

    The contexts are shorter and longer than the sliding windows, and accepted paths are moved in the cache.
    """
    cache = target.allocate(len(lengths))
    contexts = [prompt_of(length) for length in lengths]
    for slot, context in enumerate(contexts):
        target.prefill(cache, slot, context, room=200)
    for batch in sizes:
        drafted = list(map(bush, batch))
        found = target.verify(cache, drafted)
        for slot, (tree, verified) in enumerate(zip(drafted, found, strict=True)):
            for node in {ROOT, len(tree) // 2 - 1, len(tree) - 1}:
                expected = plain_logits(model, contexts[slot] + tokens_to(tree, node))
                assert_same_logits(verified.logits[node + 1], expected)
            contexts[slot] += tokens_to(tree, len(tree) - 1)
            target.commit(cache, slot, path_to(tree, len(tree) - 1))
