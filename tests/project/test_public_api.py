"""What ``import hdtool`` offers: the names of the docs, and nothing heavy before one is used."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import hdtool
from hdtool.data import demo
from hdtool.data.errors import StoreError
from hdtool.runtime.stores.corpus_index import CorpusIndex
from hdtool.runtime.stores.model_store import ModelStore
from tests.support.project import ROOT, blocks_of

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_every_public_name_can_be_imported() -> None:
    assert sorted(hdtool.__all__) == hdtool.__all__
    for name in hdtool.__all__:
        assert getattr(hdtool, name)
        assert name in dir(hdtool)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hdtool.nothing  # noqa: B018


def test_the_version_is_that_of_the_installation() -> None:
    assert hdtool.__version__ == metadata.version("hdtool")


def test_the_programs_of_the_docs_import_public_names() -> None:
    programs = [
        program
        for page in PAGES
        for program in blocks_of(page.read_text("utf-8"), "python")
        if "from hdtool import" in program
    ]
    imports = [
        node for program in programs for node in ast.walk(ast.parse(program)) if isinstance(node, ast.ImportFrom)
    ]
    shown = {alias.name for node in imports if node.module == "hdtool" for alias in node.names}
    assert shown <= set(hdtool.__all__)


@pytest.mark.parametrize("folder", [ROOT, ROOT.parent])
def test_importing_it_is_light_from_anywhere(folder: Path) -> None:
    """From the checkout's own folder too, where ``hdtool/`` is found before an installation."""
    program = (
        "import sys, hdtool, hdtool.cli, hdtool.data.errors; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_plugins_are_light() -> None:
    """Engines import them in each of their processes. (That of ``llm`` has tests of its own.)"""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    plugins = [place for name, group in points.items() if name != "llm" for place in group.values()]
    assert len(plugins) == 1
    program = (
        "import sys, pkgutil\nfor name in sys.argv[1:]: assert callable(pkgutil.resolve_name(name))\n"
        "print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program, *plugins], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_what_loads_a_model_imports_few_modules() -> None:
    """Captured passes, proofs, GGUF files and stores are imported where they are used."""
    program = (
        "import sys, hdtool.runtime.target.load\n"
        "places = [str(m.__file__) for name, m in sys.modules.items() if name.split('.')[0] == 'hdtool']\n"
        "print(sum(not place.endswith('__init__.py') for place in places))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) <= 80


def test_a_store_of_either_kind_is_opened(tmp_path: Path) -> None:
    assert isinstance(hdtool.open_store(demo.MODEL_STORE), ModelStore)
    assert isinstance(hdtool.open_store(str(demo.CORPUS_INDEX)), CorpusIndex)
    with pytest.raises(StoreError, match="holds no store"):
        hdtool.open_store(tmp_path)
