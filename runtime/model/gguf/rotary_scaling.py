"""Scaled rotary positions, which transformers does not read from a GGUF file: those of Llama 3 are restored."""

from __future__ import annotations

import math
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from hdtool.data.gguf_header import GGUFHeader

FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
FLOAT32 = 0
LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The values of all Llama models since 3.1; only the factor differs."""
READ = "gpt-oss"
"""The architecture whose scaling transformers reads."""


def restore_scaling(settings: Any, file: Path, header: GGUFHeader) -> None:
    """Add the scaling of Llama 3 to a configuration; print a note for a scaling of another kind.

    The file has no settings for it, but a tensor with the divisor of each frequency.
    """
    scaling = header.values.get(f"{header.architecture}.rope.scaling.type", "none")
    found = [tensor for tensor in header.tensors if tensor.name in FACTORS]
    if header.architecture == READ or (not found and scaling == "none"):
        return
    rope = dict(getattr(settings, "rope_parameters", None) or {})
    if scaling == "none" and [one.name for one in found] == [FACTORS[0]] and found[0].kind == FLOAT32:
        divisors = np.fromfile(file, "<f4", found[0].numbers, offset=header.data + found[0].offset)
        factor = round(float(divisors.max(initial=1)), 3)
        if rope.get("rope_type") == "default" and _are_of_llama_3(divisors, rope["rope_theta"], factor):
            settings.rope_parameters = {**rope, **LLAMA_3, "rope_type": "llama3", "factor": factor}
            return
    what = found[0].name if found else f"of type {scaling}"
    print(
        f"note: {file} scales its rotary positions ({what}), which transformers {metadata.version('transformers')} "
        "does not read: answers differ from those of the original model",
        file=sys.stderr,
    )


def _are_of_llama_3(divisors: np.ndarray[Any, np.dtype[np.float32]], theta: float, factor: float) -> bool:
    """Whether these divide the frequencies as Llama 3 does with this factor: low ones, and those between by a part."""
    wavelengths = 2 * math.pi * theta ** (np.arange(len(divisors)) / len(divisors))
    low, high = LLAMA_3["low_freq_factor"], LLAMA_3["high_freq_factor"]
    share = (LLAMA_3["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    share = np.clip(share, 0, 1)
    return bool(np.allclose(divisors, 1 / ((1 - share) / factor + share), rtol=1e-3))
