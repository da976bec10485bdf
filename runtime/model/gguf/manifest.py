"""The manifest of a converted model: what it was made from and which files make it whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path

from hdtool.data.errors import ModelError
from hdtool.data.files.atomic_write import OutputFile
from hdtool.data.files.ownership import json_object, json_with
from hdtool.data.stores.home import converted_models
from hdtool.runtime.model.gguf.file_identity import Signature

MANIFEST = "gguf.json"
WEIGHTS = "model.safetensors"
PLAN, REST = "packed.json", "rest.safetensors"
"""Where the file has the weights that stay packed, and all others."""
FORMAT = 1
PACKING = 3
"""Raised whenever products take more formats: what stays packed is looked for again then."""
MOST_SEEN = 16
"""Signatures kept: one for each place of the same file, such as a copy."""
KEYS = ("sha256", "transformers", "files", "seen")


@dataclass(frozen=True)
class Manifest:
    sha256: str
    """Of the GGUF file."""
    transformers: str
    """The version that read the file: another one may read it differently."""
    files: dict[str, int]
    """Bytes of each file of the folder. The weights, expanded or for packed use, are added when they are needed."""
    seen: tuple[Signature, ...] = ()
    """Files that are known to have this content."""
    packing: int = 0
    """The ``PACKING`` by which packed weights were looked for."""
    slow: str = ""
    """Which weights are not computed with as they are, in words; empty if all are."""
    format: int = FORMAT

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """The manifest of a folder if all files that it names are there; None otherwise."""
        try:
            row = json_object(folder / MANIFEST)
            seen = tuple(Signature(**one) for one in row["seen"])
            found = cls(
                row["sha256"],
                row["transformers"],
                dict(row["files"]),
                seen,
                row.get("packing", 0),
                str(row.get("slow", "")),
                row["format"],
            )
            whole = all((folder / name).stat().st_size == size for name, size in found.files.items())
        except (OSError, KeyError, TypeError, ValueError):
            return None
        return found if whole and found.format == FORMAT else None

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
            folder / MANIFEST, "the manifest of a converted model", json_with(KEYS, FORMAT), ModelError, "move it away"
        )
        file.write(json.dumps(asdict(self), indent=1) + "\n")

    def seen_as(self, signature: Signature) -> Manifest:
        """The manifest with one more file of this content; an older signature of the same path is dropped."""
        others = [one for one in self.seen if one.path != signature.path]
        return replace(self, seen=(*others, signature)[-MOST_SEEN:])


def manifests() -> Iterator[tuple[Path, Manifest]]:
    """The folders of all converted models that are whole, with their manifests."""
    for place in converted_models().glob(f"[!.]*/{MANIFEST}"):
        if found := Manifest.read(place.parent):
            yield place.parent, found


def remove(folder: Path, manifest: Manifest) -> None:
    """Delete the files of a converted model, the manifest first, and the folder if nothing else is in it."""
    with suppress(OSError):
        (folder / MANIFEST).unlink()
        for name in manifest.files:
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()
