"""Recognize by their content the files that hdtool wrote, reading at most ``MAX_JSON_BYTES`` of each."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 64 << 20
"""Maximum size in bytes of the JSON values and lines that are read to recognize a file."""
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
PNG_ENTRY = b"tEXtSoftware\0hdtool"
PNG_METADATA = {"Software": "hdtool"}
"""Metadata by which hdtool recognizes its own figures."""
HTML_ENTRY = b'<meta name="generator" content="hdtool'
MARKDOWN_ENTRY = b"<!-- hdtool report -->"
HEAD_BYTES = 4096
"""Number of bytes at the start of a file that are searched for hdtool's marks."""


def is_json_with(keys: Collection[str], format: int) -> Callable[[Path], bool]:
    """Return a function that checks if a file holds a JSON object with this format number and at least these keys."""

    def is_ours(path: Path) -> bool:
        row = json_object(path)
        return row.get("format") == format and set(keys) <= row.keys()

    return is_ours


def json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object that a file holds, or an empty dict if it holds none or is too large."""
    return _object(path.read_bytes()) if path.stat().st_size <= MAX_JSON_BYTES else {}


def is_json_lines_with(keys: Collection[str]) -> Callable[[Path], bool]:
    """Return a function that checks if a file's first line is a JSON object with exactly these keys."""

    def is_ours(path: Path) -> bool:
        with path.open("rb") as stream:
            line = stream.readline(MAX_JSON_BYTES)
        return line.endswith(b"\n") and _object(line).keys() == set(keys)

    return is_ours


def is_own_png(path: Path) -> bool:
    start = _head(path)
    return start.startswith(PNG_MAGIC) and PNG_ENTRY in start


def is_own_html(path: Path) -> bool:
    return HTML_ENTRY in _head(path)


def is_own_markdown(path: Path) -> bool:
    return _head(path).startswith(MARKDOWN_ENTRY)


def safetensors_metadata(path: Path) -> dict[str, Any]:
    """Return a safetensors file's metadata, or an empty dict if the file has none or is of another format."""
    with path.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        metadata = _object(stream.read(size)).get("__metadata__") if size <= MAX_JSON_BYTES else None
    return metadata if isinstance(metadata, dict) else {}


def _head(path: Path) -> bytes:
    with path.open("rb") as stream:
        return stream.read(HEAD_BYTES)


def _object(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
