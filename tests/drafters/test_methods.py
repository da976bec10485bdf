"""The methods by their names: drafters that are ready when they are made."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from threading import Timer, enumerate as threads
from typing import Any

import pytest

from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.config import DecodeConfig
from hdtool.runtime.drafter import Drafter, NoDraft
from hdtool.runtime.drafters import methods
from hdtool.runtime.drafters.hierarchy.tree import grow_all
from hdtool.runtime.drafters.methods import drafter_for, drafter_with_budget
from hdtool.runtime.kernels.compiled import is_cached
from hdtool.runtime.stores.history_store import History
from hdtool.runtime.stores.store_set import StoreSet
from tests.support.methods import METHODS_WITHOUT_DRAFT_MODEL

LATE = """
import gc, sys
import torch
from numba.core.registry import CPUDispatcher
from hdtool.data import demo
from hdtool.runtime.accept import Accepted
from hdtool.runtime.config import DecodeConfig, ModelConfig, SamplingConfig
from hdtool.runtime.answerer import decode
from hdtool.runtime.stores.corpus_index import CorpusIndex
from hdtool.runtime.model.load import load
from hdtool.runtime.drafters.methods import drafter_for
from hdtool.runtime.sampling.sampler import Sampler
from hdtool.runtime.stores.model_store import ModelStore
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.engine import Verified

def ready():
    return {(f, signature) for f in gc.get_objects() if isinstance(f, CPUDispatcher) for signature in f.signatures}

target = load(ModelConfig(threads=1)).target
store_set = StoreSet(ModelStore(demo.MODEL_STORE), CorpusIndex(demo.CORPUS_INDEX))
for method in sys.argv[1:]:
    drafter = drafter_for(DecodeConfig(method, draft_tokens=40), target, store_set)
    words = [place % 7 for place in range(40)]
    target.prefill(target.cache, 0, words)
    sampler = Sampler(SamplingConfig(1.0), words)
    before = ready()
    drafter.begin(words)
    drafted = size = 0
    for turn in range(9):
        words.append(words[-7])
        hidden = torch.zeros(1 + size if turn else 40, target.config.hidden_size)
        drafter.observe(Accepted([], words[-1:]), Verified(torch.zeros(1 + size, 4096), hidden))
        tree = drafter.draft(words)
        size = len(tree)
        drafted += size
    tree.embeddable(1).clipped(1)
    for _ in decode(target, sampler.context, sampler, max_new_tokens=4, drafter=drafter):
        pass
    print(method, drafted > 0, [f.__name__ for f, _ in ready() - before])
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "chosen",
    [
        ("hd+logitspec",),
        pytest.param(
            tuple(name for name in METHODS_WITHOUT_DRAFT_MODEL if name != "ar"),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_no_step_waits_for_the_compiler(chosen: tuple[str, ...]) -> None:
    found = subprocess.run([sys.executable, "-c", LATE, *chosen], capture_output=True, text=True, check=True).stdout
    assert found.splitlines() == [f"{method} True []" for method in chosen]


def made_by(maker: Any, monkeypatch: pytest.MonkeyPatch) -> Drafter:
    monkeypatch.setitem(methods.DRAFTER_FACTORIES, "ar", maker)
    target: Any = None
    return drafter_for(DecodeConfig("ar"), target, StoreSet())


def test_whoever_waits_for_a_drafter_is_told_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = NoDraft()

    def slow(*_: object) -> Drafter:
        for thread in threads():
            if isinstance(thread, Timer):
                thread.join()
        return drafter

    methods._explain_delay.cache_clear()
    monkeypatch.setattr(methods, "MAX_TIMING_SECONDS", 0.01)
    for _ in range(2):
        assert made_by(slow, monkeypatch) is drafter
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("preparing the drafter for this machine; ")


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_said_of_a_drafter_that_is_soon_there(
    fails: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waiting: list[Timer] = []

    def quick(*_: object) -> Drafter:
        waiting.extend(thread for thread in threads() if isinstance(thread, Timer))
        if fails:
            raise OSError
        return NoDraft()

    if fails:
        with pytest.raises(OSError):
            made_by(quick, monkeypatch)
    else:
        made_by(quick, monkeypatch)
    (note,) = waiting
    note.join(1.0)
    assert not note.is_alive() and capsys.readouterr().err == ""


def test_a_process_compiles_ahead_only_what_was_never_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written = tmp_path / "compiled"
    monkeypatch.setattr(methods, "COMPILE_HIERARCHY", f"open({str(written)!r}, 'w').close()")
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    methods.compile_hierarchy()
    assert is_cached(grow_all)
    for names, known in ((["hd"], True), (["ar", "pld"], False)):
        monkeypatch.setattr(methods, "is_cached", lambda _, known=known: known)
        methods.compile_ahead(*names)
        methods.finish_compiling()
        assert not written.exists()
    methods.compile_ahead("ar", "hd+logitspec")
    methods.finish_compiling()
    assert written.exists()


@pytest.mark.parametrize("program", ["raise SystemExit(3)", "import time; time.sleep(600)"], ids=["fails", "hangs"])
def test_a_process_that_fails_or_hangs_does_not_stop_this_one(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr(methods, "COMPILE_HIERARCHY", program)
    monkeypatch.setattr(methods, "MAX_COMPILE_SECONDS", 1.0)
    monkeypatch.setattr(methods, "is_cached", lambda _: False)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    methods.compile_ahead("hd")
    assert drafter_with_budget(FixedBudget, DecodeConfig(), StoreSet(history=History()))


def test_code_older_than_its_source_is_not_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "once.py"
    source.write_text(
        "from hdtool.runtime.kernels.compiled import compiled\n\n\n@compiled\ndef once(a):\n    return a\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    once = importlib.import_module("once").once
    assert not is_cached(once)
    once(1)
    assert is_cached(once)
    os.utime(source, (2e9, 2e9))
    assert not is_cached(once)
