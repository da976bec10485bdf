"""What `pip install .` gives: every package, the demo with its model, the command."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from hdtool.data import demo
from hdtool.data.stores.store_file_names import MANIFEST
from hdtool.data.stores.store_folder import read_manifest
from tests.support.project import FOLDERS, ROOT


def test_the_package_list_names_every_folder() -> None:
    """A package that is not listed works in an editable install and vanishes from the wheel."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {path.parent for room in FOLDERS for path in (ROOT / room).rglob("__init__.py")}
    names = [f"hdtool.{'.'.join(folder.relative_to(ROOT).parts)}" for folder in folders]
    assert sorted(listed) == sorted(["hdtool", *names])


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    # Built from a copy: setuptools leaves folders behind where it works.
    source = out / "source"
    copied = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True
    )
    for name in copied.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        str(source),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return next(out.glob("hdtool-*.whl"))


@pytest.mark.long
def test_the_wheel_holds_the_demo_and_stays_small(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for needed in (
        "__init__.py",
        "py.typed",
        "cli/app.py",
        "data/py.typed",
        "data/demo/prompts.jsonl",
        "runtime/integrations/server/page.html",
        "data/demo/model/model.safetensors",
        *(f"data/demo/hybrid/{path.name}" for path in demo.HYBRID.iterdir()),
    ):
        assert f"hdtool/{needed}" in names
    assert all(name.startswith("hdtool") for name in names), "nothing else lands in site-packages"
    assert any(name.endswith("licenses/LICENSE") for name in names)
    for store in (demo.MODEL_STORE, demo.CORPUS_INDEX):
        folder = f"hdtool/{store.relative_to(ROOT).as_posix()}/"
        shipped = {name.removeprefix(folder) for name in names if name.startswith(folder)}
        assert shipped == {MANIFEST, *(file.name for file in read_manifest(store).files.values())}
    for model, most in ((demo.MODEL, 32), (demo.HYBRID, 12)):
        assert sum(path.stat().st_size for path in model.iterdir()) < most * 2**20


@pytest.mark.long
def test_an_installed_wheel_answers_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    """In a virtual environment of its own that borrows the dependencies, but not this checkout."""
    place = tmp_path / "elsewhere"
    venv.create(place, with_pip=False, symlinks=True)
    binaries = place / ("Scripts" if sys.platform == "win32" else "bin")
    python = binaries / "python"
    purelib = Path(sysconfig.get_path("purelib", vars={"base": str(place), "platbase": str(place)}))
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", str(wheel)],
        check=True, capture_output=True,
    )  # fmt: skip
    # A path added by a .pth file has its own .pth files ignored, so the editable install stays out of sight.
    (purelib / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    answer = subprocess.run(
        [binaries / "hdtool", "generate", "--prompt", "What is a tuple?", "--max-new-tokens", "5", "--json",
         "--method", "pld"],  # compiling all of `hd` takes a minute
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["tokens"] == 5
    where = subprocess.run(
        [python, "-c", "from hdtool import __version__; import hdtool.cli.app; print(hdtool.cli.app.__file__)"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert Path(where.stdout.strip()).is_relative_to(place)
