"""The house rules: which room may use which, and what every file must have."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_USE = {
    "data": {"data"},
    "runtime": {"data", "runtime"},
    "builders": {"data", "runtime", "builders"},
    "cli": {"data", "runtime", "builders", "cli"},
}
FILES = [path for room in MAY_USE for path in sorted((ROOT / room).rglob("*.py"))]


def imported(path: Path) -> set[str]:
    """The rooms of ours that a file imports from, anywhere in it."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return {name.split(".")[1] for name in names if name.startswith("hdtool.")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_says_what_it_is_and_stays_in_its_room(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    assert imported(path) <= MAY_USE[room]
    assert ast.get_docstring(ast.parse(path.read_text())), "a module starts with what it is"


@pytest.mark.parametrize("room", MAY_USE)
def test_a_room_introduces_itself(room: str) -> None:
    introduction = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text()))
    assert introduction and len(introduction.split()) > 25
