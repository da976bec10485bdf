"""Identity of a GGUF file, and the manifest of the folder with its converted model."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from hdtool.data.errors import ModelError, OptionError
from hdtool.data.output_files import OutputFile, is_json_with, json_object
from hdtool.data.progress import progress_bar
from hdtool.data.stores.home import converted_models_at_home
from hdtool.runtime.model.hub import file_of

if TYPE_CHECKING:
    from hdtool.runtime.config import ModelConfig

SETTLED = 2.0
"""Seconds. A file that was changed less than this before its hash was computed may change again within one tick of a
file system's clock, which no signature would show."""
CHUNK = 1 << 24


@dataclass(frozen=True)
class Signature:
    """What a change of a file changes.

    A program can set the time of modification back but not the time of the last change of the entry (``ctime_ns``).
    """

    path: str
    bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> Signature:
        place = path.resolve()
        status = place.stat()
        return cls(str(place), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)

    @property
    def holds(self) -> bool:
        """True if the file still exists with this signature."""
        try:
            return Signature.of(Path(self.path)) == self
        except OSError:
            return False

    @property
    def is_settled(self) -> bool:
        return max(self.mtime_ns, self.ctime_ns) / 1e9 + SETTLED < time.time()


def content_hash(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as stream, progress_bar(path.stat().st_size, f"reading {path.name}", unit="B") as shown:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
            done += len(chunk)
            shown.to(done)
    return digest.hexdigest()


ENDING = ".gguf"
MOST_LISTED = 12


def gguf_file(config: ModelConfig) -> Path | None:
    """The GGUF file that a configuration names; None for a model in another form.

    A file is taken for one whatever its name, so that the reader can word what it is instead. In a folder without
    ``config.json`` the only GGUF file is meant.
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
        return path
    if config.gguf_file and not _is_path(name):
        return file_of(name, config.gguf_file, config.revision)
    if config.gguf_file or path.suffix.lower() == ENDING:
        raise ModelError(f"{name} does not exist: give the path of a GGUF file, or a folder and --gguf-file")
    return None


def _is_path(name: str) -> bool:
    return Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") > 1


def _in_folder(folder: Path, name: str | None) -> Path | None:
    if name is None and (folder / "config.json").is_file():
        return None
    there = sorted(path for path in folder.iterdir() if path.suffix.lower() == ENDING and path.is_file())
    if name is not None:
        if (folder / name).is_file():
            return folder / name
        raise ModelError(f"{folder} holds no file {name}: it holds {_listed(there)}")
    if len(there) > 1:
        raise ModelError(f"{folder} holds several GGUF files: choose one with --gguf-file, of {_listed(there)}")
    return there[0] if there else None


def _listed(files: list[Path]) -> str:
    names = [path.name for path in files[:MOST_LISTED]] + ["…"] * (len(files) > MOST_LISTED)
    return ", ".join(names) or "no GGUF file"


MANIFEST = "gguf.json"
WEIGHTS = "model.safetensors"
PLAN, REST = "packed.json", "rest.safetensors"
"""File names of the plan of packed weights and of all other weights."""
FORMAT = 1
PACKING = 3
"""Incremented whenever matmuls take more formats, so that packed weights are searched for again."""
MOST_SEEN = 16
"""Maximum signatures kept: one for each location of the same file, such as a copy."""
KEYS = ("sha256", "transformers", "files", "seen")


@dataclass(frozen=True)
class Manifest:
    sha256: str
    """SHA-256 of the GGUF file."""
    transformers: str
    """Version of transformers that read the file: others may read it differently."""
    files: dict[str, int]
    """Bytes of each file of the folder. The weights, expanded or for packed use, are added when they are needed."""
    seen: tuple[Signature, ...] = ()
    """Files known to have this content."""
    packing: int = 0
    """The ``PACKING`` by which packed weights were looked for."""
    slow: str = ""
    """Which weights aren't computed in their blocks, in words; empty if all are."""
    format: int = FORMAT

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """The manifest of a folder if all its files exist, or None."""
        try:
            row = json_object(folder / MANIFEST)
            seen = tuple(Signature(**fields) for fields in row["seen"])
            manifest = cls(
                row["sha256"],
                row["transformers"],
                dict(row["files"]),
                seen,
                row.get("packing", 0),
                str(row.get("slow", "")),
                row["format"],
            )
            whole = all((folder / name).stat().st_size == size for name, size in manifest.files.items())
        except (OSError, KeyError, TypeError, ValueError):
            return None
        return manifest if whole and manifest.format == FORMAT else None

    @property
    def has_weights(self) -> bool:
        return WEIGHTS in self.files

    @property
    def has_packed(self) -> bool:
        return PLAN in self.files and REST in self.files and self.packing == PACKING

    @property
    def is_current(self) -> bool:
        return self.transformers == metadata.version("transformers")

    def write(self, folder: Path) -> None:
        """Replace the manifest; whoever reads it afterwards sees the files that it names."""
        file = OutputFile(
            folder / MANIFEST,
            "the manifest of a converted model",
            is_json_with(KEYS, FORMAT),
            ModelError,
            "move it away",
        )
        file.write(json.dumps(asdict(self), indent=1) + "\n")

    def seen_as(self, signature: Signature) -> Manifest:
        """The manifest with one more file of this content; an older signature of the same path is dropped."""
        others = [signature_ for signature_ in self.seen if signature_.path != signature.path]
        return replace(self, seen=(*others, signature)[-MOST_SEEN:])


def manifests() -> Iterator[tuple[Path, Manifest]]:
    """The folders of all converted models that are whole, with their manifests."""
    for place in converted_models_at_home().glob(f"[!.]*/{MANIFEST}"):
        if manifest := Manifest.read(place.parent):
            yield place.parent, manifest


def remove(folder: Path, manifest: Manifest) -> None:
    """Delete the files of a converted model, the manifest first, and the folder if nothing else is in it."""
    with suppress(OSError):
        (folder / MANIFEST).unlink()
        for name in manifest.files:
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()
