"""Models of real sizes with random weights: the cost of a pass does not depend on their values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from hdtool.data.errors import ModelError, OptionError
from hdtool.runtime.config import SHAPES, ModelConfig
from hdtool.runtime.engines.cpu.proof import compile_cpu
from hdtool.runtime.kernels.linear import compile_linear_layers
from hdtool.runtime.model.families import refuse_by_configuration
from hdtool.runtime.model.load import Loaded, load_tokenizer, pick_device, pick_dtype
from hdtool.runtime.model.placement import use_planless_attention
from hdtool.runtime.model.target import Target

SEED = 0


def load_shape(shape: str, config: ModelConfig) -> Loaded:
    """A model of a known shape, or of a configuration on disk, with the tokenizer of the model in ``config``."""
    tokenizer = load_tokenizer(config)
    if config.quantization:
        raise OptionError(
            f"--quantization {config.quantization} has no effect on a shape, whose weights are random: leave it out"
        )
    settings = _settings(shape)
    refuse_by_configuration(settings)
    text = settings.get_text_config(decoder=True)
    if text.vocab_size < len(tokenizer):
        text.vocab_size = len(tokenizer)
    device = pick_device(config.device)
    use_planless_attention(device)
    try:
        dtype = pick_dtype(config.dtype, device)
        torch.manual_seed(SEED)
        with device:  # made in place: a copy would need twice the memory
            model: Any = AutoModelForCausalLM.from_config(
                settings, dtype=dtype if isinstance(dtype, torch.dtype) else torch.bfloat16
            )
        if device.type == "cpu":
            compile_linear_layers(model)
        target = Target(model)
        if device.type == "cpu":
            target.compiled = compile_cpu(target)
    except torch.OutOfMemoryError:
        raise ModelError(f"{shape} does not fit into the memory of its device: take a smaller shape or dtype") from None
    return Loaded(f"{shape}, random weights", target, tokenizer)


def _settings(shape: str) -> Any:
    if shape in SHAPES:
        return LlamaConfig(**SHAPES[shape], bos_token_id=1, eos_token_id=2, pad_token_id=0)
    path = Path(shape).expanduser()
    if not path.exists():
        raise OptionError(f"shape is {shape!r}: it must be one of {', '.join(SHAPES)}, or the path of a config.json")
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{shape} is no configuration of a model ({reason}): name a config.json") from None


def weights_read(target: Target) -> int:
    """Bytes of weights that a pass over one token reads: all but the embeddings of other tokens."""
    model: Any = target.model
    whole = sum(int(weight.nbytes) for weight in model.parameters())
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    return whole if head is not None and head.weight is table else whole - int(table.nbytes)
