"""Identifies the checkpoint that a configuration names, and the folder that it is loaded from, without loading it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hdtool.data import demo
from hdtool.data.artifact import Artifact
from hdtool.data.errors import ModelError
from hdtool.data.stores.manifest import Checkpoint
from hdtool.runtime.weights.file_fingerprint import fingerprint_of
from hdtool.runtime.weights.gguf_file import gguf_file, is_path
from hdtool.runtime.weights.hub import snapshot, weight_files

if TYPE_CHECKING:
    from hdtool.runtime.settings.model import ModelConfig

CONFIG_FILES = ("config.json",)
"""Names of files, at least one of which every folder with a model has."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "config.json")
"""Names of files, at least one of which every folder with a tokenizer has."""
ADAPTER_FILE = "adapter_config.json"
"""Settings of a PEFT adapter."""


def place_of(
    config: ModelConfig,
    needed: tuple[str, ...] = TOKENIZER_FILES,
    *,
    weights: bool = False,
    revision: str | None = None,
) -> Path:
    """Return the folder to load a configuration's model from; raise an ``HdtoolError`` if there is no such model.

    Hub files are downloaded if needed; without ``weights``, only the configuration and the tokenizer. A local folder
    must have at least one of the files ``needed``. The folder of a GGUF file holds no weights.
    """
    if (name := config.place) is None:
        return demo.MODEL
    if file := gguf_file(config):
        from hdtool.runtime.weights.gguf_folder import configuration_folder

        return configuration_folder(file).folder
    path = Path(name).expanduser()
    if path.is_dir():
        if not any((path / file).is_file() for file in needed):
            if (path / ADAPTER_FILE).is_file():
                raise ModelError(
                    f"{name} holds an adapter without its model: merge them by peft's merge_and_unload, "
                    "and name the folder that save_pretrained then writes"
                )
            raise ModelError(f"{name} is a folder without {needed[0]}: name a folder written by save_pretrained")
        return path
    if is_path(name):
        raise ModelError(
            f"{name} does not exist: give the folder of a model, a GGUF file, or a model's name on the hub"
        )
    return snapshot(name, revision or config.revision, weights=weights)


def checkpoint_of(config: ModelConfig, revision: str | None = None) -> Checkpoint | None:
    """Return the checkpoint that a configuration names, or None if its weights are not on this machine.

    The model is not loaded, and no weights are downloaded, except a GGUF file on the hub. Raise an ``HdtoolError`` if
    the model does not exist.
    """
    file = gguf_file(config)
    return checkpoint_in(place_of(config, revision=revision), file.name if file else _name_of(config))


def served_checkpoint(config: ModelConfig, revision: str | None = None) -> Checkpoint | None:
    """Return the checkpoint that a server loads for a configuration, or None if hdtool cannot find it."""
    try:
        return checkpoint_of(config, revision)
    except ModelError:
        return None


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


def checkpoint_in(folder: Path, name: str) -> Checkpoint | None:
    """Return the checkpoint whose weights or configuration a folder holds, or None if it has none that can be read."""
    if artifact := Artifact.read(folder):
        return Checkpoint(artifact.fingerprint, name)
    files = weight_files(folder)
    try:
        return Checkpoint(fingerprint_of(files), name) if files else None
    except (ModelError, OSError):
        return None  # loading the model raises an error that names the fault
