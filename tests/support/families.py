"""Tiny random float32 models of many families, which need no download."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from hdtool.data import demo

VOCABULARY = 97
WINDOW = 24
"""Sliding window short enough to take effect within a tree as well as within a prompt."""

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.5,  # with a smaller range, a model repeats one token
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
ALTERNATING = ["sliding_attention", "full_attention"]


def random_model(name: str, without: tuple[str, ...] = (), **changes: Any) -> PreTrainedModel:
    """Create a random model from a configuration class, in the common shape with changed settings.

    No token ends its answers.
    """
    settings = {key: value for key, value in {**SHAPE, **changes}.items() if key not in without}
    config = getattr(transformers, f"{name}Config")(**settings)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: random_model("Llama"),
    "mistral": lambda: random_model("Mistral", sliding_window=WINDOW),
    "qwen2": lambda: random_model("Qwen2"),
    "qwen3": lambda: random_model("Qwen3"),
    "gemma2": lambda: random_model("Gemma2", sliding_window=WINDOW, layer_types=ALTERNATING),
    "gemma3": lambda: random_model("Gemma3Text", sliding_window=WINDOW, layer_types=ALTERNATING),
    "phi3": lambda: random_model("Phi3"),
    "gpt2": lambda: random_model("GPT2", n_embd=32, n_layer=2, n_head=4, n_positions=512),
    "gpt_neox": lambda: random_model("GPTNeoX"),
    "opt": lambda: random_model("OPT", ffn_dim=48, word_embed_proj_dim=32, do_layer_norm_before=True),
    "falcon": lambda: random_model("Falcon", without=("head_dim",), alibi=False),
    "mixtral": lambda: random_model("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": lambda: random_model("Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "starcoder2": lambda: random_model("Starcoder2", sliding_window=WINDOW),
    "stablelm": lambda: random_model("StableLm"),
    "granite": lambda: random_model("Granite"),
    "olmo2": lambda: random_model("Olmo2"),
    "cohere2": lambda: random_model("Cohere2", sliding_window=WINDOW, layer_types=ALTERNATING),
    "gpt_oss": lambda: random_model(
        "GptOss", num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW, layer_types=ALTERNATING
    ),
    "llama4": lambda: random_model(
        "Llama4Text",
        attention_chunk_size=WINDOW,
        layer_types=["chunked_attention", "full_attention"],
        no_rope_layers=[1, 0],
        num_local_experts=2,
        intermediate_size_mlp=48,
    ),
    "deepseek_v3": lambda: random_model(
        "DeepseekV3",
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        moe_intermediate_size=16,
        n_shared_experts=1,
        num_key_value_heads=4,
    ),
    "smollm3": lambda: random_model("SmolLM3"),
    "glm4": lambda: random_model("Glm4"),
    "codegen": lambda: random_model("CodeGen", n_embd=32, n_layer=2, n_head=4, n_positions=512, rotary_dim=8),
    "gptj": lambda: random_model("GPTJ", n_embd=32, n_layer=2, n_head=4, n_positions=512, rotary_dim=8),
    "gpt_bigcode": lambda: random_model("GPTBigCode", n_embd=32, n_layer=2, n_head=4, n_positions=512),
}


MAMBA: dict[str, Any] = {
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}

HYBRIDS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3_5": lambda: random_model("Qwen3_5Text", **DELTA),
    "qwen3_next": lambda: random_model("Qwen3Next", **DELTA, **EXPERTS),
    "kimi_linear": lambda: random_model(
        "KimiLinear",
        layer_types=["linear_attention", "full_attention"],
        linear_attn_config={
            "head_dim": 8,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
            "kda_layers": [1],
            "full_attn_layers": [2],
        },
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        num_experts=4,
        num_experts_per_token=2,
        moe_intermediate_size=16,
        num_key_value_heads=4,
    ),
    "bailing_hybrid": lambda: random_model(
        "BailingHybrid",
        layer_types=["linear_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse"],
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=16,
        num_key_value_heads=4,
    ),
    "granitemoehybrid": lambda: random_model(
        "GraniteMoeHybrid",
        without=("head_dim",),
        **{**MAMBA, "mamba_d_head": "auto"},
        layer_types=["mamba", "attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=16,
    ),
    "nemotron_h": lambda: random_model(
        "NemotronH",
        num_hidden_layers=3,
        layers_block_type=["mamba", "attention", "mlp"],
        mamba_num_heads=8,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=1,
        chunk_size=8,
        time_step_min=1e-9,  # transformers applies this limit only in passes of several tokens
    ),
    "falcon_h1": lambda: random_model("FalconH1", **MAMBA, mamba_d_ssm=64),
    "mamba2": lambda: random_model("Mamba2", num_heads=8, state_size=8, n_groups=1, chunk_size=8),
    "jamba": lambda: random_model(
        "Jamba",
        without=("head_dim",),
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=4,
        mamba_d_state=8,
        use_mamba_kernels=False,
    ),
    "lfm2": lambda: random_model("Lfm2", layer_types=["conv", "full_attention"], conv_L_cache=3),
    "zamba2": lambda: random_model(
        "Zamba2",
        without=("head_dim",),
        num_hidden_layers=3,
        layers_block_type=["hybrid", "linear_attention", "hybrid"],  # both with the weights of one block
        mamba_d_state=8,
        n_mamba_heads=8,
        chunk_size=8,
        num_key_value_heads=4,
        adapter_rank=4,
        use_shared_attention_adapter=True,
        use_mem_rope=True,
        time_step_min=1e-9,
        initializer_range=0.1,
    ),
}
"""Models with recurrent layers or short convolutions. Jamba's cannot read several tokens after a saved state."""
FAMILIES |= HYBRIDS

IN_DOUBLE = sorted(
    set(FAMILIES)
    - set(HYBRIDS)
    - {"gemma2", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "codegen", "gptj", "llama4"}
)
"""Families that compute in float64 throughout. Parts of the others compute in float32 or less."""


@cache
def model_of(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Create a random model of a family, with equal weights in every run."""
    torch.manual_seed(sum(map(ord, family)))
    model = FAMILIES[family]()
    model.to(dtype)  # type: ignore[arg-type]
    return model


def saved(model: Any, folder: Path) -> Path:
    """Save a model with the demo model's tokenizer, and return the folder."""
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.MODEL / name, folder)
    return folder
