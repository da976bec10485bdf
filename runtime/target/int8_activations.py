"""Refuses ``--activations int8`` before weights are read, if other options, a GGUF file or the model rule it out.

The later proof of compiled passes may also rule it out.
"""

from __future__ import annotations

from typing import Any

from hdtool.data.errors import OptionError
from hdtool.runtime.model.quantization import LIBRARIES, MXFP4, TORCHAO, library_of
from hdtool.runtime.settings.model import BLOCKS, ModelConfig
from hdtool.runtime.weights.gguf_file import GGUFFile, gguf_file

NO_INT8 = (
    "--activations int8 needs a GGUF file with packed weights, --quantization q8_0 or q4_0, or weights of torchao, on "
    "a CPU, with layers that hdtool computes in compiled code (of a known family, without --no-fused-layers, "
    "--attn-implementation or another --dtype): leave it out"
)


def refuse_by_file(config: ModelConfig) -> None:
    """Raise an ``OptionError`` if options or the GGUF file's header rule out int8 activations."""
    from hdtool.runtime.weights.gguf_formats import slow_weights, stays_packed

    if not config.fused_layers or config.attn_implementation or config.dtype != "auto":
        raise OptionError(NO_INT8)
    if config.quantization in LIBRARIES and LIBRARIES[config.quantization] != TORCHAO:
        raise OptionError(NO_INT8)
    path = None if config.quantization else gguf_file(config)
    if path and not any(map(stays_packed, (file := GGUFFile.open(path)).tensors.values())):
        raise OptionError(
            f"--activations int8 multiplies by weights in blocks, and {config.name} has none that it takes: "
            f"{slow_weights(file) or 'they are not quantized'}; leave it out, or take --quantization q8_0"
        )


def refuse_by_settings(config: ModelConfig, settings: Any) -> None:
    """Raise an ``OptionError`` unless the model's weights are quantized and its layers may be compiled."""
    from hdtool.runtime.engines.cpu.compiled_support import may_be_compiled

    packed = config.quantization or gguf_file(config) or library_of(settings) in (TORCHAO, MXFP4)
    if not packed:
        raise OptionError(
            f"--activations int8 multiplies by quantized weights, and {config.name} has none: take "
            f"--quantization {BLOCKS[0]}, or leave it out"
        )
    if not may_be_compiled(settings):
        raise OptionError(
            f"--activations int8 needs layers that hdtool computes in compiled code, and {config.name}, of type "
            f"{settings.model_type}, has others: leave it out"
        )
