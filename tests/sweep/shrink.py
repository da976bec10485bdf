"""Create small settings for the configuration of any type, by the names of its attributes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from tests.support.families import VOCABULARY, WINDOW

HIDDEN, HEAD = 64, 16
LAYERS = 3
"""Number of layers of types whose layers are all alike. Others have at least one layer of each kind."""
MAX_LAYERS = 6
FIRST_SPECIAL_TOKEN_ID = 1000
"""Offset of image and other special tokens, so that they do not occur in text."""

RULES: tuple[tuple[str, int], ...] = (
    (r"vocab_size$|^unpadded_vocab_size$|^vocab_size_per_layer_input$", VOCABULARY),
    (r"^(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_seq_length|model_max_length|max_context_length"
     r"|original_max_position_embeddings)$", 512),
    (r"^(num_experts_per_tok(en)?|num_selected_experts|moe_top_?k|moe_k|top_?k_experts|n_activated_experts)$", 2),
    (r"^(topk_group|num_limited_groups|n_shared_experts|num_shared_experts|moe_num_shared_experts)$", 1),
    (r"^(n_groups?|num_expert_groups?|mamba_n_groups|mamba_ngroups)$", 2),
    (r"^(first_k_dense_replace|num_dense_layers|moe_layer_start_index)$", 1),
    (r"^index_topk_blocks$", 2),
    (r"experts$|^zero_expert_num$", 4),
    (r"^index_kpool$", 4),
    (r"^index_n_heads$", 32),  # with few heads, many keys score 0, and their order decides which ones are read
    (r"^base_channels$", 32),
    (r"^hidden_sizes$", 16),
    (r"^num_filters$", 4),
    (r"^depths$", 1),
    (r"^(index_topk|indexer_topk|topk_blocks|index_top_k)$", 8),
    (r"^(mamba_n_heads|mamba_num_heads|n_mamba_heads)$", 8),
    (r"(lora|gate|gated_norm|decay|laurel|dt|time_step)_?(low)?_?rank(_dim)?$|^rank$|_rank_dim$", 16),
    (r"(moe|expert|shared).*(intermediate|inner|ffn|hidden).*(size|dim)|^n_embd_per_expert$", 32),
    (r"intermediate|ffn|n_inner|inner_dim|inner_size|ff_dim|dim_ff|^dff$|^d_ff$|_ff$|mlp_hidden", 128),
    (r"^mamba_d_ssm$|^lru_width$|^attention_hidden_size$", 2 * HIDDEN),
    (r"kv_heads$|kv_n_heads$|key_value_heads$|^linear_num_key_heads$|^num_key_value_groups$", 2),
    (r"heads$|heads_per_layer$|^n_head$|^num_heads$", 4),
    (r"(state_size|d_state|state_dim|ssm_state)", 16),
    (r"head_dim$|head_size$|^d_kv$|^kv_channels$|^d_head$|^mamba_d_head$|head_dim_", HEAD),
    (r"^rotary_dim$", HEAD),
    (r"(sliding_window|window_size|^window$|keep_window|window_len|attention_chunk_size|local_attention)", WINDOW),
    (r"chunk_size$|block_size$", 16),
    (r"^(hidden_size|d_model|n_embd|dim|embed_dim|embedding_size|emb_dim|word_embed_proj_dim|hidden_dim|dim_model"
     r"|out_hidden_size|text_hidden_size|projection_dim|output_dim|d_embed|hidden_size_per_layer_input|backbone_hidden_size"
     r"|embedding_dim|mm_embed_dim|output_proj_dims|audio_embed_dim|adapter_(in|out)_dim|adapter_input_size|text_config_hidden_size|n_hidden|qformer_hidden_size"
     r"|input_hidden_size|vision_hidden_size|audio_hidden_size|encoder_hidden_size|projector_hidden_size|mm_hidden_size"
     r"|projection_hidden_size|num_embeddings_hidden|attention_dim|model_dim|proj_dim)$", HIDDEN),
)  # fmt: skip
"""Maximum of integers by pattern of their names. The first pattern that matches applies."""
LAYER_COUNTS = re.compile(
    r"^(num_hidden_layers|n_layers?|num_layers|depth|num_blocks|encoder_layers|decoder_layers|layers|resampler_depth"
    r"|num_hidden_blocks|num_decoder_layers|num_encoder_layers|xattn_layers|num_layers_per_stack|perceiver_depth)$"
)
TOKEN_ID = re.compile(r"^(?!mask).*(token|pad|start|end|newline|boi|eoi|user|image|video|audio).*_?(id|index|ids)$")
NON_TEXT_PARTS = re.compile(r"vision|audio|image|encoder|codec|vq|speech|token2wav|talker|dit_|perceiver|qformer")
"""Parts of a model that text does not pass through, which get one layer each."""
SPECIAL_TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
UNCHANGED_SETTINGS = frozenset(
    ("id2label", "label2id", "model_type", "architectures", "transformers_version", "dtype", "problem_type")
)
UNSET = {
    "head_dim": HEAD,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "ple_embed_dim": HIDDEN,
    "num_experts_per_tok": 2,
    "sliding_window": WINDOW,
}
"""Values of attributes that some classes need and that have no default."""
LATENT = "kv_lora_rank"
"""Attribute of latent attention, in which each head has a separate key and value."""
SECTIONS = "mrope_section"
LIVELY = {"initializer_range": 0.3, "init_std": 0.3, "embed_init_std": 0.3}
"""Large initial weights. With smaller ones, a model repeats one token."""
SWITCHES = {"tie_word_embeddings": False, "use_cache": True, "is_decoder": True, "use_sliding_window": True}
FULL, SLIDING = "full_attention", "sliding_attention"


def small_settings(config: PreTrainedConfig, *, is_text: bool = True) -> dict[str, Any]:
    """Return the arguments of a small configuration, given a default one of the same class."""
    stated, own = config.to_dict(), vars(config)
    found: dict[str, Any] = {}
    lists, length = _per_layer(stated)
    kept = _kept_layers(list(zip(*lists.values(), strict=True)), is_text=is_text) if lists else []
    for name, value in stated.items():
        if name in UNCHANGED_SETTINGS or (value is None and name not in {**SPECIAL_TOKEN_IDS, **UNSET}):
            continue
        if isinstance(own.get(name), PreTrainedConfig):
            of_text = is_text and not NON_TEXT_PARTS.search(name)
            other = {key: one for key, one in _unusual(own[name]).items() if key not in UNCHANGED_SETTINGS}
            small = other | small_settings(own[name], is_text=of_text)
            found[name] = {"model_type": own[name].model_type} | small
        elif name == "per_layer_config":
            found[name] = _per_layer_config(value, kept)
        elif name in lists:
            found[name] = [value[layer] for layer in kept]
        elif LAYER_COUNTS.match(name) and isinstance(value, int):
            found[name] = len(kept) if value == length else min(value, LAYERS if is_text else 1)
        else:
            small = small_value(name, value)
            if small is not value:
                found[name] = small
    if LATENT in stated and found.get("num_key_value_heads"):
        found["num_key_value_heads"] = found["num_attention_heads"]
    _fit_rope(config, found, is_text=is_text)
    if is_text and "sliding_window" in stated:
        _mix_windows(config, found)
    return found


def _mix_windows(config: PreTrainedConfig, found: dict[str, Any]) -> None:
    """Use layers with and without a window if a class supports both and its defaults have only one kind."""
    kinds: Sequence[str] = found.get("layer_types") or []
    if len(set(kinds)) != 1 or kinds[0] not in (FULL, SLIDING) or not _has_windows(type(config)):
        return
    found["layer_types"] = [SLIDING if layer % 2 else FULL for layer in range(len(kinds))]
    rope = found.get("rope_parameters") or {}
    if FULL in rope:
        rope.setdefault(SLIDING, rope[FULL])


def without_windows(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings without sliding windows, so that a model attends to all positions."""
    found = dict(settings)
    for name, value in settings.items():
        if isinstance(value, dict) and name.endswith("_config"):
            found[name] = without_windows(value)
        elif name in ("sliding_window", "use_sliding_window"):
            found[name] = None if name == "sliding_window" else False
        elif name == "layer_types":
            found[name] = [FULL if kind == SLIDING else kind for kind in value]
    return found


