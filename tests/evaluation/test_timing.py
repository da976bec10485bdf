"""Wall and CPU time of what is measured, and when they are too unsteady for a speed-up to be stated."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hdtool.builders.evaluation import timing
from hdtool.builders.evaluation.timing import Stopwatch, Timings, doubt
from hdtool.data.answered_questions import AnsweredTurn
from tests.support.spec_bench_answers import turn_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests have none, as what they print must not depend on the machine."""
    monkeypatch.setattr(timing, "MAX_WAITED", 0.25)
    monkeypatch.setattr(timing, "MAX_SPREAD", 0.25)


def measured(monkeypatch: pytest.MonkeyPatch, wall: float, cpu: float, queued: float) -> Stopwatch:
    """What a stopwatch says if its clocks have gone on by these seconds."""
    clocks = (iter([7.0, 7.0 + seconds]) for seconds in (wall, cpu, queued))
    now, used, waited = (partial(next, readings) for readings in clocks)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=now, process_time=used))
    monkeypatch.setattr(timing, "_queued_seconds", waited)
    with Stopwatch(CPU) as watch:
        pass
    return watch


def test_the_threads_of_a_busy_machine_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that share a core with each other use all of its time, so that only their waits show it."""
    watch = measured(monkeypatch, wall=2.0, cpu=2.0, queued=2.0)
    assert (watch.seconds, watch.cpu_seconds, watch.waited_seconds, watch.first_seconds) == (2.0, 2.0, 2.0, None)


@pytest.mark.parametrize(("used", "waited"), [(0.5, 1.5), (2.0, 0.0), (3.9, 0.0)])
def test_where_the_system_counts_no_waits_the_cpu_time_shows_them(
    monkeypatch: pytest.MonkeyPatch, used: float, waited: float
) -> None:
    assert measured(monkeypatch, wall=2.0, cpu=used, queued=0.0).waited_seconds == waited


def test_the_first_token_counts_once() -> None:
    with Stopwatch(CPU) as watch:
        watch.first_token()
        first = watch.first_seconds
        watch.first_token()
    assert first is not None and watch.first_seconds == first <= watch.seconds


def test_waits_are_those_of_all_threads(tmp_path: Path) -> None:
    for thread, text in {"1": "900 1500000000 3", "2": "5 500000000 1", "3": "", "4": "no number here"}.items():
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(text)
    (tmp_path / "ended").mkdir()
    assert timing._queued_seconds(tmp_path) == 2.0
    assert timing._queued_seconds(tmp_path / "not Linux") == 0.0


def test_waits_are_summed_over_answers() -> None:
    turns: list[AnsweredTurn] = [turn_of([1], 2.0, waited_seconds=1.0), turn_of([1], 2.0), turn_of([1], 6.0)]
    assert Timings.of(turns).waited == pytest.approx(0.1)
    assert Timings.of([]).waited == 0.0


def test_spread_is_that_of_the_median_answer() -> None:
    answers = [[1.0, 2.0, 1.0], [1.0, 1.1, 1.0], [2.0, 2.4, 2.0], [9.0], []]
    assert Timings(1.0, 0.0, answers).spread == pytest.approx(0.2)
    assert Timings(1.0, 0.0, [[3.0], [4.0]]).spread == 0.0, "one round says nothing"


def test_steady_times_are_not_in_doubt() -> None:
    assert doubt({}) == ""
    assert doubt({"ar": Timings(10.0, 2.5), "hd": Timings(5.0, 0.0, [[1.0, 1.25, 1.0]])}) == ""


def test_a_method_that_waited_is_named_with_how_long() -> None:
    assert doubt({"ar": Timings(10.0, 3.0), "generate": Timings(20.0, 34.0), "hd": Timings(5.0)}) == (
        "No speed-up is stated, because the machine was busy: the threads of generate waited 1.7 s for a core in each "
        "second. Measure again on an idle machine."
    )


def test_repeats_that_scatter_are_named_with_how_much() -> None:
    uneven = Timings(5.0, 0.0, [[1.0, 1.0, 1.5], [2.0, 2.0, 2.8]])
    assert doubt({"ar": Timings(10.0), "hd": uneven}) == (
        "No speed-up is stated, because repeats of the same answer by hd differ by 45% of their median. Measure again "
        "on an idle machine."
    )
