"""Quantizes each checkpoint once to Q8_0 or Q4_0 blocks, which are kept in hdtool's home.

Only linear layers, experts and embeddings are quantized, not the routers that choose experts. Embeddings and the output
layer use Q8_0 with either scheme, because their error reaches every logit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from hdtool.data.artifact import Artifact, made_once
from hdtool.data.errors import ModelError, require_room
from hdtool.data.gguf_header import GGUF_SUFFIX
from hdtool.data.home import artifacts_at_home
from hdtool.data.notes import note
from hdtool.runtime.kernels.compact_weight import narrowed
from hdtool.runtime.kernels.matmul import COLUMN_MULTIPLE
from hdtool.runtime.kernels.matrix_formats import FORMATS_BY_NAME, BlockFormat
from hdtool.runtime.kernels.mixture_of_experts import WEIGHTS, arrange_experts, matrices_of
from hdtool.runtime.kernels.packed_matrix import Q4_0, Q8_0, quantize_matrix
from hdtool.runtime.model.compact_layers import ParameterRef, is_of_linear_layers, weight_parameters
from hdtool.runtime.weights.damaged_weights import WeightCheck
from hdtool.runtime.weights.file_fingerprint import fingerprint_of
from hdtool.runtime.weights.stored_pieces import tensors_of
from hdtool.runtime.weights.weight_store import StoredWeight, WeightStore

KIND = "quantized"
FORMAT = 3
"""Version of the written files; after an increment, hdtool quantizes all checkpoints again."""
SCHEMES = {"q8_0": Q8_0, "q4_0": Q4_0}
ROUTERS = {"router", "gate"}
"""Names of modules that choose experts."""
BLOCKS, REST = "blocks.safetensors", "rest.safetensors"


def quantized_folder(name: str, scheme: str, files: Sequence[Path], fingerprint: str, load: Callable[[], Any]) -> Path:
    """Return the folder of a checkpoint's weights in quantized blocks, quantizing the checkpoint first if needed.

    ``files`` are all files that the weights depend on, and ``fingerprint`` identifies the checkpoint. ``load`` loads
    the model.
    """

    def make(folder: Path) -> dict[str, Any]:
        quantized = _write(load(), name, scheme, folder)
        return {"fingerprint": fingerprint, "kinds": quantized.kinds, "transposed": quantized.transposed}

    versions = {"transformers": metadata.version("transformers"), "format": FORMAT}
    readable = f"{Path(name).name.removesuffix(GGUF_SUFFIX)}-{scheme}"
    activity = f"quantizing {name} to {SCHEMES[scheme].name} in"
    return made_once(f"{KIND}-{scheme}", readable, versions, files, fingerprint_of(files), activity, make).folder


def quantized_store(folder: Path) -> WeightStore:
    """Return the weights in a folder that ``quantized_folder`` returned; raise a ``ModelError`` if it was changed."""
    try:
        if not (artifact := Artifact.read(folder)):
            raise OSError(0, "its manifest is missing")
        kinds, transposed = artifact.details["kinds"], set(artifact.details["transposed"])
        weights = {name: StoredWeight((piece,), piece.shape) for name, piece in tensors_of(folder / REST)}
        for name, piece in tensors_of(folder / BLOCKS):
            *others, rows, size = piece.shape
            block_format = FORMATS_BY_NAME[kinds[name]]
            columns = size // block_format.bytes * block_format.block_size
            blocks = replace(piece, shape=(*others, rows, columns), format=block_format.name)
            shape = (*others, columns, rows) if name in transposed else blocks.shape
            weights[name] = StoredWeight((blocks,), shape, transposed=name in transposed)
    except (OSError, KeyError) as error:
        raise ModelError(f"{folder} was changed while it was read ({error}): run the command again") from error
    return WeightStore(weights, folder)


def _write(model: Any, name: str, scheme: str, folder: Path) -> _Quantized:
    """Quantize a model, write it to a folder and return it; print a note if some matrices cannot be quantized."""
    quantized = _quantized_weights(model, SCHEMES[scheme], WeightCheck(name))
    if kept := quantized.kept:
        total = len(kept) + len(quantized.kinds)
        note(
            f"{len(kept)} of {total} matrices stay as they are ({kept[0]}): their columns are no multiple of "
            f"{COLUMN_MULTIPLE}, their scales fit no float16, or hdtool does not compute their layers"
        )
    stored = *quantized.blocks.values(), *quantized.rest.values()
    require_room(name, sum(tensor.nbytes for tensor in stored), artifacts_at_home(KIND), "HDTOOL_HOME")
    _save(quantized.blocks, folder / BLOCKS)
    _save(quantized.rest, folder / REST)
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    return quantized


class _Quantized(NamedTuple):
    blocks: dict[str, torch.Tensor]
    """Blocks of each quantized weight, by name: ``[rows, bytes]``, or ``[experts, rows, bytes]``."""
    kinds: dict[str, str]
    """Format of each quantized weight, by name."""
    transposed: list[str]
    rest: dict[str, torch.Tensor]
    """All other weights, by name."""
    kept: list[str]
    """Names of matrices that could not be quantized."""


def _quantized_weights(model: Any, format: BlockFormat, check: WeightCheck) -> _Quantized:
    """Return a model's weights, checked and quantized; each is freed once it is quantized, to save memory."""
    arrange_experts(model)
    tables = {id(layer.weight) for layer in (model.get_input_embeddings(), model.get_output_embeddings()) if layer}
    matrices, fitting = set[int](), set[int]()
    for refs, weight in weight_parameters(model):
        if all(map(_is_of_experts, refs)) or all(map(_is_matrix, refs)):
            matrices.add(id(weight))
            if is_of_linear_layers(refs):
                fitting.add(id(weight))
    quantized, seen = _Quantized({}, {}, [], {}, []), set[int]()
    for name, weight in model.state_dict(keep_vars=True).items():
        if id(weight) in seen:  # a tied weight
            continue
        seen.add(id(weight))
        check.refuse_damaged(name, weight)
        kind = Q8_0 if id(weight) in tables else format
        is_router = not ROUTERS.isdisjoint(name.split("."))
        blocks = _blocks_of(weight, kind) if id(weight) in fitting and not is_router else None
        if blocks is not None:
            quantized.blocks[name], quantized.kinds[name] = blocks, kind.name
            if not weight.is_contiguous():
                quantized.transposed.append(name)
            weight.data = weight.data.new_empty(0)
            continue
        if id(weight) in matrices and not is_router:
            quantized.kept.append(name)
        narrow = narrowed(weight.detach())
        quantized.rest[name] = (weight.detach() if narrow is None else narrow).contiguous()
    check.finish()
    return quantized


def _blocks_of(weight: torch.Tensor, format: BlockFormat) -> torch.Tensor | None:
    """Return the blocks of a matrix or of all experts' matrices, or None if they cannot be quantized."""
    matrices = matrices_of(weight)
    if matrices.shape[-1] % COLUMN_MULTIPLE:
        return None
    matrix = quantize_matrix(matrices.flatten(0, -2), format)
    return matrix.blocks.unflatten(0, matrices.shape[:-1]) if matrix else None


def _is_matrix(place: ParameterRef) -> bool:
    module, name = place
    return name == "weight" and isinstance(module, torch.nn.Linear | torch.nn.Embedding)


def _is_of_experts(place: ParameterRef) -> bool:
    module, name = place
    return name in WEIGHTS and module.get_parameter(name).dim() == 3


def _save(tensors: dict[str, torch.Tensor], file: Path) -> None:
    try:
        save_file(tensors, file)
    except SafetensorError as error:  # such as a full disk
        raise OSError(0, " ".join(str(error).split())) from error
