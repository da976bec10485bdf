"""Models of known shapes with random weights, and estimates of their passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
)

from hdtool.builders.evaluation.estimated_passes import PassReads, Roofline
from hdtool.data.errors import ModelError, OptionError, did_you_mean
from hdtool.runtime.budget.cost_curve import CostCurve
from hdtool.runtime.budget.measure_passes import lengths_within
from hdtool.runtime.kernels.linear_layers import compile_linear_layers
from hdtool.runtime.kernels.machine_name import dtype_name
from hdtool.runtime.model.devices import use_planless_attention
from hdtool.runtime.model.refusals import refuse_by_configuration
from hdtool.runtime.settings.measuring import SHAPES, CostConfig
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.target.load import Loaded, load_tokenizer, pick_device, pick_dtype
from hdtool.runtime.target.target import Target

SHAPE_SEED = 0


def load_shape(shape: str, config: ModelConfig) -> Loaded:
    """Create a model with random weights, given the name of a known shape or the path of a configuration.

    The tokenizer is that of the model which ``config`` names; a smaller vocabulary of the shape is enlarged to fit it.
    Raise an OptionError for an unknown shape or a quantization, and a ModelError if the model cannot be created.
    """
    tokenizer = load_tokenizer(config)
    if config.quantization:
        raise OptionError(
            f"--quantization {config.quantization} has no effect on a shape, whose weights are random: leave it out"
        )
    settings = shape_config(shape)
    refuse_by_configuration(settings)
    text = settings.get_text_config(decoder=True)
    if text.vocab_size < len(tokenizer):
        text.vocab_size = len(tokenizer)
    device = pick_device(config.device)
    use_planless_attention(device)
    try:
        dtype = pick_dtype(config.dtype, device)
        torch.manual_seed(SHAPE_SEED)
        with device:  # allocate on the device: a copy would need twice the memory
            model: Any = AutoModelForCausalLM.from_config(
                settings,
                dtype=dtype if isinstance(dtype, torch.dtype) else torch.bfloat16,
                trust_remote_code=False,
            )
        if device.type == "cpu":
            compile_linear_layers(model)
        target = Target(model)
        if device.type == "cpu":
            target.compile()
    except torch.OutOfMemoryError:
        raise ModelError(f"{shape} does not fit into the memory of its device: take a smaller shape or dtype") from None
    return Loaded(f"{shape}, random weights", target, tokenizer)


def estimated_passes(shape: str, config: ModelConfig, costs: CostConfig) -> CostCurve:
    """Estimate a shape's cost curve without allocating weights; raise an OptionError if ``config`` quantizes.

    The shape is the name of a known one or the path of a configuration, as for ``load_shape``.
    """
    assert costs.bandwidth
    if config.quantization:
        raise OptionError(f"--quantization {config.quantization} has no effect on an estimate: leave it out")
    settings = shape_config(shape)
    refuse_by_configuration(settings)
    limit = getattr(settings.get_text_config(decoder=True), "max_position_embeddings", None)
    lengths = lengths_within(lambda length: limit, shape, costs)
    dtype = torch.bfloat16 if config.dtype == "auto" else getattr(torch, config.dtype)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings, dtype=dtype, trust_remote_code=False)
    roofline = Roofline(costs.bandwidth * 1e9, costs.teraflops * 1e12 if costs.teraflops else None)
    return roofline.curve(PassReads.of(model), lengths, costs.overlap, model=shape, dtype=dtype_name(dtype))


def shape_config(shape: str) -> Any:
    if shape in SHAPES:
        return LlamaConfig(**SHAPES[shape], bos_token_id=1, eos_token_id=2, pad_token_id=0)
    path = Path(shape).expanduser()
    if not path.exists():
        meant, shapes = did_you_mean(shape, SHAPES), ", ".join(SHAPES)
        raise OptionError(f"shape is {shape!r}{meant}: it must be one of {shapes}, or the path of a config.json")
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{shape} is no configuration of a model ({reason}): name a config.json") from None


def weight_bytes_read(target: Target) -> int:
    """Return how many bytes of weights a pass over one token reads, excluding unused embeddings and experts."""
    return round(PassReads.of(target.model).weights(1))
