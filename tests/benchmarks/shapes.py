"""Shapes of models with random weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers

HEADS: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
SHAPE: dict[str, Any] = {"hidden_size": 1024, "num_hidden_layers": 8, "vocab_size": 32000, **HEADS}
DENSE: dict[str, Any] = {**SHAPE, "intermediate_size": 3072}
EXPERTS: dict[str, Any] = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
SHAPES: dict[str, dict[str, Any]] = {
    "Llama": DENSE,
    "Gemma2": DENSE,
    "Gemma3": {
        "hidden_size": 640, "num_hidden_layers": 18, "vocab_size": 262144, "intermediate_size": 2048,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
    },
    "Gemma4": {
        "hidden_size": 1536, "num_hidden_layers": 10, "vocab_size": 32000, "vocab_size_per_layer_input": 32000,
        "intermediate_size": 6144, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256,
        "layer_types": 2 * [*["sliding_attention"] * 4, "full_attention"], "num_kv_shared_layers": 5,
        "use_double_wide_mlp": True, "final_logit_softcapping": 30.0,
    },
    "Gemma4, experts": {
        "hidden_size": 1408, "num_hidden_layers": 6, "vocab_size": 32000, "hidden_size_per_layer_input": 0,
        "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "num_global_key_value_heads": 1, "attention_k_eq_v": True, "final_logit_softcapping": 30.0,
        "enable_moe_block": True, "num_experts": 32, "top_k_experts": 4, "moe_intermediate_size": 384,
    },
    "Granite": {key: value for key, value in DENSE.items() if key != "head_dim"},
    "Olmo2": {key: value for key, value in DENSE.items() if key != "head_dim"},
    "Phi3": {**{key: value for key, value in DENSE.items() if key != "head_dim"}, "pad_token_id": 0},
    "SmolLM3": {**{key: value for key, value in DENSE.items() if key != "head_dim"}, "pad_token_id": 0},
    "Qwen3Moe": {**SHAPE, **EXPERTS},
    "Qwen2Moe": {**DENSE, **EXPERTS, "shared_expert_intermediate_size": 1024},
    "Glm4Moe": {**DENSE, **EXPERTS, "n_routed_experts": 32, "first_k_dense_replace": 1, "pad_token_id": 0},
    "GptOss": {**SHAPE, "intermediate_size": 512, "num_local_experts": 32, "num_experts_per_tok": 4},
    "GraniteMoe": {
        **{key: value for key, value in SHAPE.items() if key != "head_dim"},
        "intermediate_size": 512, "num_local_experts": 32, "num_experts_per_tok": 4,
    },
    "Lfm2Moe": {
        **SHAPE, **EXPERTS, "intermediate_size": 3072, "num_dense_layers": 1,
        "layer_types": ["conv", "conv", "full_attention", "conv"] * 2,
    },
    "Qwen3Next": {
        **DENSE, **EXPERTS, "shared_expert_intermediate_size": 512, "linear_num_key_heads": 8,
        "linear_num_value_heads": 16, "layer_types": ([*["linear_attention"] * 3, "full_attention"]) * 2,
    },
    "Qwen3_5Moe": {
        **SHAPE, **EXPERTS, "shared_expert_intermediate_size": 512, "linear_num_key_heads": 8,
        "linear_num_value_heads": 16, "layer_types": ([*["linear_attention"] * 3, "full_attention"]) * 2,
    },
    "Lfm2": {
        "hidden_size": 2048, "intermediate_size": 12288, "num_hidden_layers": 16, "vocab_size": 32768,
        "num_attention_heads": 32, "num_key_value_heads": 8, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "tie_word_embeddings": True,
    },
    "Qwen3_5": {
        "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "vocab_size": 32768,
        "num_attention_heads": 8, "num_key_value_heads": 2, "linear_num_value_heads": 16, "tie_word_embeddings": True,
    },
    "GraniteMoeHybrid": {
        "hidden_size": 1536, "num_hidden_layers": 20, "vocab_size": 32768, "num_attention_heads": 12,
        "num_key_value_heads": 4, "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 128, "num_local_experts": 0,
        "shared_intermediate_size": 4096, "tie_word_embeddings": True, "pad_token_id": 0,
        "layer_types": ["attention" if number % 10 == 5 else "mamba" for number in range(20)],
    },
}  # fmt: skip
"""Shapes by class name.

Gemma 3 is the model of 270 million weights. Gemma 4 has layers as wide as those of E2B, or half as wide as those of
26B-A4B with a quarter of its experts. The last three have about a billion weights.
"""
OF_SEVERAL_MEDIA = ("Gemma3", "Gemma4", "Qwen3_5", "Qwen3_5Moe")


def random_model(name: str) -> Any:
    torch.manual_seed(0)
    kind = name.split(",")[0]
    settings = getattr(transformers, f"{kind}TextConfig" if kind in OF_SEVERAL_MEDIA else f"{kind}Config")
    model = getattr(transformers, f"{kind}ForCausalLM")(settings(**SHAPES[name]))
    model.generation_config.eos_token_id = None
    return model.bfloat16().eval()
