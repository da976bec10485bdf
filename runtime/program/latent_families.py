"""Describes model types with latent attention: DeepSeek's from its second version on, and others that follow it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hdtool.runtime.program.llama_like_families import EXPERT_SETTINGS, AttentionKind, Family, RotaryKind
from hdtool.runtime.program.mixer_parts import ExpertKind, deepseek_experts

ATTRIBUTES = frozenset({
    "kv_lora_rank", "num_heads", "q_a_layernorm", "q_a_proj", "q_b_proj", "q_lora_rank", "q_proj", "qk_head_dim",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
})  # fmt: skip
SETTINGS = frozenset({
    "kv_lora_rank", "pretraining_tp", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "rope_interleave",
    "v_head_dim",
})  # fmt: skip
DEEPSEEK_V3 = Family(
    attention=AttentionKind(has_latents=True),
    rotary=RotaryKind(splits_pairs=True),
    experts=deepseek_experts("DeepseekV3"),
    attributes=ATTRIBUTES,
    settings=SETTINGS | EXPERT_SETTINGS | {"num_mtp_layers"},
    required={"rope_interleave": (True,)},
)
LATENT_FAMILIES: Mapping[str, Family] = {
    "deepseek_v2": Family(
        attention=AttentionKind(has_latents=True),
        rotary=RotaryKind(is_interleaved=True, has_half_tables=True),
        experts=ExpertKind(
            "DeepseekV2Moe", "DeepseekV2TopkRouter", shared="shared_experts", renormalizes=False, group_top=1
        ),
        attributes=ATTRIBUTES,
        settings=SETTINGS | EXPERT_SETTINGS | {"topk_method"},
        required={"topk_method": ("greedy", "group_limited_greedy")},
    ),
    "deepseek_v3": DEEPSEEK_V3,
    "glm4_moe_lite": replace(
        DEEPSEEK_V3,
        experts=deepseek_experts("Glm4MoeLite"),
        settings=SETTINGS | EXPERT_SETTINGS | {"mlp_layer_types"},
    ),
    "youtu": replace(DEEPSEEK_V3, experts=None, settings=SETTINGS | {"embedding_initializer_range"}),
}
"""Families by the name of their package in ``transformers.models``."""
