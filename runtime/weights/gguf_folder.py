"""Keeps the configuration and the tokenizer of a GGUF file in the layout of ``save_pretrained``: a few megabytes."""

from __future__ import annotations

import hashlib
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from hdtool.data.artifact import Artifact, artifacts, made_once
from hdtool.data.file_state import FileState
from hdtool.data.stores.home import stored_items
from hdtool.runtime.weights.fingerprint import DIGITS, fingerprint_of
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
        return {"fingerprint": _fingerprint_of_stores(files[0], fingerprint)}

    versions = {"transformers": metadata.version("transformers"), "format": FORMAT}
    check = partial(GGUFFile.open, file)
    return made_once(KIND, file.stem, versions, files, fingerprint, f"reading {file} into", make, check)


def _fingerprint_of_stores(file: Path, fingerprint: str) -> str:
    """Return the fingerprint under which stores of a file's model were built: in earlier versions, the file's hash."""
    state = FileState.of(file)
    for kept in artifacts(KIND):
        if state in kept.sources or kept.identity.startswith(fingerprint):
            return kept.fingerprint
    known = {item.model.fingerprint for item in stored_items() if item.model and item.model.name == file.name}
    if known and fingerprint not in known:
        with file.open("rb") as stream:
            whole = hashlib.file_digest(stream, "sha256").hexdigest()[:DIGITS]
        return whole if whole in known else fingerprint
    return fingerprint