def _has_windows(made: type[PreTrainedConfig]) -> bool:
    """Return True if the models of a configuration support layers with a window."""
    file = Path(inspect.getfile(made))
    models = file.with_name(file.name.replace("configuration_", "modeling_"))
    return models.exists() and f'"{SLIDING}"' in models.read_text(encoding="utf-8")


def _unusual(part: PreTrainedConfig) -> dict[str, Any]:
    """Return the values of a part that differ from its class's defaults."""
    try:
        usual = type(part)().to_dict()
    except Exception:  # the class has no defaults
        return {}
    plain = int | float | str | bool
    return {
        name: value
        for name, value in part.to_dict().items()
        if isinstance(value, plain) and name in usual and usual[name] != value and not name.startswith("_")
    }


def small_value(name: str, value: Any) -> Any:
    """Return a small value for an attribute, or the value itself if it is small enough."""
    if name in SPECIAL_TOKEN_IDS:
        return SPECIAL_TOKEN_IDS[name]
    for fixed in (LIVELY, SWITCHES):
        if name in fixed:
            return fixed[name]
    if TOKEN_ID.search(name):
        return FIRST_SPECIAL_TOKEN_ID + value if isinstance(value, int) and value < VOCABULARY else value
    if value is None:
        return UNSET[name]
    if isinstance(value, list | tuple) and all(type(one) is int for one in value):
        small = [small_value(name, one) for one in value]
        return value if small == list(value) else small
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    limit = next((limit for pattern, limit in RULES if re.search(pattern, name)), None)
    return value if limit is None or value <= limit else limit


