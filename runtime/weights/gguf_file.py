"""A model's GGUF file, which may consist of several parts, and the choice of the file that a configuration names."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hdtool.data.errors import ModelError, OptionError
from hdtool.data.gguf_header import (
    DOWNLOAD_AGAIN,
    GGUF_SUFFIX,
    SPLIT_COUNT,
    SPLIT_NUMBER,
    SPLIT_TENSORS,
    GGUFHeader,
)
from hdtool.runtime.weights.hub import file_of
from hdtool.runtime.weights.stored_pieces import Piece

if TYPE_CHECKING:
    from hdtool.runtime.settings.model import ModelConfig

UNQUANTIZED_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Dtypes of unquantized tensor formats."""


@dataclass(frozen=True)
class GGUFFile:
    """A model's metadata and tensors. Create instances with ``open``, which checks all parts."""

    paths: tuple[Path, ...]
    """All parts, in order."""
    header: GGUFHeader
    """Header of the first part, which holds the metadata of the model."""
    tensors: dict[str, Piece]
    """Tensors of all parts by name."""

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        """Open the model of which ``path`` is a part or the whole; raise a ModelError if any part can't be used."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        blocks = {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}
        given = GGUFHeader.read(path)
        paths = _parts(path, given)
        headers = [given if part == path else GGUFHeader.read(part) for part in paths]
        tensors: list[tuple[str, Piece]] = []
        for number, (part, header) in enumerate(zip(paths, headers, strict=True)):
            if len(paths) > 1 and not _belongs(header, number, headers[0]):
                raise ModelError(f"{part} is not part {number + 1} of the model of {paths[0]}: get all its parts again")
            header.check_whole(part, blocks)
            for each in header.tensors:
                form, start = GGMLQuantizationType(each.kind).name, header.data + each.offset
                tensors.append((each.name, Piece(part, start, each.bytes(blocks), each.shape, form)))
        _check_complete(paths, headers[0], tensors)
        return cls(paths, headers[0], dict(tensors))

    @property
    def path(self) -> Path:
        """The file, or its first part."""
        return self.paths[0]

    @property
    def architecture(self) -> str:
        return self.header.architecture

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model: float32 if any tensors are quantized or all are float32, else their 16-bit dtype."""
        formats = {piece.format for piece in self.tensors.values()}
        if not formats <= UNQUANTIZED_DTYPES.keys():
            return torch.float32
        dtypes = {UNQUANTIZED_DTYPES[form] for form in formats}
        return next((dtype for dtype in (torch.bfloat16, torch.float16) if dtype in dtypes), torch.float32)

    def entries(self) -> dict[str, bytes]:
        """Return each key of the metadata with the bytes that hold the key and its value in the file."""
        content = {}
        with self.path.open("rb") as stream:
            for name, (start, stop) in self.header.places.items():
                stream.seek(start)
                content[name] = stream.read(stop - start)
        return content


def _parts(path: Path, header: GGUFHeader) -> tuple[Path, ...]:
    """Return the paths of all parts of a model, given one; raise a ModelError if one is missing or misnamed."""
    count, number = header.values.get(SPLIT_COUNT, 1), header.values.get(SPLIT_NUMBER, 0)
    if not isinstance(count, int) or not isinstance(number, int) or count < 2:
        return (path,)
    names = part_names(path.name)
    if len(names) != count or names.index(path.name) != number:
        raise ModelError(
            f"{path} is part {number + 1} of {count} of a model, and its name does not end in "
            f"-{number + 1:05}-of-{count:05}.gguf: give all parts the names with which they were made"
        )
    paths = tuple(path.with_name(name) for name in names)
    if missing := [part.name for part in paths if not part.is_file()]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(
            f"{path} is one of {count} parts of a model, and {missing[0]}{more} is missing: "
            f"put all parts into {path.parent}"
        )
    return paths


def _belongs(header: GGUFHeader, number: int, first: GGUFHeader) -> bool:
    """Return True if a part is the one with this number (from 0) of the model whose first part is ``first``."""
    same = all(header.values.get(name) == first.values.get(name) for name in (SPLIT_COUNT, SPLIT_TENSORS))
    return same and header.values.get(SPLIT_NUMBER, 0) == number and header.architecture in ("", first.architecture)


