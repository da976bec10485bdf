"""The manifest of a quantized checkpoint in hdtool's home: what it was made from, and what its files hold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from hdtool.data.errors import ModelError
from hdtool.data.files.atomic_write import OutputFile
from hdtool.data.files.kept_folder import lock_of
from hdtool.data.files.locking import exclusive
from hdtool.data.files.ownership import json_object, json_with
from hdtool.data.stores.home import quantized_models
from hdtool.runtime.model.gguf.file_identity import Signature, content_hash

MANIFEST = "quantized.json"
FORMAT = 1
KEYS = ("scheme", "sha256", "fingerprint", "transformers", "files", "kinds", "seen")
MOST_SEEN = 16
Sources = tuple[Signature, ...]
"""The files of a checkpoint."""


class KeptFile(NamedTuple):
    """A file of the folder: its content, and what shows that it was not written since."""

    sha256: str
    bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path, sha256: str) -> KeptFile:
        found = path.stat()
        return cls(sha256, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)

    def is_at(self, path: Path) -> bool:
        found = path.stat()
        if KeptFile.of(path, self.sha256) == self:
            return True
        return found.st_size == self.bytes and content_hash(path) == self.sha256


@dataclass(frozen=True)
class QuantizedManifest:
    scheme: str
    sha256: str
    """Of the checkpoint."""
    fingerprint: str
    """Of the checkpoint, by which stores are found."""
    transformers: str
    """The version that read the checkpoint."""
    files: dict[str, KeptFile]
    kinds: dict[str, str]
    """The format of each weight in blocks."""
    seen: tuple[Sources, ...] = ()
    """Files that are known to have this content."""
    format: int = FORMAT

    @classmethod
    def read(cls, folder: Path) -> QuantizedManifest | None:
        """The manifest of a folder; None without one that is whole."""
        try:
            row = json_object(folder / MANIFEST)
            seen = tuple(tuple(Signature(**one) for one in sources) for sources in row.pop("seen"))
            files = {name: KeptFile(*one) for name, one in row.pop("files").items()}
            found = cls(**row, files=files, seen=seen)
        except (OSError, KeyError, TypeError, ValueError):
            return None
        return found if found.format == FORMAT else None

    def is_of(self, scheme: str) -> bool:
        return self.scheme == scheme and self.transformers == metadata.version("transformers")

    def is_whole(self, folder: Path) -> bool:
        """Whether all files are there and have their content."""
        try:
            return all(file.is_at(folder / name) for name, file in self.files.items())
        except OSError:
            return False

    def seen_as(self, sources: Sources) -> QuantizedManifest:
        paths = [one.path for one in sources]
        others = [one for one in self.seen if [other.path for other in one] != paths]
        return replace(self, seen=(*others, sources)[-MOST_SEEN:])

    def in_folder(self, folder: Path) -> QuantizedManifest:
        """The manifest with files of known content as they are in a folder."""
        return replace(self, files={name: KeptFile.of(folder / name, file.sha256) for name, file in self.files.items()})

    def write(self, folder: Path) -> None:
        ours = json_with(KEYS, FORMAT)
        file = OutputFile(folder / MANIFEST, "the manifest of a quantized model", ours, ModelError, "move it away")
        file.write(json.dumps(asdict(self), indent=1) + "\n")


def quantized_manifests() -> Iterator[tuple[Path, QuantizedManifest]]:
    """The folders of all quantized models, with their manifests."""
    for place in quantized_models().glob(f"[!.]*/{MANIFEST}"):
        if found := QuantizedManifest.read(place.parent):
            yield place.parent, found


def remove(folder: Path) -> None:
    """Delete the files of a quantized model, the manifest first, and the folder if nothing else is in it."""
    manifest = QuantizedManifest.read(folder)
    with suppress(OSError):
        (folder / MANIFEST).unlink()
        for name in manifest.files if manifest else ():
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def remove_quantized(folder: Path) -> None:
    """Delete a quantized model; it is made again when it is needed."""
    with exclusive(lock_of(folder), ModelError(f"another process quantizes to {folder}: wait for it")):
        remove(folder)
    lock_of(folder).unlink(missing_ok=True)