def _per_layer(stated: dict[str, Any]) -> tuple[dict[str, Sequence[Any]], int]:
    """Return the lists with an entry per layer, and the number of layers."""
    number = next((value for name, value in stated.items() if LAYER_COUNTS.match(name) and isinstance(value, int)), 0)
    number = number or len(stated.get("layers_block_type") or ())
    lists: dict[str, Sequence[Any]] = {
        name: value
        for name, value in stated.items()
        if isinstance(value, list | tuple) and len(value) == number > 3 and name not in UNCHANGED_SETTINGS
    }
    if of_layers := stated.get("per_layer_config"):
        lists["per_layer_config"] = [of_layers.get(layer, of_layers.get(str(layer))) for layer in range(number)]
    return lists, number if lists else 0


def _per_layer_config(of_layers: dict[Any, dict[str, Any]], kept: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Return the overrides of the layers that are kept."""
    found = {}
    for place, layer in enumerate(kept):
        if overrides := of_layers.get(layer, of_layers.get(str(layer))):
            found[place] = {name: small_value(name, value) for name, value in overrides.items()}
    return found


def _kept_layers(kinds: Sequence[tuple[Any, ...]], *, is_text: bool) -> list[int]:
    """Return the layers of a small model: the first of each kind, and more if there are few kinds."""
    first: dict[str, int] = {}
    for layer, kind in enumerate(kinds):
        first.setdefault(repr(kind), layer)
    kept = list(first.values())[:MAX_LAYERS]
    more = (layer for layer in range(len(kinds)) if layer not in kept)
    return sorted([*kept, *(next(more) for _ in range((LAYERS if is_text else 1) - len(kept)))])


def _fit_rope(config: PreTrainedConfig, found: dict[str, Any], *, is_text: bool) -> None:
    """Adapt sections and factors of rotary embeddings to small heads."""
    rope = config.to_dict().get("rope_parameters")
    if not isinstance(rope, dict) or not rope:
        return
    if is_text and SECTIONS in (config.ignore_keys_at_rope_validation or ()) and "rope_type" in rope:
        rope = {SECTIONS: [16, 24, 24]} | rope
    head = found.get("qk_rope_head_dim") or found.get("head_dim") or HEAD
    fitted = _rope_of(rope, head)
    found["rope_parameters"] = {
        name: _rope_of(value, head) if isinstance(value, dict) else value for name, value in fitted.items()
    }


def _rope_of(rope: dict[str, Any], head: int) -> dict[str, Any]:
    half = max(1, int(head * (rope.get("partial_rotary_factor") or 1.0)) // 2)
    fitted = dict(rope)
    if sections := rope.get(SECTIONS):
        fitted[SECTIONS] = sections_of(sections, half)
    for name in ("short_factor", "long_factor"):
        if name in rope:
            fitted[name] = rope[name][:half]
    if "original_max_position_embeddings" in rope:
        fitted["original_max_position_embeddings"] = min(rope["original_max_position_embeddings"], 512)
    return fitted


def sections_of(sections: Sequence[int], half: int) -> list[int]:
    """Scale sections to the sum ``half``, in roughly the same proportion."""
    scaled = [size * half // sum(sections) for size in sections]
    scaled[0] += half - sum(scaled)
    return scaled
