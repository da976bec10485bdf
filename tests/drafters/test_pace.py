"""How many tokens a pass of a drafter extends: as many as are worth its time."""

from __future__ import annotations

import numpy as np
import pytest

from hdtool.runtime.core.engine import PassLog
from hdtool.runtime.drafters.trained.draft_length import FixedPace, LinearCost, MeasuredPace, pace_for
from hdtool.runtime.target.target import Target
from tests.support.families import model_of

PROBS = np.array([0.6, 0.3, 0.05, 0.01])


def costs_of(base: float, row: float) -> LinearCost:
    costs = LinearCost()
    for rows in (1, 4, 2, 3) * 4:
        costs.observe(rows, base + row * rows)
    return costs


def log_of(seconds: float) -> PassLog:
    log = PassLog()
    log.add(seconds)
    return log


def test_costs_are_a_base_and_a_price_of_each_row() -> None:
    costs = costs_of(2.0, 0.5)
    assert [costs.of(rows) for rows in (1, 2, 4)] == pytest.approx([2.5, 3.0, 4.0], rel=0.02)
    costs.observe(1, 1e6)  # a single interruption
    assert costs.of(1) < 3.5
    same = LinearCost()
    for _ in range(5):
        same.observe(3, 6.0)
    assert 0 < same.of(1) <= same.of(3) == pytest.approx(6.0)


def test_rows_are_added_while_they_bring_more_than_they_cost() -> None:
    """A pass of the target takes 10 seconds for a token, so a pass of one second must bring a tenth of one."""
    for base, row, certainty, expected in (
        (1.0, 0.0, 0.9, 4),  # rows are free
        (1.0, 0.5, 0.9, 2),  # the third one brings 0.045 for 0.05
        (1.0, 0.5, 0.1, 0),  # little is accepted after them
        (7.0, 0.1, 0.9, 3),  # 0.855 for 0.73
        (9.0, 0.1, 0.9, 0),
    ):
        pace = MeasuredPace(costs_of(base, row), log_of(10.0))
        assert pace.paths_to_extend(PROBS, certainty) == expected, (base, row, certainty)


def test_the_speed_of_steps_is_that_of_their_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of three tokens in ten seconds: the same pass must bring three times as much."""
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    pace = MeasuredPace(costs_of(1.0, 1.0), log_of(10.0))
    pace.note_step(5)  # no step came before it
    assert pace.paths_to_extend(PROBS, 0.9) == 2
    for _ in range(20):
        pace.note_step(3)
    assert pace.paths_to_extend(PROBS, 0.9) == 0
    pace.restart()
    pace.note_step(300)
    assert pace.paths_to_extend(PROBS, 0.9) == 0


def test_the_first_pass_is_made_to_learn_its_cost_and_prompts_tell_nothing_of_it() -> None:
    costs = LinearCost()
    pace = MeasuredPace(costs, log_of(1e-9))
    pace.note_pass(500, 3.0)
    assert costs.observed == 0 and pace.paths_to_extend(PROBS, 0.9) == 4
    pace.note_pass(4, 3.0)
    assert costs.observed == 1 and pace.paths_to_extend(PROBS, 0.9) == 0
    assert FixedPace().paths_to_extend(PROBS, 0.0) == 4


def test_drafters_of_one_target_share_what_passes_cost() -> None:
    target, other = Target(model_of("llama")), Target(model_of("qwen3"))
    first, second = (pace_for(target, "a", is_measured=True) for _ in range(2))
    first.note_pass(2, 5.0)
    assert isinstance(second, MeasuredPace) and second._costs.observed == 1
    for pace in (pace_for(target, "b", is_measured=True), pace_for(other, "a", is_measured=True)):
        assert isinstance(pace, MeasuredPace) and pace._costs.observed == 0
    assert isinstance(pace_for(target, "a", is_measured=False), FixedPace)
