"""Reads the manifests of artifacts, those of earlier versions of hdtool too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hdtool.data.file_state import FileState, States, StoredFile

MANIFEST, FORMAT = "artifact.json", 1
NUMBERS = ("bytes", "mtime_ns", "ctime_ns", "inode")
OLD_DIGITS = 16
OLD_WEIGHTS = ("model.safetensors", "packed.json", "rest.safetensors")
"""Files that earlier versions added to a converted model, before its manifest listed them."""


def _fields(row: dict[str, Any]) -> dict[str, Any]:
    if row["format"] != FORMAT:
        raise ValueError
    return {
        "kind": str(row["artifact"]),
        "identity": str(row["identity"]),
        "versions": dict(row["versions"]),
        "details": dict(row["details"]),
        "files": _files(row["files"]),
        "seen": _seen(row["seen"]),
    }


def _converted_fields(row: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a model that an earlier version converted from a GGUF file, weights included."""
    sizes = {**dict.fromkeys(OLD_WEIGHTS, 0), **row["files"]}
    return {
        "kind": "gguf",
        "identity": str(row["sha256"]),
        "versions": {"transformers": row["transformers"]},
        "details": {"fingerprint": str(row["sha256"])[:OLD_DIGITS]},
        "files": _files({name: ("", size) for name, size in sizes.items()}),
        "seen": _seen([state] for state in row["seen"]),
    }


def _quantized_fields(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": f"quantized-{row['scheme']}",
        "identity": str(row["sha256"]),
        "versions": {"transformers": row["transformers"]},
        "details": {"fingerprint": str(row["fingerprint"])},
        "files": _files(row["files"]),
        "seen": _seen(row["seen"]),
    }


def _files(row: dict[str, Any]) -> dict[str, StoredFile]:
    return {name: StoredFile(str(sha256), *map(int, fields)) for name, (sha256, *fields) in row.items()}


def _seen(row: Iterable[Any]) -> tuple[States, ...]:
    return tuple(
        tuple(FileState(str(state["path"]), *(int(state[name]) for name in NUMBERS)) for state in states)
        for states in row
    )


PARSERS = {MANIFEST: _fields, "gguf.json": _converted_fields, "quantized.json": _quantized_fields}
"""Functions that return an artifact's fields from the JSON object in a manifest, by the manifest's name."""
