"""Where a model's files are on this machine; files of the hub are downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hdtool.data import demo
from hdtool.data.errors import HdtoolError, ModelError, reason_of
from hdtool.runtime.model.checkpoint.hub import snapshot
from hdtool.runtime.model.gguf.converted import converted, stays_packed
from hdtool.runtime.model.gguf.which_file import gguf_file

if TYPE_CHECKING:
    from hdtool.runtime.config import ModelConfig

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "config.json")
"""A folder with any of these can hold a tokenizer."""


def place_of(
    config: ModelConfig,
    needed: tuple[str, ...] = TOKENIZER_FILES,
    *,
    weights: bool = False,
    revision: str | None = None,
) -> Path:
    """The folder to load from; raise for names that cannot be a model's.

    A GGUF file is converted and files of the hub are downloaded if need be. Without ``weights``, the folder may hold
    the configuration and the tokenizer alone.
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
    """The GGUF file that a configuration names and the folder of its model; None without weights that stay packed."""
    if not (file := gguf_file(config)) or not stays_packed(file):
        return None
    return file, _converted(file, packed=True)


def _converted(file: Path, *, weights: bool = False, packed: bool = False) -> Path:
    try:
        return converted(file, weights=weights, packed=packed)
    except HdtoolError:
        raise
    except Exception as error:  # the library raises many kinds for damaged files
        raise ModelError(f"{file} cannot be loaded (as a GGUF file): {reason_of(error)}") from error
