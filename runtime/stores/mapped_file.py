"""A part of a store, mapped into memory: read only where it is touched, and shared by all processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hdtool.data.errors import StoreError
from hdtool.data.stores.documents import token_type
from hdtool.data.stores.store import BUILD_COMMANDS, Manifest

Mode = Literal["r", "c"]
"""Read-only, or writable in this process's memory alone."""


def mapped_part(
    folder: Path, manifest: Manifest, part: str, kind: npt.DTypeLike, width: int = 1, mode: Mode = "r"
) -> npt.NDArray[Any]:
    """A part as rows of ``width`` numbers; a file of another size than the manifest's is an error."""
    path, size, row = folder / manifest.files[part].name, manifest.files[part].bytes, np.dtype(kind).itemsize * width
    again = f"build the store again with {BUILD_COMMANDS[manifest.kind]}"
    try:
        with open(path, "rb") as stream:
            # Of the file that was opened: another may have the name by now.
            found = os.fstat(stream.fileno()).st_size
            if found != size:
                raise StoreError(f"{path} has {found:,} bytes instead of {size:,}: {again}")
            if size % row or not (size or manifest.holds_rankings_alone):
                raise StoreError(f"{path} has {size:,} bytes, which are no whole rows of {row}: {again}")
            if not size:
                return np.empty((0, width), kind)
            mapped = np.memmap(stream, kind, mode, shape=(size // row, width))
    except (OSError, ValueError) as error:  # such as no memory to map it
        raise StoreError(f"{path} cannot be opened ({error}): {again}") from None
    # A plain array on the map: slices of np.memmap itself cost microseconds each.
    return np.asarray(mapped)


def documents_of(folder: Path, manifest: Manifest) -> npt.NDArray[Any]:
    """All documents of a store, mapped."""
    return mapped_part(folder, manifest, "documents", token_type(manifest.tokenizer.vocab_size)).reshape(-1)
