"""Recognition of files that hdtool wrote, by their content and not by their name.

Each function returns whether hdtool wrote the file at a path. At most the beginning of the file is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

LARGEST_JSON = 64 << 20
"""Bytes; hdtool writes no single JSON value and no JSON line that is as large."""
PNG = b"\x89PNG\r\n\x1a\n"
PNG_ENTRY = b"tEXtSoftware\0hdtool"
PNG_METADATA = {"Software": "hdtool"}
"""The metadata by which a figure is recognised."""
HTML_ENTRY = b'<meta name="generator" content="hdtool'
MARKDOWN_ENTRY = b"<!-- hdtool report -->"
BEGINNING = 4096
"""Bytes that hold the entries above."""


def json_with(keys: Collection[str], format: int) -> Callable[[Path], bool]:
    """A JSON object with these keys and this format."""

    def is_ours(path: Path) -> bool:
        row = json_object(path)
        return row.get("format") == format and set(keys) <= row.keys()

    return is_ours


def json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if it holds none."""
    return _object(path.read_bytes()) if path.stat().st_size <= LARGEST_JSON else {}


def json_lines_with(keys: Collection[str]) -> Callable[[Path], bool]:
    """JSON lines, the first of which has exactly these keys."""

    def is_ours(path: Path) -> bool:
        with path.open("rb") as stream:
            line = stream.readline(LARGEST_JSON)
        return line.endswith(b"\n") and _object(line).keys() == set(keys)

    return is_ours


def is_own_png(path: Path) -> bool:
    start = _beginning(path)
    return start.startswith(PNG) and PNG_ENTRY in start


def is_own_html(path: Path) -> bool:
    return HTML_ENTRY in _beginning(path)


def is_own_markdown(path: Path) -> bool:
    return _beginning(path).startswith(MARKDOWN_ENTRY)


def safetensors_metadata(path: Path) -> dict[str, Any]:
    """The metadata in the header of a safetensors file; empty if it is no such file."""
    with path.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        found = _object(stream.read(size)).get("__metadata__") if size <= LARGEST_JSON else None
    return found if isinstance(found, dict) else {}


def _beginning(path: Path) -> bytes:
    with path.open("rb") as stream:
        return stream.read(BEGINNING)


def _object(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
