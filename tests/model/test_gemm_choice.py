"""Which product a layer uses is the same in all processes of a machine, whatever they measure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from hdtool.runtime.kernels import gemm_choice as product_choice
from hdtool.runtime.kernels import small_batch_linear as layers
from hdtool.runtime.kernels.gemm_choice import saved_choice
from hdtool.runtime.kernels.small_batch_gemm import COLUMN_MULTIPLE
from hdtool.runtime.kernels.small_batch_linear import TIMED_ROWS, ProductChoice

PROGRAM = """
import os, sys, time
from pathlib import Path
import torch
from hdtool.runtime.kernels import small_batch_linear as layers
own_is_faster, others = sys.argv[1] == "own", int(sys.argv[2])
def seconds(product, numbers, weights):
    (Path(os.environ["MEASURING"]) / str(os.getpid())).touch()
    ends = time.monotonic() + 60
    while len(os.listdir(os.environ["MEASURING"])) < others:
        if time.monotonic() > ends:
            sys.exit("the other processes do not measure")
        time.sleep(0.01)
    return float((product is torch.nn.functional.linear) == own_is_faster)
layers._seconds = seconds
torch.set_num_threads(1)
choice = layers.ProductChoice([torch.ones(3, 64)])
print([choice.own(rows) for rows in (1, 3, 16, 64, 256)])
"""


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, in a process that has made no choice yet."""
    monkeypatch.setenv("HDTOOL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(product_choice, "_used", {})
    return tmp_path


def processes(folder: Path, faster: Sequence[str], together: int = 1) -> list[str]:
    """What fresh processes choose that measure so; ``together`` of them have measured before the first one writes."""
    (folder / "measuring").mkdir(exist_ok=True)
    environment = {**os.environ, "MEASURING": str(folder / "measuring")}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, product, str(together)], env=environment, stdout=subprocess.PIPE, text=True
        )
        for product in faster
    ]
    printed = [process.communicate(timeout=120)[0].strip() for process in started]
    assert [process.returncode for process in started] == [0] * len(started)
    return printed


def choice(monkeypatch: pytest.MonkeyPatch, *, own: bool, shape: tuple[int, int] = (3, COLUMN_MULTIPLE)) -> list[bool]:
    """What a layer uses in this process, if our own product is measured as the faster one or the slower one."""

    def seconds(product: Any, *_: Any) -> float:
        return float((product is linear) == own)

    monkeypatch.setattr(layers, "_seconds", seconds)
    found = ProductChoice([torch.ones(shape)])
    return [found.own(rows) for rows in TIMED_ROWS]


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    monkeypatch.setattr(product_choice, "_used", {})


def kept(folder: Path) -> list[Path]:
    return sorted((folder / "home" / "costs" / "products").iterdir())


@pytest.mark.exhaustive
def test_two_processes_choose_alike_although_their_timings_differ(fresh: Path) -> None:
    (first,), (second,) = processes(fresh, ["own"]), processes(fresh, ["library"])
    assert first == second == str([True] * len(TIMED_ROWS))


@pytest.mark.long
def test_processes_that_measure_at_once_choose_alike(fresh: Path) -> None:
    printed = processes(fresh, ["own", "library", "own"], together=3)
    assert len(set(printed)) == 1
    assert len(kept(fresh)) == 1, "no temporary file is left"
    assert str(list(json.loads(kept(fresh)[0].read_text()).values())) == printed[0]


def test_a_choice_is_saved_for_each_shape_and_number_of_threads(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choice(monkeypatch, own=True) == [True] * len(TIMED_ROWS)
    forget(monkeypatch)
    assert choice(monkeypatch, own=False) == [True] * len(TIMED_ROWS)
    assert choice(monkeypatch, own=False, shape=(4, COLUMN_MULTIPLE)) == [False] * len(TIMED_ROWS)
    monkeypatch.setattr("torch.get_num_threads", lambda: 77)
    assert choice(monkeypatch, own=False) == [False] * len(TIMED_ROWS)
    monkeypatch.setattr("torch.__version__", "99.0")
    assert choice(monkeypatch, own=True) == [True] * len(TIMED_ROWS)
    assert len(kept(fresh)) == 4


DAMAGED = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe",
    b'{"1": true}',
    b'{"1": 1, "4": 1, "16": 1, "64": 1, "256": 1}',
    b"9" * 99_999,
]


@pytest.mark.parametrize("content", DAMAGED, ids=lambda content: repr(content[:12]))
def test_a_damaged_file_is_noted_measured_again_and_replaced(
    content: bytes, fresh: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    choice(monkeypatch, own=True)
    (place,) = kept(fresh)
    place.write_bytes(content)
    forget(monkeypatch)
    assert choice(monkeypatch, own=False) == [False] * len(TIMED_ROWS)
    assert f"note: {place} is damaged" in capsys.readouterr().err
    forget(monkeypatch)
    assert choice(monkeypatch, own=True) == [False] * len(TIMED_ROWS)
    assert capsys.readouterr().err == ""
    assert kept(fresh) == [place]


def test_a_read_only_home_folder_costs_a_measurement(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (fresh / "file").write_text("untouched")
    monkeypatch.setenv("HDTOOL_HOME", str(fresh / "file" / "home"))
    assert choice(monkeypatch, own=True) == [True] * len(TIMED_ROWS)
    assert choice(monkeypatch, own=False) == [True] * len(TIMED_ROWS), "the process holds to its choice"
    forget(monkeypatch)
    assert choice(monkeypatch, own=False) == [False] * len(TIMED_ROWS)
    assert (fresh / "file").read_text() == "untouched"
    assert capsys.readouterr().err == ""


def test_a_machine_without_a_home_folder_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(words: object) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(layers, "product_choice_at_home", nowhere)
    assert choice(monkeypatch, own=True) == [True] * len(TIMED_ROWS)


def test_a_file_system_without_links_keeps_choices_too(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    assert choice(monkeypatch, own=True) == [True] * len(TIMED_ROWS)
    forget(monkeypatch)
    assert choice(monkeypatch, own=False) == [True] * len(TIMED_ROWS)
    assert len(kept(fresh)) == 1


def test_the_first_writer_wins(fresh: Path) -> None:
    """A process that finds a file only when it has measured follows the file."""
    place = fresh / "home" / "choice.json"

    def overtaken() -> dict[int, bool]:
        place.parent.mkdir(parents=True)
        place.write_text('{"1": false}')
        return {1: True}

    assert saved_choice(place, (1,), overtaken) == {1: False}
    assert place.read_text() == '{"1": false}'
