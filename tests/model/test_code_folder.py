"""Compiled code: which folder keeps it, and functions that are called from Python and from compiled code."""

from __future__ import annotations

import os
from pathlib import Path

import numba
import numpy as np
import pytest

from hdtool.runtime.kernels import code_folder
from hdtool.runtime.kernels.code_folder import KEPT_FOLDERS, digest_of, is_compiled, mark_compiled, remove_outdated
from hdtool.runtime.kernels.compiled import array_at, compiled


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name, source in {
        "runtime/kernels/sum.py": "import numba",
        "builders/build.py": "from hdtool.runtime.kernels.compiled import compiled",
        "runtime/core/loop.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    return tmp_path


def test_the_same_sources_installed_again_find_their_code(package: Path) -> None:
    before = digest_of(package)
    (package / "runtime" / "loop.py").write_text("# nothing of it is compiled")
    for file in package.rglob("*.py"):
        os.utime(file, (2e9, 2e9))
    assert digest_of(package) == before


@pytest.mark.parametrize("name", ["runtime/kernels/sum.py", "builders/build.py"])
def test_no_code_of_another_release_is_found(package: Path, name: str) -> None:
    """numba itself looks at the file of the caller only."""
    before = digest_of(package)
    (package / name).write_text((package / name).read_text() + "\n")
    assert digest_of(package) != before


def test_other_processors_and_releases_of_numba_have_folders_of_their_own(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = digest_of(package)
    monkeypatch.setattr(numba, "__version__", "0.0.1")
    assert digest_of(package) != before
    monkeypatch.undo()
    monkeypatch.setattr(code_folder._config, "CPU_NAME", "another")
    assert digest_of(package) != before


def test_code_is_kept_in_the_home_or_where_numba_is_told_to(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(code_folder._config, "CACHE_DIR", str(tmp_path / "numba"))
    assert code_folder.code_folder.__wrapped__().parent == tmp_path / "numba"
    monkeypatch.setattr(code_folder._config, "CACHE_DIR", "")
    assert code_folder.code_folder.__wrapped__().parent == home / "compiled"


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(code_folder._config, "CACHE_DIR", str(tmp_path))
    folder = tmp_path / "hdtool-current"
    monkeypatch.setattr(code_folder, "code_folder", lambda: folder)
    return folder


def test_a_part_is_compiled_once_it_is_marked(folder: Path) -> None:
    assert not is_compiled("passes")
    mark_compiled("passes")
    assert is_compiled("passes") and not is_compiled("drafter")


def test_a_folder_that_cannot_be_written_is_no_error(folder: Path) -> None:
    folder.write_text("a file in its place")
    mark_compiled("passes")
    assert not is_compiled("passes")


def test_the_folders_of_the_oldest_releases_are_removed_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    folder.mkdir()
    (tmp_path / "notes").mkdir()
    for age in range(5):
        other = tmp_path / f"hdtool-{age}"
        other.mkdir()
        os.utime(other, (1e9 - age, 1e9 - age))
    remove_outdated()
    kept = {"notes", "hdtool-current", *(f"hdtool-{age}" for age in range(KEPT_FOLDERS - 1))}
    assert {path.name for path in tmp_path.iterdir()} == kept


@compiled
def _half(number: int) -> int:
    if number % 2:
        raise ValueError("odd")
    return number // 2


@compiled
def _quarter(number: int) -> int:
    return _half(_half(number))


def test_a_function_serves_compiled_callers_and_python() -> None:
    assert (_quarter(12), _half(6), _half(int(np.int32(6))), _quarter(12)) == (3, 3, 3, 3)
    assert _half(8) == 4


def test_errors_of_callees_reach_python() -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="odd"):
            _quarter(6)


@compiled
def _last_of(address: int, rows: int) -> tuple[int, int]:
    table, flat = array_at(address, (rows, 2, 3), np.int32), array_at(address, rows * 6, np.int32)
    table[0, 1, 2] = 50
    return table[rows - 1, 1, 2], flat.sum()


def test_memory_is_seen_as_an_array() -> None:
    numbers = np.arange(24, dtype=np.int32)
    assert _last_of(numbers.ctypes.data, 4) == (23, numbers.sum())
    assert numbers[5] == 50
