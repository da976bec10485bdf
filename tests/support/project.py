"""Paths of the project's source files, and the code on its pages."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("builders", "cli", "data", "runtime")
FENCED = re.compile(r"^(`{3,})(\w*)\n(.*?)^\1$", re.DOTALL | re.MULTILINE)
"""A block of code: its fence, its language and its lines."""
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def blocks_of(text: str, language: str) -> list[str]:
    """Return a page's fenced blocks in ``language``, which is empty for commands and what they print."""
    return [block for _, found, block in FENCED.findall(text) if found == language]
