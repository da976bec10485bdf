"""The number of threads: the given one, the fastest where it changes no bit, and else that of the machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hdtool.cli.app import run
from hdtool.data.durable_files import CachedValue
from hdtool.runtime.caches.slots import Cache
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.kernels.linear_layers import compile_linear_layers
from hdtool.runtime.target import cpu_threads
from hdtool.runtime.target.cpu_threads import choose_threads
from hdtool.runtime.target.target import Target
from tests.support import fused
from tests.support.families import model_of

pytestmark = pytest.mark.usefixtures("torch_threads")


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    """One whose passes are compiled."""
    with pytest.MonkeyPatch.context() as patches:
        fused.widen(patches)
        made = Target(fused.model_of())
        compile_linear_layers(made.model)
        fused.compile_target(made)
        yield made


@pytest.fixture(scope="module")
def stock() -> Target:
    return Target(model_of("llama"))


@pytest.mark.parametrize(
    ("seconds", "chosen", "asked"),
    [
        ({8: 1.0, 4: 1.5}, 8, [8, 4]),
        ({8: 1.0, 4: 0.6, 2: 0.5, 1: 0.7}, 2, [8, 4, 2, 1]),
        ({8: 1.0, 4: 1.0, 2: 1.0, 1: 1.0}, 1, [8, 4, 2, 1]),
        ({6: 1.0, 3: 0.9, 1: 2.0}, 3, [6, 3, 1]),
        ({1: 1.0}, 1, []),
    ],
)
def test_fewer_threads_are_tried_until_they_are_slower(
    seconds: dict[int, float], chosen: int, asked: list[int], target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def take(count: int, target: Target) -> float:
        tried.append(count)
        return seconds[count]

    monkeypatch.setattr(cpu_threads, "_seconds_with", take)
    torch.set_num_threads(max(seconds))
    assert choose_threads(target) == torch.get_num_threads() == chosen
    assert tried == asked


def test_a_recorded_number_is_taken_over(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = CachedValue(tmp_path, {})
    monkeypatch.setattr(cpu_threads, "_seconds_with", lambda count, target: {4: 1.0, 2: 0.5, 1: 1.0}[count])
    torch.set_num_threads(4)
    assert choose_threads(target, record=record) == 2
    monkeypatch.setattr(cpu_threads, "_seconds_with", lambda count, target: pytest.fail("it was measured again"))
    torch.set_num_threads(4)
    assert choose_threads(target, record=record) == torch.get_num_threads() == 2
    assert choose_threads(target, 1, record) == 1, "what the user asks for comes first"


@pytest.mark.parametrize(("quota", "chosen"), [(None, 4), (2, 2), (9, 4)])
def test_passes_of_the_library_use_the_cpus_there_are(
    quota: int | None, chosen: int, stock: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = CachedValue(tmp_path, {})
    record.write(1)
    monkeypatch.setattr(cpu_threads, "cpu_quota", lambda: quota)
    monkeypatch.setattr(cpu_threads, "_seconds_with", lambda count, target: pytest.fail("it was measured"))
    torch.set_num_threads(4)
    assert choose_threads(stock, record=record) == torch.get_num_threads() == chosen
    assert choose_threads(stock, 3, record) == 3


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu.max": "10000 100000\n"}, 1),
        ({"cpu.max": "what?\n"}, None),
        ({}, None),
    ],
)
def test_the_limit_of_a_container(files: dict[str, str], quota: int | None, tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert cpu_threads.cpu_quota(tmp_path) == quota


def test_a_given_number_of_threads_is_not_measured(target: Target) -> None:
    before = target.log.passes
    assert choose_threads(target, 2) == torch.get_num_threads() == 2
    assert target.log.passes == before


def test_passes_are_timed_with_the_threads_in_question(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, verify = set(), Target.verify

    def note(target: Target, cache: Cache, trees: list[DraftTree]) -> list[Verified]:
        seen.add(torch.get_num_threads())
        return verify(target, cache, trees)

    monkeypatch.setattr(Target, "verify", note)
    torch.set_num_threads(2)
    assert choose_threads(target) in (1, 2)
    assert seen == {1, 2}


def test_the_command_takes_a_number(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    asked = ["generate", "--prompt", "What?", "--max-new-tokens", "2", "--method", "ar"]
    assert run([*asked, "--threads", "2"]) == 0
    assert torch.get_num_threads() == 2
    capfd.readouterr()
    assert run([*asked, "--threads", "0"]) == 2
    assert "--threads must be 1 or more, got 0" in capfd.readouterr().err
