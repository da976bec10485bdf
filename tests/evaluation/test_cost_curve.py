"""What passes cost: read, written, refused, and drawn as a line through what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hdtool.builders.setup.work_folder import WorkFolder
from hdtool.data.errors import CostError
from hdtool.runtime.budget.cost_curve import CostCurve
from hdtool.runtime.budget.node_budget import STEP_OVERHEAD, CostBudget
from hdtool.runtime.budget.pass_costs import MAX_CHOSEN_NODES

CURVE = CostCurve((0, 8, 32), ((20.0, 22.0, 24.0), (30.0, 32.0, 46.0)), (0, 1000), "a device", "a model", "bfloat16")


@pytest.mark.parametrize(
    ("nodes", "context", "milliseconds"),
    [
        (0, 0, 20),
        (4, 0, 21),
        (32, 0, 24),
        (44, 0, 25),  # on with the last slope
        (0, 500, 25),
        (32, 250, 29.5),
        (8, 1500, 37),
    ],
)
def test_costs_are_interpolated(nodes: int, context: int, milliseconds: float) -> None:
    assert CURVE.seconds(nodes, context) == pytest.approx(milliseconds / 1e3)


def test_extrapolated_costs_do_not_decrease() -> None:
    falling = CostCurve((0, 8, 16), ((5.0, 7.0, 6.0), (4.0, 6.0, 5.0)), (10, 20))
    assert falling.seconds(64, 10) == falling.seconds(16, 10) == pytest.approx(6e-3)
    assert falling.seconds(0, 100) == falling.seconds(0, 20) == pytest.approx(4e-3)
    assert falling.seconds(0, 1) == falling.seconds(0, 10)


@given(st.lists(st.tuples(st.integers(0, 80), st.integers(0, 3000)), min_size=1, max_size=20))
def test_costs_of_many_passes_equal_single_ones(passes: list[tuple[int, int]]) -> None:
    nodes, contexts = zip(*passes, strict=True)
    assert CURVE.seconds_of_passes(nodes, contexts).tolist() == [CURVE.seconds(*one) for one in passes]


def test_a_curve_is_saved_completely(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    CURVE.write(path)
    assert json.loads(path.read_text()) == {
        "format": 1,
        "model": "a model",
        "device": "a device",
        "dtype": "bfloat16",
        "contexts": [0, 1000],
        "nodes": [0, 8, 32],
        "milliseconds": [[20.0, 22.0, 24.0], [30.0, 32.0, 46.0]],
    }
    assert CostCurve.read(path) == CostCurve.given(str(path)) == CURVE
    with pytest.raises(CostError, match="cannot be written"):
        CURVE.write(path / "cost.json")


@pytest.mark.parametrize("content", ['{"format": 1}', "[]", "mine", '{"format": 2, "nodes": [0, 1]}'])
def test_a_file_that_holds_something_else_is_kept(tmp_path: Path, content: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(content)
    with pytest.raises(CostError, match=r"cost\.json is there and is not a file of hdtool bench-cost"):
        CURVE.write(path)
    assert path.read_text() == content and list(tmp_path.iterdir()) == [path]


def test_a_curve_in_the_folder_of_a_set_up(home: Path, tmp_path: Path) -> None:
    with pytest.raises(CostError, match=r"cost\.json cannot be read \(No such file or directory\): check the path"):
        CostCurve.given(str(tmp_path))
    CURVE.write(WorkFolder("model", ["identity"]).cost)
    assert CostCurve.given(str(WorkFolder("model", ["identity"]).path)) == CURVE


def test_a_curve_from_the_command_line() -> None:
    assert CostCurve.given("8:20.9, 0:20.1,32:24") == CostCurve((0, 8, 32), ((20.1, 20.9, 24.0),))


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("0:20,8", "'8' is not a cost: give nodes:milliseconds pairs"),
        ("0:20,8:x", "'8:x' is not a cost"),
        ("0:20,8:21,8:22", "8 nodes is given twice"),
        ("8:20,32:22", "a pass without draft nodes and at least one with some"),
        ("0:20", "a pass without draft nodes and at least one with some"),
        ("0:20,8:0", "times must be above 0 ms (found: 0.0)"),
        ("0:20,8:nan", "times must be above 0 ms (found: nan)"),
        ("0:20,8:inf", "times must be above 0 ms (found: inf)"),
        ("none.json", "none.json cannot be read (No such file or directory)"),
        ("", "cannot be read"),
    ],
)
def test_invalid_costs(typed: str, said: str) -> None:
    with pytest.raises(CostError) as caught:
        CostCurve.given(typed)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 2}, "in format 1 (found: 2)"),
        ({"nodes": None}, "is damaged ('nodes' is missing)"),
        ({"nodes": 7}, "is damaged"),
        ({"nodes": [0, 8.5, 32]}, "8.5 is not a whole number"),
        ({"nodes": [0, 32, 8]}, "numbers of nodes must increase, and be 0 or more (found: 0, 32, 8)"),
        ({"contexts": [0]}, "it must hold 1 rows of 3 times (found: [3, 3])"),
        ({"contexts": [], "milliseconds": []}, "contexts must increase, and be 0 or more (found: none)"),
        ({"milliseconds": [[1, 2, 3], [1, 2]]}, "it must hold 2 rows of 3 times (found: [3, 2])"),
        ({"milliseconds": [[1, 2, 3], [1, 2, "x"]]}, "is damaged"),
        ({"milliseconds": [[1, 2, 3], [1, 2, -3]]}, "(found: -3.0)"),
    ],
)
def test_damaged_files(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = tmp_path / "cost.json"
    CURVE.write(path)
    row = {name: value for name, value in {**json.loads(path.read_text()), **change}.items() if value is not None}
    path.write_text(json.dumps(row))
    with pytest.raises(CostError) as caught:
        CostCurve.read(path)
    assert said in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize("content", ["", "{", "[1]", "\udcff"])
def test_files_that_are_something_else(tmp_path: Path, content: str) -> None:
    path = tmp_path / "cost.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(CostError, match=r"is not JSON|in format 1 \(found: None\)"):
        CostCurve.read(path)


# A budget over a curve ------------------------------------------------------------------------


def slowest_choice(probs: list[float], curve: CostCurve, context: int) -> int:
    rates = [
        (1 + sum(probs[:size])) / (curve.seconds(size, context) + STEP_OVERHEAD)
        for size in range(min(len(probs), MAX_CHOSEN_NODES) + 1)
    ]
    return rates.index(max(rates))


@given(st.lists(st.floats(0, 1), max_size=80), st.integers(0, 2000), st.floats(0, 5))
def test_as_many_nodes_as_pay(probs: list[float], context: int, slope: float) -> None:
    probs = sorted(probs, reverse=True)
    curve = CostCurve((0, 1), ((1.0, 1.0 + slope), (2.0, 2.0 + 2 * slope)), (0, 1000))
    budget = CostBudget(curve)
    budget.start_step(context)
    assert budget.choose_size(np.array(probs)) == slowest_choice(probs, curve, context)


def test_where_nothing_pays_drafting_rests() -> None:
    budget = CostBudget(CostCurve((0, 1), ((1.0, 3.0),)))
    asked = 0
    for step in range(300):
        budget.start_step(step)
        if budget.max_nodes:
            asked += 1
            assert budget.choose_size(np.array([0.5, 0.5])) == 0
    assert 3 < asked < 30