def _check_complete(paths: tuple[Path, ...], first: GGUFHeader, tensors: list[tuple[str, Piece]]) -> None:
    """Raise a ModelError if a tensor occurs twice, or if the parts' number of tensors isn't the one stated."""
    (name, times), *_ = Counter(name for name, _ in tensors).most_common(1) or [("", 0)]
    if times > 1:
        raise ModelError(f"{paths[0]} holds {name} {times} times, counting all its parts: {DOWNLOAD_AGAIN}")
    stated = first.values.get(SPLIT_TENSORS, len(tensors))
    if len(paths) > 1 and stated != len(tensors):
        raise ModelError(f"{paths[0]} states {stated} tensors, and its parts hold {len(tensors)}: get all parts again")


MAX_LISTED = 12
PART = re.compile(r"(?P<model>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE | re.DOTALL)


def part_names(name: str) -> list[str]:
    """Return the names of all parts of the model to which a file belongs by its name; only ``name`` if it is whole."""
    match = PART.fullmatch(name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
        return [name]
    numbers = range(1, int(match["count"]) + 1)
    return [f"{match['model']}-{number:05}-of-{match['count']}{match['suffix']}" for number in numbers]


def existing_parts(path: Path) -> tuple[Path, ...]:
    """Return the existing files of the model to which a file belongs, judging by its name."""
    return (
        path,
        *(part for name in part_names(path.name) if (part := path.with_name(name)) != path and part.is_file()),
    )


def gguf_file(config: ModelConfig) -> Path | None:
    """Return the GGUF file that a configuration names, or None for a model in another format.

    Of a model in several parts, this is the first one. An existing file is returned whatever its suffix, so that the
    GGUF reader can say what is wrong with it. In a folder without ``config.json``, the only model is chosen. Files on
    the hub are downloaded. Raise an ``HdtoolError`` if the file is missing or the choice is not clear.
    """
    if (name := config.place) is None:
        return None
    path = Path(name).expanduser()
    if path.exists() and config.revision:
        raise OptionError(f"--revision names a version on the hub, and {path} is here: leave it out")
    if path.is_dir():
        return _in_folder(path, config.gguf_file)
    if path.exists():
        if config.gguf_file:
            raise OptionError(f"--gguf-file names a file of a folder, and {path} is a file itself: leave it out")
        return _first_part(path)
    if config.gguf_file and not is_path(name):
        parts = [file_of(name, part, config.revision) for part in part_names(config.gguf_file)]
        return parts[0]
    if config.gguf_file or path.suffix.lower() == GGUF_SUFFIX:
        raise ModelError(f"{name} does not exist: give the path of a GGUF file, or a folder and --gguf-file")
    return None


def is_path(name: str) -> bool:
    """Return True if a model's name can only be a path, not a name on the hub."""
    return Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") > 1


def _first_part(path: Path) -> Path:
    """Return the first part of the model to which a file belongs by its name; the file itself if that is missing."""
    first = path.with_name(part_names(path.name)[0])
    return first if first.is_file() else path


def _in_folder(folder: Path, name: str | None) -> Path | None:
    if name is None and (folder / "config.json").is_file():
        return None
    there = sorted(path for path in folder.iterdir() if path.suffix.lower() == GGUF_SUFFIX and path.is_file())
    models = list({part_names(path.name)[0]: path for path in reversed(there)}.values())[::-1]
    if name is not None:
        if (folder / name).is_file():
            return _first_part(folder / name)
        raise ModelError(f"{folder} holds no file {name}: it holds {_listed(models)}")
    if len(models) > 1:
        raise ModelError(f"{folder} holds several GGUF files: choose one with --gguf-file, of {_listed(models)}")
    return models[0] if models else None


def _listed(files: list[Path]) -> str:
    names = [path.name for path in files[:MAX_LISTED]] + ["…"] * (len(files) > MAX_LISTED)
    return ", ".join(names) or "no GGUF file"
