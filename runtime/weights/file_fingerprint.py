"""Computes fingerprints of weights from samples.

A fine-tuned model has the names, shapes and sizes of its base model and may differ in only a few matrices. A
fingerprint therefore samples the middle of every tensor, where an embedding's rows belong to tokens in use.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise
from math import prod
from pathlib import Path

from hdtool.data.file_state import FileState
from hdtool.data.gguf_header import GGUF_SUFFIX, GGUFHeader
from hdtool.runtime.weights.stored_pieces import tensors_of

DIGITS = 16
SAMPLED_BYTES = 64
"""Number of bytes sampled from each tensor."""
SAMPLED_POSITIONS = 1024
"""Number of positions at which a file of unknown format is sampled."""


def fingerprint_of(files: Iterable[Path]) -> str:
    """Return the weights' fingerprint: ``DIGITS`` hex digits, independent of how safetensors files are sharded.

    Raise a ``ModelError`` if a file is damaged, and OSError if it cannot be read.
    """
    paths = tuple(files)
    return _fingerprint(paths, tuple(map(FileState.of, paths)))


@cache  # a start identifies its model several times
def _fingerprint(files: tuple[Path, ...], _: tuple[FileState, ...]) -> str:
    digest = hashlib.sha256()
    for line in sorted(line for file in files for line in _lines(file)):
        digest.update(line)
    return digest.hexdigest()[:DIGITS]


def _lines(file: Path) -> Iterator[bytes]:
    if file.suffix == ".safetensors":
        yield from _sampled_tensors(file)
    elif file.suffix.lower() == GGUF_SUFFIX:
        yield _sampled_gguf(file)
    elif zipfile.is_zipfile(file):
        yield from _members(file)
    else:
        yield _sampled_file(file)


def _sampled_tensors(file: Path) -> Iterator[bytes]:
    """Yield a line to hash for each tensor of a safetensors file."""
    with file.open("rb") as stream:
        for name, piece in tensors_of(file):
            width = max(1, piece.bytes // max(1, prod(piece.shape)))
            first = max(0, min(piece.bytes // 2, piece.bytes - SAMPLED_BYTES)) // width
            stream.seek(piece.offset + first * width)
            content = stream.read(min(SAMPLED_BYTES, piece.bytes - first * width))
            yield f"{name} {piece.format} {piece.shape} {content.hex()}\n".encode()


def _sampled_gguf(file: Path) -> bytes:
    """Return a line to hash for a GGUF file: its size, its header, and samples of its tensors."""
    header, size = GGUFHeader.read(file), file.stat().st_size
    starts = sorted({header.data + tensor.offset for tensor in header.tensors})
    with file.open("rb") as stream:
        digest = hashlib.sha256(stream.read(header.data))
        for start, stop in pairwise([*starts, size]):
            stream.seek((start + max(start, stop)) // 2)
            digest.update(stream.read(SAMPLED_BYTES))
    return f"gguf {size} {digest.hexdigest()}\n".encode()


def _members(file: Path) -> Iterator[bytes]:
    """Yield a line to hash for each member of a ``torch.save`` file, a ZIP archive with a checksum for each tensor."""
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            name = member.filename.partition("/")[2]  # the top folder is named after the file
            yield f"{file.name} {name} {member.file_size} {member.CRC:08x}\n".encode()


def _sampled_file(file: Path) -> bytes:
    size = file.stat().st_size
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        for place in range(SAMPLED_POSITIONS):
            stream.seek(place * max(0, size - SAMPLED_BYTES) // (SAMPLED_POSITIONS - 1), os.SEEK_SET)
            digest.update(stream.read(SAMPLED_BYTES))
    return f"{file.name} {size} {digest.hexdigest()}\n".encode()
