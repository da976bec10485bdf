"""Weights of checkpoints in safetensors files, single or sharded, as transformers names and joins them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping

from hdtool.runtime.kernels.compact_weight import CompactWeight
from hdtool.runtime.kernels.packed_matrix import packed_mxfp4, packs_mxfp4
from hdtool.runtime.model.quantization import MXFP4, library_of
from hdtool.runtime.weights.checkpoint_identity import ADAPTER_FILE
from hdtool.runtime.weights.hub import weight_files
from hdtool.runtime.weights.stored_pieces import Piece, tensors_of
from hdtool.runtime.weights.transformers_names import stored_weights
from hdtool.runtime.weights.weight_store import StoredWeight, WeightStore


def safetensors_store(folder: Path, settings: Any, model: Any) -> WeightStore | None:
    """Return the weights of a checkpoint for the parameters of ``model``, which may be on the meta device.

    Return None if weight files are missing or of another kind, or if the checkpoint has adapters.
    """
    files = weight_files(folder)
    if not files or any(file.suffix != ".safetensors" for file in files) or (folder / ADAPTER_FILE).is_file():
        return None
    pieces = {name: piece for file in files for name, piece in tensors_of(file)}
    experts = _mxfp4_experts(pieces, model) if library_of(settings) == MXFP4 else {}
    return WeightStore({**stored_weights(get_model_conversion_mapping(model), pieces, model), **experts}, folder)


def _mxfp4_experts(pieces: Mapping[str, Piece], model: Any) -> dict[str, StoredWeight]:
    """Return the experts whose MXFP4 blocks and scales are stored as tensors, in a layout that matmuls read."""
    weights = {}
    for name, parameter in model.state_dict().items():
        blocks, scales = (pieces.get(f"{name}_{part}") for part in ("blocks", "scales"))
        if blocks and scales and packs_mxfp4(blocks.shape, scales.shape, parameter.shape):
            weights[name] = StoredWeight((blocks, scales), tuple(parameter.shape), make=_packed_experts)
    return weights


def _packed_experts(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return CompactWeight(packed_mxfp4(*parts))
