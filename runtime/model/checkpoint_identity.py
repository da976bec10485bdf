"""Identifies the checkpoint that a configuration names (without loading it) or that a loaded model came from."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hdtool.data import demo
from hdtool.data.artifact import Artifact
from hdtool.data.errors import HdtoolError, ModelError, error_reason
from hdtool.data.stores.manifest import Checkpoint
from hdtool.runtime.model.gguf.converted import converted, stays_packed
from hdtool.runtime.model.gguf.converted_folder import REST, gguf_file
from hdtool.runtime.model.hub import Sample, cached_snapshot, fingerprint_of, samples, snapshot, weight_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hdtool.runtime.config import ModelConfig

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "config.json")
"""Names of files, at least one of which every folder with a tokenizer has."""


def place_of(
    config: ModelConfig,
    needed: tuple[str, ...] = TOKENIZER_FILES,
    *,
    weights: bool = False,
    revision: str | None = None,
) -> Path:
    """Return the folder to load a configuration's model from; raise a ``ModelError`` if there is no such model.

    GGUF files are converted and hub files downloaded if needed. A local folder must have at least one of the files
    ``needed``. Without ``weights``, the returned folder may hold only the configuration and the tokenizer.
    """
    if (name := config.place) is None:
        return demo.MODEL
    if file := gguf_file(config):
        return _converted(file, weights=weights)
    path = Path(name).expanduser()
    if path.is_dir():
        if not any((path / file).is_file() for file in needed):
            raise ModelError(f"{name} is a folder without {needed[0]}: name a folder written by save_pretrained")
        return path
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelError(
            f"{name} does not exist: give the folder of a model, a GGUF file, or a model's name on the hub"
        )
    return snapshot(name, revision or config.revision, weights=weights)


def packed_place(config: ModelConfig) -> tuple[Path, Path] | None:
    """Return ``(file, folder)``: the GGUF file that a configuration names, and the folder of the converted model.

    Return None if the configuration names no GGUF file, or if none of its weights stay packed.
    """
    if not (file := gguf_file(config)) or not stays_packed(file):
        return None
    return file, _converted(file, packed=True)


def _converted(file: Path, *, weights: bool = False, packed: bool = False) -> Path:
    try:
        return converted(file, weights=weights, packed=packed)
    except (HdtoolError, ModuleNotFoundError):
        raise
    except Exception as error:  # transformers may raise any error for a damaged file
        raise ModelError(f"{file} cannot be loaded (as a GGUF file): {error_reason(error)}") from error


MAX_COMPARED_TENSORS = 256
"""Maximum number of tensors of a loaded model that are compared with the model's files."""
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Names of torch dtypes by safetensors dtype; tensors of other dtypes are not compared."""


def checkpoint_of(config: ModelConfig, revision: str | None = None) -> Checkpoint | None:
    """Return the checkpoint that a configuration names, or None if its weights are not on this machine.

    The model is not loaded, and no weights are downloaded.
    """
    file = gguf_file(config)
    return _checkpoint_in(place_of(config, revision=revision), file.name if file else _name_of(config))


def served_checkpoint(config: ModelConfig, revision: str | None = None) -> Checkpoint | None:
    """Return the checkpoint that a server loads for a configuration, or None if hdtool cannot find it."""
    try:
        return checkpoint_of(config, revision)
    except ModelError:
        return None


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
    checkpoint = _checkpoint_in(folder, demo.NAME if folder == demo.MODEL else name_in_words(name))
    return checkpoint if checkpoint and _is_unchanged(model, folder) else None


def name_in_words(name: str) -> str:
    """Return the hub name of a folder in the hub's cache, the last part of another existing path, or else ``name``."""
    path = Path(name).expanduser()
    if not path.exists():
        return name
    path = path.resolve()
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        return path.parent.parent.name.removeprefix("models--").replace("--", "/")
    return path.name


def _name_of(config: ModelConfig) -> str:
    return demo.NAME if (place := config.place) is None else name_in_words(place)


def _checkpoint_in(folder: Path, name: str) -> Checkpoint | None:
    if artifact := Artifact.read(folder):
        return Checkpoint(artifact.fingerprint, name)
    files = weight_files(folder)
    try:
        return Checkpoint(fingerprint_of(files), name) if files else None
    except (ModelError, OSError):
        return None  # loading the model raises an error that names the fault


def _is_unchanged(model: PreTrainedModel, folder: Path) -> bool:
    """Return True if a model's parameters equal the samples from its files, as far as both can be compared."""
    parameters = dict(model.named_parameters())
    files = [file for file in weight_files(folder) or () if file.suffix == ".safetensors"]
    if not files and (folder / REST).is_file():
        from hdtool.runtime.kernels.compact_weight import is_packed

        # All other weights are packed, and packed weights cannot be changed.
        files = [folder / REST]
        stored_names = {sample.name for sample in samples(folder / REST)}
        if not all(name in stored_names or is_packed(parameter) for name, parameter in parameters.items()):
            return False
    stored = (sample for file in files for sample in samples(file))
    comparable = (
        sample
        for sample in stored
        if sample.dtype in DTYPES and sample.name in parameters and _is_like(parameters[sample.name], sample)
    )
    return all(_is_equal(parameters[sample.name], sample) for sample in islice(comparable, MAX_COMPARED_TENSORS))


def _is_like(parameter: Any, sample: Sample) -> bool:
    return (
        tuple(parameter.shape) == sample.shape
        and parameter.is_floating_point()
        and parameter.is_contiguous()
        and not parameter.is_meta
        # Quantization libraries use tensor subclasses.
        and type(parameter.data).__name__ in ("Tensor", "CompactWeight")
    )


def _is_equal(parameter: Any, sample: Sample) -> bool:
    import torch

    stored = torch.frombuffer(bytearray(sample.content), dtype=getattr(torch, DTYPES[sample.dtype]))
    held = parameter.detach().view(-1)[sample.first : sample.first + len(stored)].cpu()
    return bool(torch.equal(held, stored.to(held.dtype)))
