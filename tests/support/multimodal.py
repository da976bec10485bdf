"""Tiny random multimodal models, which the tests prompt with text only."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from tests.support.families import SHAPE, WINDOW

VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_heads": 4,
    "depth": 1,
    "embed_dim": 32,
    "out_hidden_size": 32,
    "patch_size": 4,
    "image_size": 16,
}
IMAGE = 95
"""Token that stands for an image."""
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
LAYERS = ["sliding_attention", "full_attention"]
TEXT: dict[str, dict[str, Any]] = {
    "llava": {"model_type": "llama"},
    "mistral3": {"model_type": "mistral"},
    "qwen2_5_vl": {"rope_parameters": SECTIONS},
    "qwen3_vl": {"rope_parameters": {**SECTIONS, "mrope_interleaved": True}},
    "internvl": {"model_type": "qwen2"},
    "gemma3": {"sliding_window": WINDOW, "layer_types": LAYERS},
}
"""Settings of each type's text model, in addition to the common shape."""


@cache
def multimodal_model(kind: str) -> PreTrainedModel:
    """Create a random model of a type, with equal weights in every run and without tokens that end an answer."""
    torch.manual_seed(sum(map(ord, kind)))
    vision = {**VISION, **({"deepstack_visual_indexes": [0]} if kind == "qwen3_vl" else {})}
    if kind == "internvl":
        vision |= {"patch_size": [4, 4], "image_size": [16, 16]}
    config = AutoConfig.for_model(
        kind, text_config={**SHAPE, **TEXT[kind]}, vision_config=vision, image_token_id=IMAGE, tie_word_embeddings=False
    )
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(config).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model
