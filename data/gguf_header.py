"""Read a GGUF file's header, which holds the metadata and the tensor table, and check that the file is complete."""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from hdtool.data.errors import ModelError
from hdtool.data.file_state import FileState

GGUF_MAGIC = b"GGUF"
GGUF_SUFFIX = ".gguf"
GGUF_VERSIONS = (2, 3)
DOWNLOAD_AGAIN = "get the file again"
STRUCT_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Format characters of ``struct`` for GGUF's numeric types."""
STRING_TYPE, ARRAY_TYPE = 8, 9
MAX_ARRAY_DEPTH = 8
"""Maximum depth of nested arrays. A damaged file could nest them without end."""
MAX_KEPT_VALUES = 16
"""Maximum length of an array whose numbers are kept. Longer arrays are vocabularies."""
ARCHITECTURE = "general.architecture"
ALIGNMENT = 32
"""Default alignment of tensor data in bytes."""
SPLIT_COUNT, SPLIT_NUMBER, SPLIT_TENSORS = "split.count", "split.no", "split.tensors.count"
"""Metadata keys of the number of parts of a model, a part's number (from 0), and the number of tensors in all parts."""
Blocks = Mapping[int, tuple[int, int]]
"""Maps each quantization type to ``(numbers per block, bytes per block)``."""


@dataclass(frozen=True)
class GGUFTensor:
    name: str
    numbers: int
    kind: int
    """Quantization type of the numbers."""
    offset: int
    """Offset in bytes from the start of the tensor data."""
    shape: tuple[int, ...] = ()
    """Shape as in torch, where the last dimension is contiguous."""

    def bytes(self, blocks: Blocks) -> int:
        numbers, bytes_each = blocks[self.kind]
        return self.numbers // numbers * bytes_each


@dataclass(frozen=True)
class GGUFHeader:
    values: dict[str, Any]
    """Metadata by key. Arrays are replaced by their length, except arrays of up to ``MAX_KEPT_VALUES`` numbers."""
    tensors: tuple[GGUFTensor, ...]
    data: int
    """Offset in bytes of the tensor data in the file."""
    places: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Start and end offset in bytes of each metadata entry (key and value) in the file, by key."""

    @classmethod
    def read(cls, path: Path) -> GGUFHeader:
        """Read a file's header; raise ModelError if it is damaged or the file is no GGUF file of a known version."""
        return _read(path, FileState.of(path))

    @property
    def architecture(self) -> str:
        """Name of the architecture; empty if the file is a later part of a model and does not state it."""
        return str(self.values.get(ARCHITECTURE, ""))

    def check_whole(self, path: Path, blocks: Blocks) -> None:
        """Raise ModelError if the file is cut short, or if a tensor has an unknown type or rows of no whole blocks."""
        ends = [0]
        for tensor in self.tensors:
            if tensor.kind not in blocks:
                raise ModelError(f"{path} holds {tensor.name} in format {tensor.kind}, which the library gguf lacks")
            if tensor.shape and tensor.shape[-1] % blocks[tensor.kind][0]:
                raise ModelError(f"{path} holds {tensor.name} in rows of no whole blocks: {DOWNLOAD_AGAIN}")
            ends.append(self.data + tensor.offset + tensor.bytes(blocks))
        size = path.stat().st_size
        if size < max(ends):
            raise ModelError(f"{path} is cut short, {size:,} bytes of {max(ends):,}: {DOWNLOAD_AGAIN}")


@cache  # a start reads the header several times, and a vocabulary takes long to skip
def _read(path: Path, _: FileState) -> GGUFHeader:
    size = path.stat().st_size
    if not size:
        raise ModelError(f"{path} is empty: {DOWNLOAD_AGAIN}")
    with path.open("rb") as stream:
        if stream.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
            raise ModelError(
                f"{path} is a file and not in GGUF format: name a GGUF file, or the folder that save_pretrained wrote"
            )
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                return _header(_Reader(content), path)
            except (struct.error, ValueError, TypeError, OverflowError, MemoryError, KeyError) as error:
                raise ModelError(
                    f"{path} ends within its header, or its header is damaged: {DOWNLOAD_AGAIN}"
                ) from error


def _header(reader: _Reader, path: Path) -> GGUFHeader:
    version = reader.number("I")
    if version not in GGUF_VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        version_found = f"big-endian GGUF, version {swapped}" if swapped in GGUF_VERSIONS else f"GGUF version {version}"
        raise ModelError(f"{path} is {version_found}: transformers reads little-endian files of version 2 and 3")
    tensors, settings = reader.number("Q"), reader.number("Q")
    values, places = {}, {}
    for _ in range(settings):
        start, name = reader.offset, reader.text()
        values[name] = reader.value(reader.number("I"))
        places[name] = start, reader.offset
    table = [reader.tensor() for _ in range(tensors)]
    alignment = int(values.get("general.alignment", ALIGNMENT))
    if (ARCHITECTURE not in values and not values.get(SPLIT_NUMBER)) or alignment < 1:
        raise ValueError
    return GGUFHeader(values, tuple(table), math.ceil(reader.offset / alignment) * alignment, places)


class _Reader:
    """Sequential reader of a header's values. Raises ``struct.error`` if a value extends past the end of the file."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self.offset = len(GGUF_MAGIC)

    def number(self, kind: str) -> Any:
        (number,) = struct.unpack_from(f"<{kind}", self._content, self.offset)
        self.offset += struct.calcsize(f"<{kind}")
        return number

    def text(self) -> str:
        length = self.number("Q")
        start = self.offset
        self._skip(length)
        return self._content[start : self.offset].decode(errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == STRING_TYPE:
            return self.text()
        if kind != ARRAY_TYPE:
            return self.number(STRUCT_FORMATS[kind])
        kind, count = self.number("I"), self.number("Q")
        if kind in STRUCT_FORMATS and count <= MAX_KEPT_VALUES:
            return [self.number(STRUCT_FORMATS[kind]) for _ in range(count)]
        if kind in STRUCT_FORMATS:
            self._skip(count * struct.calcsize(f"<{STRUCT_FORMATS[kind]}"))
        elif depth == MAX_ARRAY_DEPTH:
            raise ValueError
        else:
            self._skip_values(kind, count, depth)
        return count

    def _skip_values(self, kind: int, count: int, depth: int) -> None:
        if kind != STRING_TYPE:
            for _ in range(count):
                self.value(kind, depth + 1)
            return
        content, offset, length_at = self._content, self.offset, struct.Struct("<Q").unpack_from
        for _ in range(count):  # a vocabulary
            offset += 8 + length_at(content, offset)[0]
        self.offset = offset
        self._skip(0)

    def tensor(self) -> GGUFTensor:
        name = self.text()
        dimensions = [self.number("Q") for _ in range(self.number("I"))]
        kind, offset = self.number("I"), self.number("Q")
        return GGUFTensor(name, math.prod(dimensions), kind, offset, tuple(reversed(dimensions)))

    def _skip(self, length: int) -> None:
        self.offset += length
        if self.offset > len(self._content):
            raise struct.error
