"""Whatever lies in the current folder, no command and no process that it starts executes it."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from hdtool.cli.app import run
from hdtool.data.isolated_processes import NUMBA_SETTINGS, isolated_children, isolated_python
from hdtool.runtime.integrations.vllm import start_vllm
from tests.support.project import FILES
from tests.support.traps import LIBRARIES, Traps

SCRIPT = [str(Path(sys.executable).parent / "hdtool")]
MODULE = [sys.executable, "-m", "hdtool.cli"]
BEGINS = re.compile(
    r"os\.(exec|fork|posix_spawn|spawn|startfile|system)|ray\.init$|subprocess\.|multiprocessing\.|"
    r"([\w.]+\.)?(Popen|Pool|Process|ProcessPoolExecutor)$"
)
"""Matches what is called to begin a process."""
GUARDS = {isolated_python.__name__, isolated_children.__name__}


@pytest.fixture
def traps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Traps:
    folder = tmp_path / "current"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return Traps(folder)


def calls(node: ast.AST) -> set[str]:
    return {ast.unparse(call.func) for call in ast.walk(node) if isinstance(call, ast.Call)}


def test_processes_begin_isolated() -> None:
    beginning = set()
    for path in FILES:
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef) and any(map(BEGINS.match, names := calls(function))):
                beginning.add(path.stem)
                assert names & GUARDS, f"{path}, {function.name}: data/isolated_processes.py says how a process begins"
    assert beginning == {"compile_process", "local_executor", "parallel_replay", "ray_executor", "start_vllm"}


def test_an_isolated_python_leaves_the_current_folder_alone(traps: Traps) -> None:
    program = "import decimal, hdtool.data.errors"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode
    assert traps.executed == {"decimal"}, "the traps work"
    subprocess.run(isolated_python("-c", program), check=True)
    assert traps.executed == {"decimal"}


def test_a_pool_leaves_the_current_folder_alone(traps: Traps) -> None:
    with isolated_children(), ProcessPoolExecutor(1, get_context("spawn")) as pool:
        assert pool.submit(abs, -1).result() == 1
    assert not traps.executed


@pytest.mark.parametrize("before", [None, "0", "1"])
def test_the_environment_is_as_it_was(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    if before is not None:
        monkeypatch.setenv("PYTHONSAFEPATH", before)
    with isolated_children():
        assert os.environ["PYTHONSAFEPATH"] == "1"
    assert os.environ.get("PYTHONSAFEPATH") == before


def test_vllm_begins_isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hdtool.runtime.integrations.vllm.start_vllm.metadata.version", lambda name: "0.32")
    assert start_vllm._server("model")[:3] == isolated_python("-m")[:3]


def test_the_script_leaves_the_current_folder_alone(traps: Traps) -> None:
    done = subprocess.run([*SCRIPT, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert not traps.executed


def test_so_does_the_module_with_files_named_like_libraries(tmp_path: Path) -> None:
    """``python -m`` itself looks for hdtool in the current folder first, and finds it there in a checkout."""
    traps = Traps(tmp_path, LIBRARIES - {"hdtool", "data", "cli", "runtime", "builders"})
    done = subprocess.run([*MODULE, "--version"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert not traps.executed


def test_numba_reads_no_settings_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / NUMBA_SETTINGS).write_text("cache_dir: elsewhere\n")
    assert run(["doctor"]) == 1
    assert capsys.readouterr().err.startswith(f"error: the current folder contains {NUMBA_SETTINGS}, ")


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "--prompt", "a word", "--max-new-tokens", "4"],
        ["build-corpus-db", "{folder}/text.txt", "--out", "{folder}/store", "--workers", "2", "--shard-bytes", "20000"],
        ["replay", "--traces", "{folder}/answers.jsonl", "--methods", "pld", "--methods", "hd", "--workers", "2"],
        ["doctor"],
    ],
    ids=lambda arguments: str(arguments[0]),
)
def test_commands_and_their_workers_leave_the_current_folder_alone(
    arguments: list[str], traps: Traps, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("one word after the other " * 4000)
    turns = [{"from": "human", "value": "a question"}, {"from": "gpt", "value": "an answer of several words"}]
    lines = [json.dumps({"conversations": turns}) for _ in range(4)]
    (tmp_path / "answers.jsonl").write_text("\n".join(lines))
    command = [*SCRIPT, *(word.format(folder=tmp_path) for word in arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert not traps.executed


@pytest.mark.long
def test_the_compiling_process_leaves_the_current_folder_alone(traps: Traps) -> None:
    subprocess.run(isolated_python("-c", "import hdtool.runtime.compile_passes_and_drafter"), check=True)
    assert not traps.executed
