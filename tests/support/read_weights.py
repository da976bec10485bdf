"""Weights as transformers loads them, and their differences from those that hdtool reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, GgufConfig, PreTrainedModel

from hdtool.runtime.model.transformers_internals import text_class
from hdtool.runtime.weights.weight_store import WeightStore


class UnreadableError(Exception):
    """Raised when transformers misses weights in a checkpoint, or has some left over."""


def loaded_by_library(path: Path, settings: Any = None) -> PreTrainedModel:
    """Load a checkpoint's folder, or a GGUF file, in float32 with transformers."""
    options: dict[str, Any] = {}
    if path.suffix == ".gguf":
        options = {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}
    folder = path.parent if path.is_file() else path
    settings = settings or AutoConfig.from_pretrained(folder)
    model, report = cast(
        tuple[PreTrainedModel, dict[str, Any]],
        text_class(settings, trust_remote_code=False).from_pretrained(
            folder, config=settings, dtype=torch.float32, output_loading_info=True, **options
        ),
    )
    if any(report.values()):
        raise UnreadableError(", ".join(f"{what}: {names}" for what, names in report.items() if names))
    return model


def store_differences(store: WeightStore, expected: PreTrainedModel) -> list[str]:
    """Return a line for each weight that a store lacks, has in addition, or reads as other bits."""

    def read(name: str) -> torch.Tensor:
        numbers = store.numbers(name)
        return numbers.float() if numbers.is_floating_point() else numbers

    return differences(read, store, expected)


def differences(
    read: Callable[[str], torch.Tensor], names_read: Collection[str], expected: PreTrainedModel
) -> list[str]:
    """Return a line for each weight that is lacking, isn't the model's, or has other bits; ``read`` reads a weight."""
    weights = expected.state_dict()
    found = [f"{name}: no parameter of the model" for name in names_read if name not in weights]
    tied: dict[tuple[int, torch.Size], list[str]] = defaultdict(list)
    for name, weight in weights.items():
        if weight.numel():
            tied[weight.data_ptr(), weight.shape].append(name)
    for names in tied.values():
        stored = [name for name in names if name in names_read]
        found += [] if stored else [f"{names[0]}: missing"]
        found += [f"{name}: {line}" for name in stored if (line := _difference(read, name, weights[name]))]
    return found


def _difference(read: Callable[[str], torch.Tensor], name: str, expected: torch.Tensor) -> str:
    try:
        weight = read(name)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if weight.shape != expected.shape:
        return f"has shape {tuple(weight.shape)}, not {tuple(expected.shape)}"
    if not expected.is_floating_point():
        return "" if torch.equal(weight, expected) else "differs"
    assert expected.dtype == torch.float32, name
    bits, others = (numbers.contiguous().view(torch.int32) for numbers in (weight.float(), expected))
    if wrong := int((bits != others).sum()):
        furthest = float((weight.float() - expected).abs().max())
        return f"{wrong} of {expected.numel()} numbers differ, by at most {furthest:.3g}"
    return ""
