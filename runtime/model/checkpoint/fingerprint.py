"""The fingerprint of a checkpoint, from a few bytes of each of its tensors: no model is loaded for it.

A fine-tune has the names, the shapes and the sizes of its base, and may have changed a few matrices only. So numbers
of every tensor count, from its middle, where the rows of an embedding belong to tokens that occur.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from hdtool.data.errors import ModelError

DIGITS = 16
SAMPLED = 64
"""Bytes of each tensor."""
PLACES = 1024
"""Places at which a file of unknown form is sampled."""
LARGEST_HEADER = 256 << 20
"""Bytes of the header of a safetensors file."""


@dataclass(frozen=True)
class Sample:
    """A tensor with some bytes from its middle."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    first: int
    """The place of the first sampled number in the flat tensor."""
    content: bytes


def fingerprint_of(files: Iterable[Path]) -> str:
    """Sixteen digits, equal for the same weights however they are spread over safetensors files."""
    digest = hashlib.sha256()
    for line in sorted(line for file in files for line in _lines(file)):
        digest.update(line)
    return digest.hexdigest()[:DIGITS]


def samples(file: Path) -> Iterator[Sample]:
    """The tensors of a safetensors file; a ``ModelError`` for a file that is none or was cut short."""
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if size > LARGEST_HEADER:
                raise ValueError("its header is too large")
            header = json.loads(stream.read(size))
            for name, entry in header.items():
                if name != "__metadata__":
                    yield _sample(stream, 8 + size, name, entry)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{file} is no whole safetensors file ({error}): get it again") from None
    except OSError as error:
        raise ModelError(f"{file} cannot be read ({error.strerror or error}): correct the permissions") from None


def _sample(stream: BinaryIO, data: int, name: str, entry: dict[str, Any]) -> Sample:
    start, stop = entry["data_offsets"]
    shape = tuple(entry["shape"])
    width = max(1, (stop - start) // max(1, math.prod(shape)))
    first = max(0, min((stop - start) // 2, stop - start - SAMPLED)) // width
    stream.seek(data + start + first * width)
    wanted = min(SAMPLED, stop - start - first * width)
    content = stream.read(wanted)
    if len(content) < wanted:
        raise ValueError("it ends too early")
    return Sample(name, str(entry["dtype"]), shape, first, content)


def _lines(file: Path) -> Iterator[bytes]:
    if file.suffix == ".safetensors":
        for sample in samples(file):
            yield f"{sample.name} {sample.dtype} {sample.shape} {sample.content.hex()}\n".encode()
    elif zipfile.is_zipfile(file):
        yield from _members(file)
    else:
        yield _sampled_file(file)


def _members(file: Path) -> Iterator[bytes]:
    """What torch.save wrote: an uncompressed archive, whose directory has a checksum of each tensor."""
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            name = member.filename.partition("/")[2]  # the first folder is called like the file
            yield f"{file.name} {name} {member.file_size} {member.CRC:08x}\n".encode()


def _sampled_file(file: Path) -> bytes:
    size = file.stat().st_size
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        for place in range(PLACES):
            stream.seek(place * max(0, size - SAMPLED) // (PLACES - 1), os.SEEK_SET)
            digest.update(stream.read(SAMPLED))
    return f"{file.name} {size} {digest.hexdigest()}\n".encode()
