"""Artifact whose content is its joined source files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hdtool.data.artifact import Artifact, made_once

NOTES = "in order"


def join(folder: Path, *sources: Path) -> dict[str, Any]:
    (folder / "content").write_bytes(b"".join(file.read_bytes() for file in sources))
    (folder / "notes").write_text(NOTES)
    return {"fingerprint": "89abcdef"}


def joined(
    source: Path, *, kind: str = "joined", version: int = 1, make: Callable[..., dict[str, Any]] = join
) -> Artifact:
    """Return the artifact of a file, whose fingerprint is the file's first byte."""
    fingerprint, activity = source.read_bytes()[:1].hex(), f"joining {source.name} in"
    versions = {"joiner": version}
    return made_once(kind, source.stem, versions, [source], fingerprint, activity, lambda place: make(place, source))
