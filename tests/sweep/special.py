"""Settings of types for which the general rules are not enough."""

from __future__ import annotations

from typing import Any

DROP: Any = object()
"""Marker for attributes that are left to the class's default."""
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
SHARED = {
    "num_hidden_layers": 4,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 64,
}
"""Layers that read the keys and values of earlier layers."""
GEMMA3N = SHARED | {"intermediate_size": [128] * 4, "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0]}
EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64}
COMPASS = {"rope_parameters": {kind: ROTARY | {"mrope_section": [4, 2, 2]} for kind in (FULL, SLIDING)}}
DOTS3_NOTE = {
    "per_layer_config": DROP,
    "rope_parameters": DROP,
    **{f"swa_num_{name}": 4 for name in ("attention_heads", "key_value_heads")},
    **{f"swa_{name}": 16 for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")},
    "swa_head_dim": 32,
    "head_dim": 32,
}
BLOCKS = {"layer_types": [FULL, "minimax_m3_sparse", FULL], "index_n_heads": 2}
CONVOLUTIONS = {"num_hidden_layers": 4, "layer_types": ["conv", FULL, "conv", FULL], "full_attn_idxs": DROP}
MUSE = {"num_hidden_layers": 4, "hidden_sizes": [16] * 4, "depths": [1] * 4, "patch_sizes": DROP}
QWEN4 = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "ple_layer_ids": [2],
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 8,
    "hc_lowrank": 16,
    "eos_token_id": 96,
    "heads_per_ngram": 2,
    "split_ngram_parts": 1,
}
ERNIE = {"rope_parameters": ROTARY | {"mrope_section": [3, 3, 2]}}
"""Sections for height and width must be equal."""
UNUSED_WINDOW = {"sliding_window": None}
"""For classes whose layers have no window, but whose caches use the attribute as one."""
THINKER = {"vision_start_token_id": 1002, "vision_end_token_id": 1003}

SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 97},
    "chameleon": {"vocabulary_map": {"<image>": 1000}},
    "cohere_compass": {"text_config": COMPASS},
    "cohere_compass_text": COMPASS,
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse", "sparse"]}},
    "doge": {"sliding_window": None},
    "dots3_note": {"text_config": DOTS3_NOTE},
    "dots3_note_text": DOTS3_NOTE,
    "emu3": {"vocabulary_map": {"<image>": 1000, "<|extra_200|>": 1001}},
    "ernie4_5_vl_moe": {"text_config": ERNIE},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "gemma3n": {"text_config": GEMMA3N},
    "gemma3n_text": GEMMA3N,
    "gemma4": {"text_config": EXPERTS | {"attention_k_eq_v": True}},
    "gemma4_text": SHARED,
    "gemma4_unified": {"text_config": SHARED},
    "glm5_next": {"text_config": {"index_kpool": 4}},
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "downsample_rate": "1/2"},
    "granitemoehybrid": {"layer_types": [LINEAR, FULL, LINEAR]},
    "hrm_text": {"num_hidden_layers": 1, "num_layers_per_stack": DROP},
    "inkling_mm_model": {"vision_config": {"n_layers": 4, "patch_size": 4}},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "janus": {"vq_config": {"base_channels": 32}},
    "kyutai_speech_to_text": {"num_codebooks": 2, "audio_pad_token_id": 290, "codec_config": {"upsample_groups": 64}},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "lfm2": CONVOLUTIONS,
    "lfm2_moe": CONVOLUTIONS,
    "lfm2_vl": {"text_config": CONVOLUTIONS},
    "longcat_flash": {"qk_head_dim": 32},
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl": {"text_config": BLOCKS},
    "minimax_m3_vl_text": BLOCKS,
    "mistral4": {"head_dim": 32},
    "molmo2": {"adapter_config": {"vision_feature_layer": [0, 0]}},
    "muse_spark": {"audio_config": MUSE},
    "nemo_speechlm": {"word_timestamp_config": {"blank_token_id": 96}},
    "nemotron": {"num_key_value_heads": 2},
    "paddleocr_vl": {"text_config": {"rope_parameters": ROTARY | {"mrope_section": [2, 3, 3]}}},
    "perception_lm": {"vision_config": {"model_args": {"embed_dim": 64}}},
    "qwen2_5_omni_thinker": THINKER,
    "qwen3_asr": {"eos_token_id": 1005},
    "qwen3_omni_moe_thinker": THINKER | {"text_config": UNUSED_WINDOW},
    "qwen3_vl_moe": {"text_config": UNUSED_WINDOW},
    "qwen4_exp": {"text_config": QWEN4},
    "qwen4_exp_text": QWEN4,
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [16, 32], "num_buckets": 4},
    "rwkv": {"attention_hidden_size": 64},
    "vibevoice_asr": {"acoustic_tokenizer_chunk_size": DROP},
    "xlm": {"causal": True},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
}
"""Changes to the settings from the general rules, by type."""

OTHERS = {
    "pi0": "answers with movements of a robot",
    "diffusion_gemma": "answers by diffusion, many tokens at once",
    "evolla": "reads proteins: the library has no auto class for it",
    "gemma4_assistant": "drafts for gemma4 from its keys and values",
    "gemma4_unified_assistant": "drafts for gemma4_unified from its keys and values",
    **dict.fromkeys(("qwen2_5_omni", "qwen3_omni_moe"), "answers in speech, too: its thinker is a type of its own"),
}
"""Types that cannot answer a prompt on their own."""


def merged(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return settings with changes, which are merged recursively."""
    found = dict(settings)
    for name, value in changes.items():
        if value is DROP:
            found.pop(name, None)
        elif isinstance(value, dict) and isinstance(found.get(name), dict):
            found[name] = merged(found[name], value)
        else:
            found[name] = value
    return found
