"""Reads the manifests that earlier versions of hdtool wrote for what they made from GGUF files and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hdtool.data.output_files import json_object

UNLISTED = ("model.safetensors", "packed.json", "rest.safetensors")


def earlier_manifest(folder: Path) -> dict[str, Any]:
    """Return the content of an earlier manifest in the form of an artifact's; raise an error if there is none."""
    manifest = folder / ("gguf.json" if (folder / "gguf.json").is_file() else "quantized.json")
    row = json_object(manifest)
    names = (*row["files"], *UNLISTED, manifest.name)
    return {
        "kind": f"quantized-{row['scheme']}" if "scheme" in row else "gguf",
        "versions": {"transformers": row["transformers"]},
        "identity": row["sha256"],
        "sources": [state for group in row["seen"] for state in (group if isinstance(group, list) else [group])],
        "details": {"fingerprint": row.get("fingerprint", row["sha256"])[:16]},
        "files": {file.name: [file.stat().st_size, 0] for file in map(folder.joinpath, names) if file.is_file()},
    }
