"""Quantization of weights: the scheme of a checkpoint or of loading, and the libraries it needs."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from hdtool.data.errors import ModelError, OptionError
from hdtool.data.extras import install_command

if TYPE_CHECKING:
    from transformers.utils.quantization_config import QuantizationConfigMixin

LIBRARIES = {"int8": "torchao", "nf4": "bitsandbytes"}
"""Libraries for quantization on loading; checkpoints name their own."""
MODULES = {"torchao": "torchao", "bitsandbytes": "bitsandbytes", "compressed-tensors": "compressed_tensors"}
"""What to import of the libraries that are known to work."""


def library_of(settings: Any) -> str:
    """The library that quantized a checkpoint, from its configuration; empty if none did."""
    for part in (settings, settings.get_text_config(decoder=True)):
        found: Any = getattr(part, "quantization_config", None)
        if found is not None:
            found = found if isinstance(found, dict) else found.to_dict()
            method = found.get("quant_method") or "bitsandbytes"  # old ones say load_in_8bit alone
            return str(getattr(method, "value", method))
    return ""


def require_libraries(name: str, settings: Any, scheme: str | None) -> None:
    """Raise if a quantization cannot be applied or loaded, before weights are read."""
    saved = library_of(settings)
    if scheme and saved:
        raise OptionError(f"{name} is quantized already, with {saved}: leave out --quantization {scheme}")
    library = LIBRARIES[scheme] if scheme else saved
    needed = [library, "accelerate"] if library in MODULES else ["accelerate"]
    if lacking := [each for each in needed if not find_spec(MODULES.get(each, each))]:
        what = f"--quantization {scheme}" if scheme else f"{name}, which is quantized with {saved},"
        raise ModelError(f"{what} needs {' and '.join(lacking)}, not installed here: {install_command('quantized')}")


def quantization(scheme: str, dtype: torch.dtype) -> QuantizationConfigMixin:
    """The configuration for transformers: weight-only schemes, which keep the rows of a pass independent."""
    from transformers import BitsAndBytesConfig, TorchAoConfig

    if scheme == "nf4":
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())
