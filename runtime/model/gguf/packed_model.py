"""Makes a model of weights that stay in blocks, of its GGUF file or of a quantized checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch.nn import Parameter
from transformers import GenerationConfig

from hdtool.data.errors import ModelError
from hdtool.runtime.kernels.compact_weight import as_parameter, is_compact
from hdtool.runtime.model.library import text_class


def packed_model(settings: Any, weights: dict[str, torch.Tensor], folder: Path, **options: Any) -> Any:
    """The model in float32 on the CPU with these weights; ``folder`` is what it was converted to."""
    family: Any = text_class(settings, trust_remote_code=False)._model_mapping[type(settings)]
    model, report = cast(
        tuple[Any, dict[str, Any]],
        family.from_pretrained(
            None, config=settings, state_dict=weights, dtype=torch.float32, output_loading_info=True, **options
        ),
    )
    if lacking := sorted(report["missing_keys"]):
        raise ModelError(f"{folder} lacks {len(lacking)} of its weights ({lacking[0]}, …): remove it")
    _name(model, folder)
    return model


def assembled_model(settings: Any, weights: dict[str, torch.Tensor], folder: Path, **options: Any) -> Any:
    """The model without the loader of transformers, which takes longer than the rest of a start.

    Names and forms of the weights are not checked: compare its outline with that of ``packed_model``.
    """
    from accelerate import init_empty_weights
    from transformers.initialization import no_init_weights

    with init_empty_weights(include_buffers=False), no_init_weights():
        auto = text_class(settings, trust_remote_code=False)
        model: Any = auto.from_config(settings, dtype=torch.float32, **options)
    for name, weight in weights.items():
        path, _, last = name.rpartition(".")
        made = as_parameter(weight) if is_compact(weight) else Parameter(weight, requires_grad=False)
        model.get_submodule(path)._parameters[last] = made
    model.tie_weights()
    model.eval()
    _name(model, folder)
    return model


def _name(model: Any, folder: Path) -> None:
    model.name_or_path = model.config.name_or_path = str(folder)
    model.generation_config = GenerationConfig.from_pretrained(folder)
