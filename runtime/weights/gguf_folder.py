"""Keeps the configuration and the tokenizer of a GGUF file in the layout of ``save_pretrained``: a few megabytes."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

from hdtool.data.artifact import Artifact, Recipe, artifacts
from hdtool.data.file_state import FileState, content_hash
from hdtool.data.stores.home import stored_items
from hdtool.runtime.weights.fingerprint import DIGITS, fingerprint_of
from hdtool.runtime.weights.gguf_configuration import write_configuration
from hdtool.runtime.weights.gguf_file import GGUFFile, existing_parts

KIND = "gguf"
FORMAT = 2
"""Version of what is written, incremented when other versions of hdtool must write it again."""


def configuration_folder(file: Path) -> Artifact:
    """Return the artifact with the configuration and tokenizer of a GGUF file or its parts; write it if needed.

    Raise a ``ModelError`` if the file is damaged.
    """
    files = existing_parts(file)

    def make(folder: Path, identity: str) -> dict[str, Any]:
        write_configuration(GGUFFile.open(file), folder)
        return {"fingerprint": _fingerprint(files, identity)}

    versions = {"transformers": metadata.version("transformers"), "format": FORMAT}
    activity = f"reading {file} into"
    return Recipe(KIND, file.stem, files, versions, activity, lambda: fingerprint_of(files), make).artifact()


def _fingerprint(files: tuple[Path, ...], identity: str) -> str:
    """Return the fingerprint under which stores of the model were built, or else ``identity``.

    The fingerprint of earlier versions was a hash of the whole file.
    """
    states, size = tuple(map(FileState.of, files)), files[0].stat().st_size
    kept = list(artifacts(KIND))
    for artifact in kept:
        if artifact.identity == identity or states in artifact.seen:
            return artifact.fingerprint
    known = {item.model.fingerprint for item in stored_items() if item.model and item.model.name == files[0].name}
    known |= {other.fingerprint for other in kept for seen in other.seen for state in seen if state.bytes == size}
    if known and (whole := content_hash(files[0])[:DIGITS]) in known:
        return whole
    return identity
