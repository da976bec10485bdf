"""The house rules: what each folder may import, how long a file may be, and what every file must have."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.support.project import FILES, FOLDERS, ROOT

MAY_IMPORT = {
    "data": {"data"},
    "runtime": {"data", "runtime"},
    "builders": {"data", "runtime", "builders"},
    "cli": {"data", "runtime", "builders", "cli"},
}
ABOVE_CORE = {
    *(f"runtime/{name}" for name in ("budget", "caches", "drafters", "engines", "integrations", "model", "program")),
    *(f"runtime/{name}" for name in ("stores", "target", "weights")),
}
ABOVE_MODELS = {f"runtime/{name}" for name in ("engines", "target", "drafters", "stores", "budget", "integrations")}
"""Folders that only those above models import."""
NOT_FOR = {
    "runtime/core": {*ABOVE_CORE, "runtime/generation"},
    "runtime/generation": ABOVE_CORE,
    "runtime/settings": {f"runtime/{name}" for name in ("core", "kernels", "caches", "model", "generation")}
    | ABOVE_CORE,
    "runtime/caches": {"runtime/model", "runtime/program", "runtime/weights", *ABOVE_MODELS},
    "runtime/program": {"runtime/weights", *ABOVE_MODELS},
    "runtime/weights": {"runtime/program", *ABOVE_MODELS},
    "runtime/target": {"runtime/drafters", "runtime/budget", "runtime/integrations"},
    "runtime/kernels": {"runtime/caches", "runtime/model", "runtime/program", "runtime/stores", "runtime/drafters"},
    "runtime/stores": {"runtime/model", "runtime/drafters", "runtime/integrations"},
    "runtime/model": {"runtime/engines", "runtime/drafters", "runtime/integrations"},
    "runtime/engines": {"runtime/target", "runtime/drafters", "runtime/integrations"},
    "runtime/budget": {"runtime/drafters", "runtime/integrations"},
    "runtime/drafters": {"runtime/engines", "runtime/integrations"},
    "builders/evaluation": {"runtime/integrations"},
}
"""What a folder must not import, beside what its top-level folder must not."""
MAX_LINES = 500


def module_of(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return f"hdtool.{name}".removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


def imports(path: Path, *, when_loaded: bool = False) -> Iterator[str]:
    """The modules of ours that a file imports: anywhere in it, or only when it is loaded."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if when_loaded else ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("hdtool"):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in MODULES else node.module


def folder_of(module: str) -> str:
    path = MODULES[module]
    return str(path.parent.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_says_what_it_is_and_imports_only_what_its_folder_may(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), "a module starts with what it is"
    folder = str(path.parent.relative_to(ROOT))
    found = {folder_of(name) for name in imports(path)}
    assert {name.split("/")[0] for name in found} <= MAY_IMPORT[folder.split("/")[0]]
    for own, forbidden in NOT_FOR.items():
        if f"{folder}/".startswith(f"{own}/"):
            assert not {name for name in found for other in forbidden if f"{name}/".startswith(f"{other}/")}


@pytest.mark.parametrize("folder", sorted({str(path.parent.relative_to(ROOT)) for path in FILES}))
def test_a_folder_imports_only_what_it_says(folder: str) -> None:
    introduction = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text())) or ""
    (said,) = re.findall(r"Imports\s+only ([^.]*)\.", introduction) or [""]
    own = {name: path for name, path in MODULES.items() if path.parent == ROOT / folder}
    found = {folder_of(other) for path in own.values() for other in imports(path) if other in MODULES} - {folder}
    for other in found if said else ():
        assert any(f"{other}/".startswith(f"{name}/") for name in re.findall("`([^`]+)`", said)), other


def test_no_import_goes_round_in_a_circle() -> None:
    graph = {name: set(imports(path, when_loaded=True)) & MODULES.keys() for name, path in MODULES.items()}
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize(
    "parent", sorted({str(folder.relative_to(ROOT)) for path in FILES for folder in path.parents[1:-3]})
)
def test_no_folders_in_a_folder_import_each_other(parent: str) -> None:
    """The modules that lie in the folder itself count as one more folder in it."""
    graph: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        if part := part_of(parent, name):
            others = {part_of(parent, other) for other in imports(path) if other in MODULES}
            graph.setdefault(part, set()).update(filter(None, others - {part}))
    TopologicalSorter(graph).prepare()


def part_of(parent: str, module: str) -> str:
    """The subfolder of a folder with a module, the folder itself, or an empty string for modules elsewhere."""
    folder = f"{folder_of(module)}/"
    return f"{parent}/{folder.removeprefix(f'{parent}/').split('/')[0]}" if folder.startswith(f"{parent}/") else ""


@pytest.mark.parametrize("folder", sorted({str(path.parent.relative_to(ROOT)) for path in FILES}))
def test_a_folder_introduces_itself(folder: str) -> None:
    introduction = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text()))
    assert introduction and len(introduction.split()) > 10


def test_the_top_level_holds_the_four_folders_and_the_public_interface() -> None:
    assert {path.parts[-2] for path in ROOT.glob("*/py.typed")} == {*FOLDERS, "hdtool"}
    assert [path.name for path in (ROOT / "hdtool").glob("*.py")] == ["__init__.py"]


def test_tests_do_not_import_tests() -> None:
    """What several of them need is in ``tests/support``."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                assert ".test_" not in f".{node.module}", f"{path.relative_to(ROOT)} imports {node.module}"


def test_no_file_is_too_long() -> None:
    assert not [path for path in FILES if len(path.read_text(encoding="utf-8").splitlines()) > MAX_LINES]
