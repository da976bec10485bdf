"""Describes model types with latent attention: DeepSeek's from its second version on, and others that follow it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hdtool.runtime.program.mixer_parts import ExpertKind
from hdtool.runtime.program.model_families import EXPERT_SETTINGS, Family

ATTRIBUTES = frozenset({
    "kv_lora_rank", "num_heads", "q_a_layernorm", "q_a_proj", "q_b_proj", "q_lora_rank", "q_proj", "qk_head_dim",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
})  # fmt: skip
SETTINGS = frozenset({
    "kv_lora_rank", "pretraining_tp", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "rope_interleave",
    "v_head_dim",
})  # fmt: skip


def _latent(**changes: Any) -> Family:
    """Return a family whose attention is DeepSeek-V3's."""
    settings: frozenset[str] = changes.pop("settings", frozenset())
    required = {"rope_interleave": (True,), **changes.pop("required", {})}
    changes = {"splits_pairs": True, **changes}
    return Family(has_latents=True, attributes=ATTRIBUTES, settings=SETTINGS | settings, required=required, **changes)


def latent_experts(prefix: str) -> ExpertKind:
    """Return the ``ExpertKind`` of mixtures like DeepSeek-V3's; ``prefix`` begins their class names."""
    return ExpertKind(
        f"{prefix}MoE",
        f"{prefix}TopkRouter",
        shared="shared_experts",
        has_sigmoids=True,
        correction="gate.e_score_correction_bias",
        sum_offset=1e-20,
    )


LATENT_FAMILIES: Mapping[str, Family] = {
    "deepseek_v2": Family(
        has_latents=True,
        is_interleaved=True,
        has_half_tables=True,
        experts=ExpertKind(
            "DeepseekV2Moe", "DeepseekV2TopkRouter", shared="shared_experts", renormalizes=False, group_top=1
        ),
        attributes=ATTRIBUTES,
        settings=SETTINGS | EXPERT_SETTINGS | {"topk_method"},
        required={"topk_method": ("greedy", "group_limited_greedy")},
    ),
    "deepseek_v3": _latent(experts=latent_experts("DeepseekV3"), settings=EXPERT_SETTINGS | {"num_mtp_layers"}),
    "glm4_moe_lite": _latent(experts=latent_experts("Glm4MoeLite"), settings=EXPERT_SETTINGS | {"mlp_layer_types"}),
    "youtu": _latent(settings=frozenset({"embedding_initializer_range"})),
}
"""Families by the name of their package in ``transformers.models``."""
