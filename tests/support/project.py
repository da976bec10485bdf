"""Paths of the project's source files."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("builders", "cli", "data", "runtime")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
