"""Compiling in another process: what begins it, what is said, and a process that fails or hangs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hdtool.runtime import compile_process
from hdtool.runtime.compile_process import (
    DRAFTER,
    PASSES,
    CompileProcess,
    core_left_free,
    is_compiling,
    start_compiling,
    wait_until_compiled,
)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The file of the program that compiles; nothing is compiled yet, and this machine has two cores."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(compile_process, "PROGRAM", "compiles")
    monkeypatch.setattr(compile_process, "is_compiled", lambda part: False)
    monkeypatch.setattr(compile_process, "_cores", lambda: 2)
    processes: list[CompileProcess] = []
    monkeypatch.setattr(compile_process, "_processes", processes)
    yield tmp_path / "compiles.py"
    for process in processes:
        process._reader.join()


def test_progress_is_followed_part_by_part(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program.write_text("import sys\nfor _ in range(3): print('passes', flush=True)\nsys.stdin.read()\nprint('drafter')")
    start_compiling(DRAFTER, PASSES)
    wait_until_compiled(PASSES)
    wait_until_compiled(DRAFTER)
    assert not is_compiling(PASSES) and not is_compiling(DRAFTER)
    assert "compiled forward passes for this processor, once: waited" in capsys.readouterr().err


def test_only_what_is_missing_is_compiled_and_only_beside_another_core(
    program: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program.write_text("import sys\nwith open(sys.argv[0] + '.parts', 'a') as file: file.write(' '.join(sys.argv[1:]))")
    monkeypatch.setattr(compile_process, "_cores", lambda: 1)
    start_compiling(PASSES, DRAFTER)
    monkeypatch.setattr(compile_process, "_cores", lambda: 2)
    monkeypatch.setattr(compile_process, "is_compiled", lambda part: True)
    start_compiling(PASSES, DRAFTER)
    start_compiling()
    assert compile_process._processes == []
    monkeypatch.setattr(compile_process, "is_compiled", lambda part: part == PASSES)
    start_compiling(PASSES, DRAFTER)
    start_compiling(PASSES, DRAFTER)
    wait_until_compiled(DRAFTER)
    assert Path(f"{program}.parts").read_text() == DRAFTER


def test_torch_leaves_a_core_to_the_compiler_while_a_model_is_loaded(program: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with core_left_free():
            assert torch.get_num_threads() == 2
        program.write_text("import time\ntime.sleep(600)")
        start_compiling(PASSES)
        with core_left_free():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        compile_process._processes[0]._process.kill()
    finally:
        torch.set_num_threads(before)


def test_a_process_that_fails_says_why(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program.write_text("print('passes')\nraise OSError('no space left')")
    start_compiling(PASSES)
    wait_until_compiled(PASSES, shown=False)
    assert not is_compiling(PASSES)
    assert "the process that compiles ahead failed (OSError: no space left)" in capsys.readouterr().err


@pytest.mark.parametrize("shown", [False, True])
def test_a_process_that_hangs_is_killed(program: Path, monkeypatch: pytest.MonkeyPatch, shown: bool) -> None:
    monkeypatch.setattr(compile_process, "MAX_SECONDS", 0.1)
    program.write_text("import time\ntime.sleep(600)")
    start_compiling(PASSES)
    wait_until_compiled(PASSES, shown=shown)
    compile_process._processes[0]._reader.join()
    assert not is_compiling(PASSES)
