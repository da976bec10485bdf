"""What rules out ``--activations int8``, as far as options, the header of a file and the configuration show it.

So it is refused before weights are read. The proof of compiled code comes after that, and can rule it out as well.
"""

from __future__ import annotations

from typing import Any

from hdtool.data.errors import OptionError
from hdtool.data.gguf_header import GGUFHeader
from hdtool.runtime.config import ModelConfig
from hdtool.runtime.config.model import BLOCKS
from hdtool.runtime.engines.cpu.outline import may_be_compiled
from hdtool.runtime.model.gguf.converted import stays_packed
from hdtool.runtime.model.gguf.slow_weights import slow_weights
from hdtool.runtime.model.gguf.which_file import gguf_file
from hdtool.runtime.model.mxfp4 import MXFP4
from hdtool.runtime.model.quantization import LIBRARIES, library_of

NO_INT8 = (
    "--activations int8 needs a GGUF file with packed weights, --quantization q8_0 or q4_0, or weights of torchao, on "
    "a CPU, with layers that hdtool computes in compiled code (of a known family, without --no-fused-layers, "
    "--attn-implementation or another --dtype): leave it out"
)
TORCHAO = "torchao"


def refuse_by_file(config: ModelConfig) -> None:
    """Raise for options, and for a GGUF file by its header."""
    if not config.fused_layers or config.attn_implementation or config.dtype != "auto":
        raise OptionError(NO_INT8)
    if config.quantization in LIBRARIES and LIBRARIES[config.quantization] != TORCHAO:
        raise OptionError(NO_INT8)
    if config.quantization is None and (file := gguf_file(config)) and not stays_packed(file):
        why = slow_weights(GGUFHeader.read(file)) or "they are not quantized"
        raise OptionError(
            f"--activations int8 multiplies by weights in blocks, and {config.name} has none that it takes: {why}; "
            "leave it out, or take --quantization q8_0"
        )


def refuse_by_settings(config: ModelConfig, settings: Any) -> None:
    """Raise for a model by its configuration."""
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
