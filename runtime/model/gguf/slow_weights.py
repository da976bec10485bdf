"""Which weights of a GGUF file are not computed with as they are: they become float32, which is slower and larger."""

from __future__ import annotations

from collections import Counter

from hdtool.data.gguf_header import GGUFHeader, GGUFTensor
from hdtool.runtime.kernels.packed.formats import FORMATS
from hdtool.runtime.kernels.vector_code import EXPANDS_FLOAT16
from hdtool.runtime.model.gguf.convert import PLAIN
from hdtool.runtime.model.gguf.packing import packable

NAMES = {
    10: "Q2_K",
    11: "Q3_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
}
"""Formats that transformers reads and no product takes, by their number in a file."""


def slow_weights(header: GGUFHeader) -> str | None:
    """How many matrices of a file are computed in float32 though they are quantized, and why; None if none are."""
    matrices = [tensor for tensor in header.tensors if len(tensor.shape) > 1]
    packed = {tensor.offset for tensor in packable(header)}
    slow = [one for one in matrices if one.kind not in PLAIN and header.data + one.offset not in packed]
    if not slow:
        return None
    reasons = ", ".join(f"{count} {reason}" for reason, count in Counter(map(_reason, slow)).most_common())
    return f"{len(slow)} of {len(matrices)} weights are computed in float32, slower and larger ({reasons})"


def _reason(tensor: GGUFTensor) -> str:
    if tensor.kind not in FORMATS:
        return f"in {NAMES.get(tensor.kind, f'format {tensor.kind}')}"
    name = FORMATS[tensor.kind].name
    if not EXPANDS_FLOAT16:
        return f"in {name} on a processor that cannot convert float16"
    if len(tensor.shape) > 2:
        return f"in {name} of experts"
    return f"in {name} with {tensor.shape[-1]} columns"
