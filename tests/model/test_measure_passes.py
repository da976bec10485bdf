"""``hdtool bench-cost``: forward passes are timed, printed, plotted and saved."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib import rc_context

from hdtool.builders.evaluation.cost_plot import draw_cost
from hdtool.cli.app import run
from hdtool.cli.bench import cost_table
from hdtool.data.errors import CostError, OptionError
from hdtool.data.home import cost_at_home
from hdtool.runtime.budget import measure_passes as pass_times
from hdtool.runtime.budget.cost_curve import CostCurve, Floats
from hdtool.runtime.budget.measure_passes import context_lengths_for, cost_curve_for, measure_cost_curve, save_at_home
from hdtool.runtime.budget.pass_costs import MAX_CHOSEN_NODES
from hdtool.runtime.caches.slots import Cache
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.kernels.machine_name import device_name
from hdtool.runtime.model.model_fingerprint import fingerprint
from hdtool.runtime.settings.measuring import CostConfig
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.target.load import Loaded, load
from hdtool.runtime.target.target import Target

PNG = b"\x89PNG\r\n\x1a\n"
CURVE = CostCurve((0, 8, 64), ((1.0, 2.0, 3.0), (1.5, 2.5, 9.0)), (64, 512), "a device", "toy", "float32")


@pytest.fixture(scope="module")
def embedded() -> Loaded:
    return load(ModelConfig())


@pytest.fixture(autouse=True)
def quick_and_at_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_times, "REPETITIONS", 1)


def test_contexts_are_powers_of_two_within_the_limit(embedded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    assert embedded.target.context_limit(1) == 1024
    assert context_lengths_for(embedded, CostConfig()) == (64, 128, 256, 512)  # a draft needs a place as well
    assert context_lengths_for(embedded, CostConfig((300, 7, 300, 1023))) == (7, 300, 1023)
    with pytest.raises(OptionError, match="contexts holds 1,024, but the context of hdtool-demo ends at 1,024 tokens"):
        context_lengths_for(embedded, CostConfig((64, 1024)))
    monkeypatch.setattr(Target, "context_limit", lambda target, length: 48)
    assert context_lengths_for(embedded, CostConfig()) == (32,)
    monkeypatch.setattr(Target, "context_limit", lambda target, length: None)
    assert context_lengths_for(embedded, CostConfig()) == (64, 128, 256, 512, 1024, 2048, 4096, 8192)


def test_passes_are_timed_at_the_given_context_lengths(embedded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    verify = Target.verify

    def noted(target: Target, cache: Cache, trees: list[DraftTree]) -> list[Verified]:
        seen.append((cache.slots[0].length + 1, len(trees[0])))
        return verify(target, cache, trees)

    monkeypatch.setattr(Target, "verify", noted)
    told: list[int] = []
    curve = measure_cost_curve(embedded, [5, 33], told.append)
    assert curve.nodes[0] == 0 and curve.nodes[-1] == MAX_CHOSEN_NODES
    assert seen == [(length, size) for length in (5, 33) for size in (0, *curve.nodes)], "an untimed pass comes first"
    assert (curve.contexts, curve.model, curve.dtype) == ((5, 33), embedded.name, "float32")
    assert told == [1, 2]


def test_the_longest_context_leaves_room_for_a_draft(embedded: Loaded) -> None:
    (times,) = measure_cost_curve(embedded, [1023]).milliseconds
    assert min(times) > 0


@pytest.mark.parametrize(("milliseconds_per_row", "sizes"), [(1, 11), (40, 8)])
def test_fewer_sizes_of_slow_models_are_timed(
    milliseconds_per_row: int, sizes: int, embedded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[int] = []

    def seconds(nodes: int, context: int) -> float:
        return (nodes + 1) * milliseconds_per_row * (1 + context / 1000) / 1e3

    def noted(
        target: Target,
        nodes: Sequence[int],
        is_enough: object,
        length: int = 0,
        batch: int = 1,
        *,
        unread: bool = False,
    ) -> Floats:
        timed.append(len(nodes))
        return np.array([[seconds(size, length) for size in nodes]])

    monkeypatch.setattr(pass_times, "time_tree_passes", noted)
    curve = cost_curve_for(embedded.target)
    assert timed[:2] == [1, sizes]
    assert len(curve.contexts) == 2
    for nodes in curve.nodes:
        assert curve.seconds(nodes, curve.contexts[1]) == pytest.approx(seconds(nodes, curve.contexts[1]))


def test_a_saved_curve_is_reused(embedded: Loaded) -> None:
    curve = measure_cost_curve(embedded, [8])
    target = embedded.target
    save_at_home(target, curve)
    computed = "float32-own-products-compact-fused"
    path = cost_at_home(fingerprint(target.model), device_name(target.device), computed, torch.get_num_threads())
    assert CostCurve.read(path) == curve
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_saved_curves_differ_by_model_device_dtype_and_threads() -> None:
    named = [("a", "GPU 1", "float32", 1), ("b", "GPU 1", "float32", 1), ("a", "GPU 2", "float32", 1)]
    named += [("a", "GPU 1", "float16", 1), ("a", "GPU 1", "float32", 2)]
    assert len({cost_at_home(*names) for names in named}) == 5
    assert cost_at_home("a", "AMD EPYC (family 25)/x", "float32", 2).name == "AMD-EPYC-family-25-x-float32-2.json"


def test_fingerprints_differ_by_weights(embedded: Loaded) -> None:
    model = load(ModelConfig(dtype="float32")).target.model  # weights in 16 bits cannot be changed
    assert fingerprint(model) == fingerprint(embedded.target.model)
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1
    assert fingerprint(model) != fingerprint(embedded.target.model)


def test_the_command_prints_draws_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["bench-cost", "--contexts", "16, 8", "--out", str(tmp_path / "out"), "--quiet"]
    assert run([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    curve = CostCurve.read(tmp_path / "out" / "cost.json")
    assert told["contexts"] == [8, 16] == list(curve.contexts)
    assert told["milliseconds"] == [list(row) for row in curve.milliseconds]
    assert (tmp_path / "out" / "cost.png").read_bytes().startswith(PNG)
    assert run(asked) == 0
    shown = capsys.readouterr().out
    assert "context         8       16\n0 nodes " in shown and "\n1 node " in shown and "\n63 nodes " in shown


def test_the_table_fits_a_terminal() -> None:
    contexts = tuple(2**power for power in range(6, 15))
    curve = CostCurve((0, 64), ((1000.0, 99999.99),) * 9, contexts, "a device", "toy", "float32")
    shown = cost_table(curve)
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.count("\n64 nodes ") == 2 and " 8,192\n" in shown and "context    16,384\n" in shown


def test_a_picture_has_a_line_for_each_context(tmp_path: Path) -> None:
    draw_cost(CURVE, tmp_path / "cost.png")
    two = (tmp_path / "cost.png").read_bytes()
    assert two.startswith(PNG)
    one = CostCurve(CURVE.nodes, CURVE.milliseconds[:1], CURVE.contexts[:1], CURVE.device, CURVE.model, CURVE.dtype)
    draw_cost(one, tmp_path / "cost.png")
    assert (tmp_path / "cost.png").read_bytes() != two


def test_a_picture_follows_no_settings_of_the_current_folder(tmp_path: Path) -> None:
    """Which matplotlib reads when it is imported."""
    draw_cost(CURVE, tmp_path / "cost.png")
    usual = (tmp_path / "cost.png").read_bytes()
    with rc_context({"figure.facecolor": "red"}):
        draw_cost(CURVE, tmp_path / "cost.png")
    assert (tmp_path / "cost.png").read_bytes() == usual


def test_places_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CostError, match=r"cost\.json cannot be written"):
        CURVE.write(tmp_path / "file" / "cost.json")
    with pytest.raises(CostError, match=r"cost\.png cannot be written"):
        draw_cost(CURVE, tmp_path / "file" / "cost.png")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--contexts", "a"], "--contexts must be lengths separated by commas"),
        (["--contexts", "1"], "--contexts must be lengths of 2 tokens or more, got 1"),
        (["--threads", "0"], "--threads must be 1 or more, got 0"),
        (["--methods", "ar"], "No such option"),
        (["--rounds", "9"], "No such option"),
        (["--contexts", "5000"], "contexts holds 5,000, but the context of hdtool-demo"),
    ],
)
def test_mistakes_give_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert run(["bench-cost", "--out", str(tmp_path / "out"), *arguments]) == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert said in line
