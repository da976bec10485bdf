"""The files of weights in a folder of ``save_pretrained``, in the order in which transformers looks for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

SINGLE = ("model.safetensors", "pytorch_model.bin")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
"""A JSON object whose ``weight_map`` has the shard of each tensor."""
ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
"""Weights that are added to those of the model."""


def weight_files(folder: Path) -> list[Path] | None:
    """The files that hold the weights of the model in a folder; None if one is missing."""
    files = next(_complete(folder), None)
    return files and files + [folder / name for name in ADAPTERS if (folder / name).is_file()]


def shards(folder: Path) -> list[str] | None:
    """The names of the shards that an index in the folder lists; None without an index."""
    for name in INDEXES:
        try:
            row = json.loads((folder / name).read_text(encoding="utf-8"))
            return sorted({str(shard) for shard in row["weight_map"].values()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return None


def _complete(folder: Path) -> Iterator[list[Path]]:
    single, binary = ([folder / name] for name in SINGLE)
    sharded = [folder / name for name in shards(folder) or ()]
    for files in (single, sharded, binary):
        if files and all(file.is_file() for file in files):
            yield files
