"""Weights of checkpoints in safetensors files, single or sharded, as transformers names and joins them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hdtool.data.errors import ModelError
from hdtool.runtime.model.hub import MAX_HEADER_SIZE, weight_files
from hdtool.runtime.weights.library_names import model_transforms, stored_weights
from hdtool.runtime.weights.store import Piece, WeightStore


def safetensors_store(folder: Path, settings: Any, model: Any) -> WeightStore | None:
    """Return the weights of a checkpoint for the parameters of ``model``, which may be empty.

    Return None if they lie in files of another kind, or if adapters are added to them.
    """
    files = weight_files(folder)
    if not files or any(file.suffix != ".safetensors" for file in files) or (folder / "adapter_config.json").is_file():
        return None
    pieces = {name: piece for file in files for name, piece in _pieces(file)}
    return WeightStore(stored_weights(model_transforms(model), pieces, model), folder)


def _pieces(file: Path) -> Iterator[tuple[str, Piece]]:
    """Yield the name and place of each tensor in a file; raise a ``ModelError`` if the file is damaged."""
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if size > MAX_HEADER_SIZE:
                raise ValueError("its header is too large")
            header, whole = json.loads(stream.read(size)), file.stat().st_size
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                if not 0 <= start <= end <= whole - size - 8:
                    raise ValueError("it ends too early")
                yield name, Piece(file, 8 + size + start, end - start, tuple(entry["shape"]), str(entry["dtype"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{file} is no whole safetensors file ({error}): get it again") from None
