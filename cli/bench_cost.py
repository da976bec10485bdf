"""``hdtool bench-cost``: the time of a forward pass by draft tokens and context length."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from hdtool.cli.output import tables
from hdtool.cli.parameters import options
from hdtool.cli.parameters.command import MEASUREMENT, OUTPUT, option
from hdtool.cli.parameters.settings import numbers, without
from hdtool.runtime.config import SHAPES, BenchConfig, CostConfig, ModelConfig

if TYPE_CHECKING:
    from hdtool.runtime.budget.cost_curve import CostCurve

CONTEXTS_PER_BLOCK = 8
"""Context lengths that fit side by side in a terminal."""


def bench_cost(
    *,
    loading: Annotated[ModelConfig, without("device_map", "generation_config").as_argument()],
    shape: Annotated[
        str | None,
        option(
            MEASUREMENT,
            f"Time a model of this shape with random weights: {', '.join(SHAPES)}, or a config.json.",
            values=SHAPES,
        ),
    ] = None,
    contexts: Annotated[
        str | None,
        option(
            MEASUREMENT,
            f"Context lengths separated by commas. Default: powers of two from {CostConfig.shortest} to "
            f"{CostConfig.longest} that fit the model.",
        ),
    ] = None,
    out: Annotated[Path, option(OUTPUT, "Folder of cost.json and cost.png.")] = Path(BenchConfig.out),
    quiet: options.Quiet = False,
    as_json: options.JsonObject = False,
) -> None:
    """Measure forward passes by draft tokens and context.

    Prints and writes the table. generate chooses the number of draft tokens by it from then on, and replay --cost
    predicts tokens per second from it.
    """
    config = CostConfig(contexts=numbers("contexts", contexts, int, "lengths separated by commas, as in 128,1024"))

    from hdtool.cli.output.show_answers import quiet_libraries
    from hdtool.data.progress import bar
    from hdtool.runtime.budget.cost_curve import cost_file
    from hdtool.runtime.budget.measure_passes import check_saving, cost_of_passes, lengths_for, save_at_home
    from hdtool.runtime.evaluation.cost_plot import draw_cost, picture_file
    from hdtool.runtime.evaluation.model_shapes import load_shape
    from hdtool.runtime.model.cpu_threads import choose_threads
    from hdtool.runtime.model.load import load

    quiet_libraries()
    figures, drawing = out / "cost.json", out / "cost.png"
    for file in (cost_file(figures), picture_file(drawing)):
        file.check()
    loaded = load_shape(shape, loading) if shape else load(loading)
    choose_threads(loaded.target, loading.threads)
    lengths = lengths_for(loaded, config)
    check_saving(loaded.target)
    with bar(len(lengths), "contexts", quiet=quiet) as shown:
        curve = cost_of_passes(loaded, lengths, shown.to)
    curve.write(figures)
    draw_cost(curve, drawing)
    save_at_home(loaded.target, curve)
    print(json.dumps(asdict(curve)) if as_json else table(curve))


def table(curve: CostCurve) -> str:
    """Milliseconds: a row for each number of draft tokens, a column for each context length."""
    blocks = [f"{curve.model} in {curve.dtype} on {curve.device}\nmilliseconds of a forward pass"]
    for first in range(0, len(curve.contexts), CONTEXTS_PER_BLOCK):
        shown = range(first, min(first + CONTEXTS_PER_BLOCK, len(curve.contexts)))
        rows = [["context", *(f"{curve.contexts[place]:,}" for place in shown)]]
        for column, nodes in enumerate(curve.nodes):
            name = f"{nodes} node" + "s" * (nodes != 1)
            rows.append([name, *(f"{curve.milliseconds[place][column]:.2f}" for place in shown)])
        blocks.append(tables.table(rows, widths=[8] * (len(shown) + 1), gap=1))
    return "\n\n".join(blocks)
