"""``hdtool bench --cost``: what a forward pass takes, by draft nodes and context."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hdtool.data.errors import OptionError
from hdtool.runtime.config import BenchConfig, CostConfig, ModelConfig

if TYPE_CHECKING:
    from hdtool.runtime.budget.cost_curve import CostCurve

AT_ONCE = 8
"""Contexts beside each other in a terminal."""


def bench_cost(
    model: ModelConfig,
    shape: str | None,
    contexts: str | None,
    threads: int | None,
    out: Path,
    quiet: bool,
    as_json: bool,
) -> None:
    """Measure, print, and write `cost.json` and `cost.png`; of a shape, its passes with random weights."""
    config = CostConfig(_lengths(contexts))
    BenchConfig(threads=threads)

    from hdtool.cli.output.show_answers import quiet_libraries
    from hdtool.data.progress import bar
    from hdtool.runtime.budget.cost_curve import cost_file
    from hdtool.runtime.budget.measure_passes import check_home, cost_of_passes, keep_at_home, lengths_for
    from hdtool.runtime.evaluation.cost_plot import draw_cost, picture_file
    from hdtool.runtime.evaluation.model_shapes import load_shape
    from hdtool.runtime.model.cpu_threads import settle_threads
    from hdtool.runtime.model.load import load

    quiet_libraries()
    figures, drawing = out / "cost.json", out / "cost.png"
    for file in (cost_file(figures), picture_file(drawing)):
        file.check()
    loaded = load_shape(shape, model) if shape else load(model)
    settle_threads(loaded.target, threads)
    lengths = lengths_for(loaded, config)
    check_home(loaded.target)
    with bar(len(lengths), "contexts", quiet=quiet) as shown:
        curve = cost_of_passes(loaded, lengths, shown.to)
    curve.write(figures)
    draw_cost(curve, drawing)
    keep_at_home(loaded.target, curve)
    print(json.dumps(asdict(curve)) if as_json else table(curve))


def table(curve: CostCurve) -> str:
    """Milliseconds, a line for each number of nodes."""
    blocks = [f"{curve.model} in {curve.dtype} on {curve.device}\nmilliseconds of a forward pass"]
    for first in range(0, len(curve.contexts), AT_ONCE):
        shown = range(first, min(first + AT_ONCE, len(curve.contexts)))
        lines = [_line("context", [f"{curve.contexts[place]:,}" for place in shown])]
        for column, nodes in enumerate(curve.nodes):
            name = f"{nodes} node" + "s" * (nodes != 1)
            lines.append(_line(name, [f"{curve.milliseconds[place][column]:.2f}" for place in shown]))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _line(name: str, cells: Sequence[str]) -> str:
    return f"{name:<8}" + "".join(f"{cell:>9}" for cell in cells)


def _lengths(contexts: str | None) -> tuple[int, ...] | None:
    if contexts is None:
        return None
    try:
        return tuple(int(length) for length in contexts.split(","))
    except ValueError:
        raise OptionError(f"contexts is {contexts!r}: it must be lengths separated by commas, as in 128,1024") from None
