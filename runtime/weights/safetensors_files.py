"""Weights of checkpoints in safetensors files, single or sharded, as transformers names and joins them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hdtool.data.errors import ModelError
from hdtool.runtime.kernels.compact_weight import CompactWeight
from hdtool.runtime.kernels.packed_matrix import packed_mxfp4, packs_mxfp4
from hdtool.runtime.model.hub import MAX_HEADER_SIZE, weight_files
from hdtool.runtime.model.quantization import MXFP4, library_of
from hdtool.runtime.weights.library_names import model_transforms, stored_weights
from hdtool.runtime.weights.store import Piece, StoredWeight, WeightStore


def safetensors_store(folder: Path, settings: Any, model: Any) -> WeightStore | None:
    """Return the weights of a checkpoint for the parameters of ``model``, which may be empty.

    Return None if they lie in files of another kind, or if adapters are added to them.
    """
    files = weight_files(folder)
    if not files or any(file.suffix != ".safetensors" for file in files) or (folder / "adapter_config.json").is_file():
        return None
    pieces = {name: piece for file in files for name, piece in tensors_of(file)}
    experts = _mxfp4_experts(pieces, model) if library_of(settings) == MXFP4 else {}
    return WeightStore({**stored_weights(model_transforms(model), pieces, model), **experts}, folder)


def _mxfp4_experts(pieces: Mapping[str, Piece], model: Any) -> dict[str, StoredWeight]:
    """Return the experts whose MXFP4 blocks and scales are stored as tensors, and in a layout that matmuls read."""
    weights = {}
    for name, parameter in model.state_dict().items():
        blocks, scales = (pieces.get(f"{name}_{part}") for part in ("blocks", "scales"))
        if blocks and scales and packs_mxfp4(blocks.shape, scales.shape, parameter.shape):
            weights[name] = StoredWeight((blocks, scales), tuple(parameter.shape), make=_packed_experts)
    return weights


def _packed_experts(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return CompactWeight(packed_mxfp4(*parts))


def tensors_of(file: Path) -> Iterator[tuple[str, Piece]]:
    """Yield the name and place of each tensor in a file; raise a ``ModelError`` if the file is damaged."""
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if size > MAX_HEADER_SIZE:
                raise ValueError("its header is too large")
            header, whole = json.loads(stream.read(size)), file.stat().st_size
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                if not 0 <= start <= end <= whole - size - 8:
                    raise ValueError("it ends too early")
                yield name, Piece(file, 8 + size + start, end - start, tuple(entry["shape"]), str(entry["dtype"]))
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ModelError(f"{file} is no whole safetensors file (its header is damaged): get it again") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{file} is no whole safetensors file ({error}): get it again") from None
