"""Describes where tensors lie in files, and reads their places from the headers of safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from hdtool.data.errors import ModelError

MAX_HEADER_SIZE = 256 << 20
"""Maximum size of a safetensors header in bytes."""


@dataclass(frozen=True)
class Piece:
    """Location, shape and format of a tensor in a file; ``offset`` and ``bytes`` are in bytes."""

    file: Path
    offset: int
    bytes: int
    shape: tuple[int, ...]
    format: str
    """Name of a dtype as in safetensors files, or of a block format of GGUF."""

    @property
    def rows(self) -> int:
        """Number of rows; each element of a vector is a row."""
        return prod(self.shape[:-1]) if len(self.shape) > 1 else prod(self.shape)

    @property
    def columns(self) -> int:
        return self.shape[-1] if len(self.shape) > 1 else 1


def tensors_of(file: Path) -> Iterator[tuple[str, Piece]]:
    """Yield the name and place of each tensor in a safetensors file; raise a ``ModelError`` if it is damaged."""
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
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ModelError(f"{file} is no whole safetensors file (its header is damaged): get it again") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{file} is no whole safetensors file ({error}): get it again") from None
