"""Keeps a GGUF file's configuration and tokenizer, a few megabytes, in a folder as ``save_pretrained`` writes it."""

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
"""Version of the folder's contents; after an increment, hdtool writes all folders again."""


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
