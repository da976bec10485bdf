"""Memory-maps the files of stores."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hdtool.data.documents import token_type
from hdtool.data.errors import StoreError
from hdtool.data.stores.kinds import BUILT_KINDS
from hdtool.data.stores.manifest import Manifest

Mode = Literal["r", "c"]
"""``r`` is read-only, and ``c`` copy-on-write: writes stay in this process's memory."""


def mapped_part(
    folder: Path, manifest: Manifest, part: str, kind: npt.DTypeLike, width: int = 1, mode: Mode = "r"
) -> npt.NDArray[Any]:
    """Memory-map the file of a store's ``part`` as rows of ``width`` numbers.

    Raise StoreError if the file can't be mapped, or if its size is not the manifest's or no multiple of a row. Only
    stores that hold nothing but rankings may have empty files.
    """
    path, size, row = folder / manifest.files[part].name, manifest.files[part].bytes, np.dtype(kind).itemsize * width
    again = BUILT_KINDS[manifest.kind].rebuild_advice
    try:
        with open(path, "rb") as stream:
            # Ask for the open file's size: the path may have been replaced.
            file_bytes = os.fstat(stream.fileno()).st_size
            if file_bytes != size:
                raise StoreError(f"{path} has {file_bytes:,} bytes instead of {size:,}: {again}")
            if size % row or not (size or manifest.holds_rankings_alone):
                raise StoreError(f"{path} has {size:,} bytes, which are no whole rows of {row}: {again}")
            if not size:
                return np.empty((0, width), kind)
            mapped = np.memmap(stream, kind, mode, shape=(size // row, width))
    except (OSError, ValueError) as error:  # e.g. too little memory to map it
        raise StoreError(f"{path} cannot be opened ({error}): {again}") from None
    # Return a plain array, since each slice of an np.memmap costs microseconds.
    return np.asarray(mapped)


def documents_of(folder: Path, manifest: Manifest) -> npt.NDArray[Any]:
    """Memory-map the documents of a store as one array of tokens."""
    return mapped_part(folder, manifest, "documents", token_type(manifest.tokenizer.vocab_size)).reshape(-1)
