"""Keeps the configuration and the tokenizer of a GGUF file in the layout of ``save_pretrained``: a few megabytes."""

from __future__ import annotations

from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from hdtool.data.artifact import Artifact, made_once
from hdtool.runtime.weights.file_fingerprint import fingerprint_of
from hdtool.runtime.weights.gguf_configuration import write_configuration
from hdtool.runtime.weights.gguf_file import GGUFFile, existing_parts

KIND = "gguf"
FORMAT = 3
"""Version of what is written, incremented when other versions of hdtool must write it again."""


def configuration_folder(file: Path) -> Artifact:
    """Return the artifact with the configuration and tokenizer of a GGUF file or its parts; write it if needed.

    Raise a ``ModelError`` if the file is damaged.
    """
    files = existing_parts(file)
    fingerprint = fingerprint_of(files)

    def make(folder: Path) -> dict[str, Any]:
        write_configuration(GGUFFile.open(file), folder)
        return {"fingerprint": fingerprint}

    versions = {"transformers": metadata.version("transformers"), "format": FORMAT}
    check = partial(GGUFFile.open, file)
    return made_once(KIND, file.stem, versions, files, fingerprint, f"reading {file} into", make, check)
