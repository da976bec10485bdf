"""Loads a model whose weights stay in the blocks of its GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig

from hdtool.data.errors import ModelError
from hdtool.runtime.model.gguf.packing import read_weights


def packed_model(settings: Any, file: Path, folder: Path, **options: Any) -> Any:
    """The model in float32 on the CPU; ``folder`` has what the file was converted to."""
    weights = read_weights(file, folder)
    family: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)]
    model, report = cast(
        tuple[Any, dict[str, Any]],
        family.from_pretrained(
            None, config=settings, state_dict=weights, dtype=torch.float32, output_loading_info=True, **options
        ),
    )
    if lacking := sorted(report["missing_keys"]):
        raise ModelError(f"{folder} lacks {len(lacking)} of its weights ({lacking[0]}, …): remove it")
    model.name_or_path = model.config.name_or_path = str(folder)
    model.generation_config = GenerationConfig.from_pretrained(folder)
    return model
