"""Checkpoints with weights packed by compressed-tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

GROUP = 16
"""Number of columns that share a scale in schemes with groups."""
SCHEMES = ("W4A16", "W8A8")
"""4-bit weights with 16-bit inputs, and 8-bit weights with 8-bit inputs."""


def save_compressed(model: PreTrainedModel, scheme: str, folder: Path) -> None:
    """Quantize the layers of a model by rounding to nearest, and save the checkpoint."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        QuantizationStatus,
        apply_quantization_config,
        preset_name_to_scheme,
    )

    chosen = preset_name_to_scheme(scheme, ["Linear"])
    if chosen.weights.group_size:
        chosen.weights.group_size = GROUP
    apply_quantization_config(model, QuantizationConfig(config_groups={"group": chosen}, ignore=["lm_head"]))
    highest = 2 ** (chosen.weights.num_bits - 1) - 1
    layers: Any = [layer for layer in model.modules() if hasattr(layer, "quantization_scheme")]
    for layer in layers:
        group = chosen.weights.group_size or layer.weight.shape[1]
        largest = layer.weight.detach().view(len(layer.weight), -1, group).abs().amax(-1)
        layer.weight_scale.data.copy_((largest / highest).view_as(layer.weight_scale))
        layer.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
