"""Identifies GGUF files by path and content, and keeps a manifest for each converted model."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator
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

MIN_SETTLED_AGE = 2.0
"""Minimum age of a file's last change in seconds before its hash is remembered.

A younger file may change again within one tick of the file system's clock and keep its signature.
"""
CHUNK = 1 << 24


@dataclass(frozen=True)
class Signature:
    """Path and metadata of a file; any change to the file changes its metadata.

    A program can reset the modification time (``mtime_ns``), but not the time of the last inode change (``ctime_ns``).
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
        return max(self.mtime_ns, self.ctime_ns) / 1e9 + MIN_SETTLED_AGE < time.time()


def content_hash(path: Path) -> str:
    """Return a file's SHA-256 as a hexadecimal string; show a progress bar meanwhile."""
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as stream, progress_bar(path.stat().st_size, f"reading {path.name}", unit="B") as shown:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
            done += len(chunk)
            shown.to(done)
    return digest.hexdigest()


GGUF_SUFFIX = ".gguf"
MAX_LISTED = 12


def gguf_file(config: ModelConfig) -> Path | None:
    """Return the GGUF file that a configuration names, or None for a model in another format.

    An existing file is returned whatever its suffix, so that the GGUF reader can say what is wrong with it. In a folder
    without ``config.json``, the only GGUF file is chosen. A file on the hub is downloaded.
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
    if config.gguf_file or path.suffix.lower() == GGUF_SUFFIX:
        raise ModelError(f"{name} does not exist: give the path of a GGUF file, or a folder and --gguf-file")
    return None


def _is_path(name: str) -> bool:
    return Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") > 1


def _in_folder(folder: Path, name: str | None) -> Path | None:
    if name is None and (folder / "config.json").is_file():
        return None
    there = sorted(path for path in folder.iterdir() if path.suffix.lower() == GGUF_SUFFIX and path.is_file())
    if name is not None:
        if (folder / name).is_file():
            return folder / name
        raise ModelError(f"{folder} holds no file {name}: it holds {_listed(there)}")
    if len(there) > 1:
        raise ModelError(f"{folder} holds several GGUF files: choose one with --gguf-file, of {_listed(there)}")
    return there[0] if there else None


def _listed(files: list[Path]) -> str:
    names = [path.name for path in files[:MAX_LISTED]] + ["…"] * (len(files) > MAX_LISTED)
    return ", ".join(names) or "no GGUF file"


MANIFEST = "gguf.json"
WEIGHTS = "model.safetensors"
PLAN, REST = "packed.json", "rest.safetensors"
"""Names of the files with the packing plan and with all weights that aren't packed."""
WEIGHT_FILES = (WEIGHTS, PLAN, REST)
FORMAT = 1
PACKING = 4
"""Version of packing plans, incremented when matmuls support more formats so that plans are made again."""
MAX_SEEN = 16
"""Maximum number of signatures that a manifest keeps: one for each path of a file with the converted content."""
KEYS = ("sha256", "transformers", "files", "seen")


@dataclass(frozen=True)
class Manifest:
    sha256: str
    """SHA-256 of the GGUF file."""
    transformers: str
    """Version of transformers that converted the file; other versions may read the file differently."""
    files: dict[str, int]
    """Size in bytes of each file in the folder. Expanded or packed weights are added when they are first needed."""
    seen: tuple[Signature, ...] = ()
    """Signatures of the files known to have the converted content."""
    packing: int = 0
    """Value of ``PACKING`` when the packing plan was made; 0 without a plan."""
    slow: str = ""
    """Description of the quantized weights that are computed in float32; empty if there are none."""
    format: int = FORMAT

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """Return the manifest stored in a folder.

        Return None if it is missing, damaged or in another format, or if a file that it lists is missing, resized or
        outside the folder.
        """
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
            whole = all(
                is_file_name(name) and (folder / name).stat().st_size == size for name, size in manifest.files.items()
            )
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
        """Write the manifest to a folder, replacing the old one. The files that it names must already be in place."""
        file = OutputFile(
            folder / MANIFEST,
            "the manifest of a converted model",
            is_json_with(KEYS, FORMAT),
            ModelError,
            "move it away",
        )
        file.write(json.dumps(asdict(self), indent=1) + "\n")

    def seen_as(self, signature: Signature) -> Manifest:
        """Return a copy with a file's signature added to ``seen``, in place of any older signature of the same path."""
        others = [signature_ for signature_ in self.seen if signature_.path != signature.path]
        return replace(self, seen=(*others, signature)[-MAX_SEEN:])


def manifests() -> Iterator[tuple[Path, Manifest]]:
    """Yield the folder and the manifest of each complete converted model in hdtool's home."""
    for place in converted_models_at_home().glob(f"[!.]*/{MANIFEST}"):
        if manifest := Manifest.read(place.parent):
            yield place.parent, manifest


def remove(folder: Path, manifest: Manifest) -> None:
    """Delete a converted model's files, the manifest first, and its folder if that is then empty.

    Raise an ``OSError`` if a file cannot be deleted.
    """
    # A conversion that was killed may have written weights that the manifest does not list.
    remove_files(folder, dict.fromkeys((MANIFEST, *manifest.files, *WEIGHT_FILES)))


def is_file_name(name: str) -> bool:
    """Return True if a name from a manifest is that of a file in the manifest's folder."""
    return Path(name).name == name and name not in ("", "..") and "\0" not in name


def remove_files(folder: Path, names: Iterable[str]) -> None:
    """Delete the named files from a folder in order, then the folder if it is empty.

    Raise the first ``OSError`` once all files that can be deleted are.
    """
    errors: list[OSError] = []
    for name in names:
        try:
            (folder / name).unlink(missing_ok=True)
        except OSError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    with suppress(OSError):
        folder.rmdir()
