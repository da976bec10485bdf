"""Tiny random checkpoints with multi-token-prediction layers, named as in the published checkpoints of each type."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from hdtool.runtime.drafters.trained.mtp import WithMtpLayers
from tests.sweep.models import tiny_model

TYPES = (
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "deepseek_v3",
    "glm4_moe",
    "exaone_moe",
    "olmo_hybrid",
    "mellum",
    "bailing_hybrid",
    "step3p7",
    "deepseek_v32",
    "hy_v3",
    "ernie4_5_moe",
    "longcat_flash",
)
"""Types whose published checkpoints have MTP layers, or whose classes in transformers expect them."""
WITH_STATES = "inkling_text"
"""Type whose layers keep convolution states."""
PARTS = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}
"""Names of the parts around a single MTP layer in Qwen's checkpoints, by their names in transformers."""
OUTER = {"post_norm": "shared_head.norm."}
"""Names in checkpoints whose MTP layers follow the model's layers, where they differ from transformers' names."""


def with_mtp(kind: str, folder: Path, number: int = 1) -> PreTrainedModel:
    """Load a model from a new checkpoint with ``number`` MTP layers."""
    model = tiny_model(kind)
    text: Any = model.config.get_text_config(decoder=True)
    if hasattr(text, "num_mtp_layers"):
        text.num_mtp_layers = number
    model.save_pretrained(folder)
    torch.manual_seed(number)
    told: Any = WithMtpLayers(model, number)
    layers: Any = MtpModel(told, number)
    with torch.no_grad():
        for parameter in layers.layers.parameters():
            parameter.copy_(
                torch.randn_like(parameter) * 0.2 if parameter.dim() > 1 else 1 + 0.1 * torch.randn_like(parameter)
            )
    add_layers(folder, model, layers)
    loaded: PreTrainedModel = type(model).from_pretrained(folder)
    loaded.eval()
    loaded.generation_config.eos_token_id = None
    loaded.generation_config.pad_token_id = 0
    return loaded


def add_layers(folder: Path, model: Any, layers: Any) -> None:
    """Add MTP layers of transformers to a model's checkpoint."""
    own = {name: tensor for name, tensor in layers.state_dict().items() if name.startswith("layers.")}
    tensors = load_file(folder / "model.safetensors")
    tensors |= {_stored_as(name, model): tensor.contiguous() for name, tensor in own.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _stored_as(name: str, model: Any) -> str:
    """Return the checkpoint's name for a tensor of transformers' MTP layers."""
    _, layer, part, rest = name.split(".", 3)
    patterns = model._keys_to_ignore_on_load_unexpected or ()
    if any(re.search(pattern, "mtp.layers.0.x") for pattern in patterns):
        return f"mtp.{PARTS[part]}.{rest}" if part in PARTS else f"mtp.layers.{layer}.{rest}"
    prefix = f"model.layers.{model.config.get_text_config(decoder=True).num_hidden_layers + int(layer)}"
    return f"{prefix}.{OUTER.get(part, part + '.') if part in PARTS else ''}{rest}"
