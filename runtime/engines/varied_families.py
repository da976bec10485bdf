"""Model types whose layers differ from one another in their heads, each described by what it adds to Llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hdtool.runtime.engines.model_families import GELU, PROJECTIONS, ROUNDED_AFTER, SANDWICH, Family


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
