"""Compiling in another process: what begins it, what is said, and a process that fails or hangs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hdtool.data.isolated_processes import isolated_python
from hdtool.runtime.core.drafter import NoDraft
from hdtool.runtime.drafters import deferred as deferred_module
from hdtool.runtime.drafters.deferred import deferred
from hdtool.runtime.kernels import code_folder, compile_process
from hdtool.runtime.kernels.compile_process import (
    DRAFTER,
    PASSES,
    CompileProcess,
    core_left_free,
    is_compiling,
    start_compiling,
    wait_until_compiled,
)
from hdtool.runtime.target.cpu_threads import choose_threads


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
    program.write_text("import sys\nfor _ in range(2): print('passes', flush=True)\nsys.stdin.read()\nprint('drafter')")
    start_compiling(DRAFTER, PASSES)
    wait_until_compiled(PASSES)
    wait_until_compiled(DRAFTER)
    assert not is_compiling(PASSES) and not is_compiling(DRAFTER)
    assert "compiled forward passes for this processor, once: waited" in capsys.readouterr().err


def test_nothing_runs_beside_what_waited_for_the_last_part(program: Path) -> None:
    program.write_text("import time\nprint('passes', 'passes', 'drafter', sep='\\n', flush=True)\ntime.sleep(1)")
    start_compiling(PASSES, DRAFTER)
    wait_until_compiled(DRAFTER)
    assert compile_process._processes[0]._process.poll() is not None


def test_the_process_ends_with_the_lock_held_and_without_freeing_its_objects(tmp_path: Path) -> None:
    home = {"HDTOOL_HOME": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path)}
    program = (
        "import atexit\nfrom hdtool.data import durable_files\n"
        "from hdtool.runtime import compile_passes_and_drafter as program\n"
        "from contextlib import contextmanager\n@contextmanager\ndef shown_lock(*place, **how):\n"
        "    yield print('locked', flush=True)\n    print('free', flush=True)\n"
        "program.file_lock = shown_lock\natexit.register(print, 'freed')\nprogram.main([])"
    )
    ran = subprocess.run(
        isolated_python("-c", program), check=True, env={**os.environ, **home}, capture_output=True, text=True
    )
    assert ran.stdout == "locked\n"


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


@pytest.mark.usefixtures("torch_threads")
def test_torch_leaves_a_core_to_the_compiler_while_a_model_is_loaded(program: Path) -> None:
    torch.set_num_threads(2)
    with core_left_free():
        assert torch.get_num_threads() == 2
    program.write_text("import time\ntime.sleep(600)")
    start_compiling(PASSES)
    with core_left_free():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    compile_process._processes[0]._process.kill()


def test_the_process_collects_garbage_rarely(tmp_path: Path) -> None:
    program = (
        "import gc, sys\nfrom hdtool.runtime import compile_passes_and_drafter as program\n"
        "from hdtool.runtime.model import lean_imports\nassert 'torch' not in sys.modules\n"
        "program.prepare()\nassert gc.get_threshold()[0] == lean_imports.POSTPONED_THRESHOLD"
    )
    home = {"HDTOOL_HOME": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run(isolated_python("-c", program), check=True, env={**os.environ, **home})


def test_a_process_that_fails_says_why(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program.write_text("print('passes')\nraise OSError('no space left')")
    start_compiling(PASSES)
    wait_until_compiled(PASSES)
    assert not is_compiling(PASSES)
    errors = capsys.readouterr().err
    assert "compiled forward passes" not in errors
    assert "the process that compiles ahead failed (OSError: no space left)" in errors


@pytest.mark.parametrize("shown", [False, True])
def test_a_process_that_hangs_is_killed(program: Path, monkeypatch: pytest.MonkeyPatch, shown: bool) -> None:
    monkeypatch.setattr(compile_process, "MAX_SECONDS", 0.1)
    program.write_text("import time\ntime.sleep(600)")
    start_compiling(PASSES)
    wait_until_compiled(PASSES, shown=shown)
    compile_process._processes[0]._reader.join()
    assert not is_compiling(PASSES)


def test_no_process_is_started_where_its_code_cannot_be_kept(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program.write_text("")
    monkeypatch.setattr(code_folder, "code_folder", lambda: program / "a file stands in the way")
    start_compiling(PASSES, DRAFTER)
    assert compile_process._processes == []


@pytest.mark.parametrize(("method", "waits"), [("hd+mtp", True), ("pld", True), ("hd", False)])
def test_only_drafters_that_may_join_later_are_not_waited_for(
    method: str, waits: bool, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deferred_module, "_loading", lambda: None)
    program.write_text("import time\ntime.sleep(0.5)\nprint('drafter')")
    start_compiling(DRAFTER)
    busy: list[bool] = []
    deferred(method, lambda: [busy.append(is_compiling(DRAFTER)) or NoDraft()], 1)  # type: ignore[func-returns-value]
    assert busy == [False] * waits


@pytest.mark.usefixtures("torch_threads")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_threads_are_chosen_before_the_drafters_join_only_where_they_change_no_bit(
    is_compiled: bool, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled passes give the same bits with any number; in torch's code, it must not change within an answer."""
    monkeypatch.setattr("hdtool.runtime.target.cpu_threads.cpu_quota", lambda: 2)
    program.write_text("import time\ntime.sleep(600)")
    start_compiling(DRAFTER)
    torch.set_num_threads(4)
    target: Any = SimpleNamespace(device=torch.device("cpu"), compiled=is_compiled)
    assert choose_threads(target) == (3 if is_compiled else 2)
    compile_process._processes[0]._process.kill()
