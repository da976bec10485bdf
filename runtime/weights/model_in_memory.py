"""Identifies the checkpoint that a model in memory was loaded from, as long as its weights equal those in the files."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hdtool.data import demo
from hdtool.data.artifact import Artifact
from hdtool.data.stores.manifest import Checkpoint
from hdtool.runtime.kernels.compact_weight import is_packed
from hdtool.runtime.model.compact_layers import compact_states
from hdtool.runtime.weights.checkpoint_identity import checkpoint_in, name_in_words
from hdtool.runtime.weights.gguf_file import GGUFFile
from hdtool.runtime.weights.gguf_folder import KIND as GGUF
from hdtool.runtime.weights.gguf_names import gguf_store
from hdtool.runtime.weights.hub import cached_snapshot
from hdtool.runtime.weights.quantized_checkpoints import quantized_store
from hdtool.runtime.weights.safetensors_files import safetensors_store
from hdtool.runtime.weights.weight_store import WeightRow, WeightStore

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_COMPARED_WEIGHTS = 256
"""Maximum number of weights that are compared with the model's files, by one row each."""


def checkpoint_in_memory(model: PreTrainedModel) -> Checkpoint | None:
    """Return the checkpoint that a model was loaded from.

    Return None if no files of the model are found, or if its weights have changed since they were loaded.
    """
    name = str(getattr(model, "name_or_path", "") or "")
    if not name:
        return None
    folder = Path(name)
    if not folder.is_dir():
        snapshot = cached_snapshot(name, getattr(model.config, "_commit_hash", None))
        if snapshot is None:
            return None
        folder = snapshot
    checkpoint = checkpoint_in(folder, demo.NAME if folder == demo.MODEL else name_in_words(name))
    return checkpoint if checkpoint and _is_unchanged(model, folder) else None


def _store_in(folder: Path, model: PreTrainedModel) -> WeightStore | None:
    """Return the stored weights of a model whose configuration is in a folder; None if they can't be read by name."""
    artifact = Artifact.read(folder)
    if artifact is None:
        return safetensors_store(folder, model.config, model)
    if artifact.kind != GGUF:
        return quantized_store(folder)
    sources = artifact.sources if all(state.holds for state in artifact.sources) else ()
    return gguf_store(GGUFFile.open(Path(sources[0].path)), model.config, model) if sources else None


def _is_unchanged(model: PreTrainedModel, folder: Path) -> bool:
    """Return True if rows of a model's weights equal those in its files, as far as both can be compared."""
    with compact_states():
        store = _store_in(folder, model)
    if store is None:
        return True
    parameters = (
        (name, weight) for name, weight in model.named_parameters() if name in store and _is_comparable(weight)
    )
    rows = ((weight, store.middle_row(name)) for name, weight in parameters)
    return all(_is_equal(weight, row) for weight, row in islice(rows, MAX_COMPARED_WEIGHTS) if row)


def _is_comparable(weight: Any) -> bool:
    # Packed weights cannot be changed, and quantization libraries use tensor subclasses.
    is_plain = type(weight.data).__name__ in ("Tensor", "CompactWeight") and not is_packed(weight)
    return is_plain and weight.is_floating_point() and not weight.is_meta


def _is_equal(weight: torch.Tensor, row: WeightRow) -> bool:
    if tuple(weight.shape) != row.shape:
        return True  # another library split or merged it
    rows = weight.detach().transpose(-1, -2) if row.transposed else weight.detach()
    held = rows.reshape(-1, len(row.numbers))[row.number].cpu()
    return bool(torch.equal(held, row.numbers.to(held.dtype)))
