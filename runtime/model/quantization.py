"""How weights are or become quantised, and the libraries that this takes."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from hdtool.data.errors import ModelError, OptionError

if TYPE_CHECKING:
    from transformers.utils.quantization_config import QuantizationConfigMixin

LIBRARIES = {"int8": "torchao", "nf4": "bitsandbytes"}
"""Those that quantise on loading; checkpoints name theirs."""


def library_of(settings: Any) -> str:
    """What the weights of a checkpoint were quantised with, by its configuration; nothing if they were not."""
    for part in (settings, settings.get_text_config(decoder=True)):
        told: Any = getattr(part, "quantization_config", None)
        if told is not None:
            told = told if isinstance(told, dict) else told.to_dict()
            method = told.get("quant_method") or "bitsandbytes"  # old ones say load_in_8bit alone
            return str(getattr(method, "value", method))
    return ""


def require_libraries(name: str, settings: Any, quantise: str | None) -> None:
    """Refuse what cannot be quantised, or loaded as it is quantised, before anything is read."""
    saved = library_of(settings)
    if quantise and saved:
        raise OptionError(f"quantise is {quantise}, but {name} is quantised already, with {saved}: leave it out")
    library = LIBRARIES[quantise] if quantise else saved
    needed = [library, "accelerate"] if library in LIBRARIES.values() else ["accelerate"]
    if lacking := [each for each in needed if not find_spec(each)]:
        what = f"quantise {quantise}" if quantise else f"{name}, which is quantised with {saved},"
        raise ModelError(f'{what} needs {" and ".join(lacking)}, not installed here: pip install "hdtool[quantised]"')


def quantisation(quantise: str, dtype: torch.dtype) -> QuantizationConfigMixin:
    """As transformers takes it: weights alone, which leaves each row of a pass to itself."""
    from transformers import BitsAndBytesConfig, TorchAoConfig

    if quantise == "nf4":
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())
