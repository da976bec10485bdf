"""The house rules: what each folder may import, how small a file may be, and what every file must have."""

from __future__ import annotations

import ast
from collections.abc import Iterator
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
    f"runtime/{name}" for name in ("model", "engines", "weights", "drafters", "budget", "stores", "integrations")
}
NOT_FOR = {
<<<<<<< ours
    "runtime/core": {
        f"runtime/{name}" for name in ("model", "engines", "weights", "drafters", "budget", "stores", "integrations")
    },
    "runtime/kernels": {"runtime/caches", "runtime/model", "runtime/program", "runtime/stores", "runtime/drafters"},
||||||| base
    "runtime/core": {
        f"runtime/{name}" for name in ("model", "engines", "weights", "drafters", "budget", "stores", "integrations")
    },
    "runtime/kernels": {"runtime/model", "runtime/stores", "runtime/drafters"},
=======
    "runtime/core": {*ABOVE_CORE, "runtime/generation"},
    "runtime/generation": ABOVE_CORE,
    "runtime/kernels": {"runtime/model", "runtime/stores", "runtime/drafters"},
>>>>>>> theirs
    "runtime/stores": {"runtime/model", "runtime/drafters", "runtime/integrations"},
    "runtime/model": {"runtime/engines", "runtime/drafters", "runtime/integrations"},
    "runtime/engines": {"runtime/target", "runtime/drafters", "runtime/integrations"},
    "runtime/budget": {"runtime/drafters", "runtime/integrations"},
    "runtime/drafters": {"runtime/integrations"},
    "builders/evaluation": {"runtime/integrations"},
}
"""What a folder must not import, beside what its top-level folder must not."""
KNOTS = (
    {
<<<<<<< ours
        *("runtime", "runtime/budget", "runtime/target", "runtime/drafters"),
        *(f"runtime/drafters/{name}" for name in ("heads", "hierarchy", "published", "trained")),
||||||| base
        "runtime",
        *(f"runtime/{name}" for name in ("budget", "engines", "engines/cpu", "engines/cpu/mixers", "engines/cuda")),
        *(f"runtime/{name}" for name in ("model", "model/cache", "model/checks", "model/recurrent", "weights")),
        "runtime/drafters",
        *(f"runtime/drafters/{name}" for name in ("heads", "hierarchy", "published", "trained")),
=======
        *(f"runtime/{name}" for name in ("engines", "engines/cpu", "engines/cpu/mixers", "engines/cuda")),
        *(f"runtime/{name}" for name in ("model", "model/cache", "model/checks", "model/recurrent", "weights")),
>>>>>>> theirs
    },
)
"""Folders that still import each other; no other folder may, and each of these sets may only shrink."""


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


def test_no_import_goes_round_in_a_circle() -> None:
    graph = {name: set(imports(path, when_loaded=True)) & MODULES.keys() for name, path in MODULES.items()}
    while free := {name for name, needed in graph.items() if not needed}:
        graph = {name: needed - free for name, needed in graph.items() if name not in free}
    assert not graph, f"these import each other: {sorted(graph)}"


def test_folders_import_each_other_only_where_known() -> None:
    graph: dict[str, set[str]] = {folder_of(name): set() for name in MODULES}
    for name, path in MODULES.items():
        graph[folder_of(name)] |= {folder_of(other) for other in imports(path) if other in MODULES} - {folder_of(name)}

    def reached_from(folder: str) -> set[str]:
        reached: set[str] = set()
        new = {folder}
        while new:
            new = set().union(*(graph[each] for each in new)) - reached
            reached |= new
        return reached

    reached = {folder: reached_from(folder) for folder in graph}
    knots = {
        frozenset(other for other in others if folder in reached[other])
        for folder, others in reached.items()
        if folder in others
    }
    assert knots == set(map(frozenset, KNOTS))


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
