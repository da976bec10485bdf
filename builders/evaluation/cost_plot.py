"""Plot the latency of forward passes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from hdtool.builders.evaluation.pictures import png_of
from hdtool.data.errors import CostError
from hdtool.data.output_files import OutputFile
from hdtool.data.own_files import is_own_png
from hdtool.runtime.budget.cost_curve import CostCurve

COST_PLOT_INCHES, COST_PLOT_DPI = (7.0, 4.2), 150


def draw_cost(curve: CostCurve, path: Path) -> None:
    """Plot milliseconds per forward pass against the number of draft nodes, one line per context length, as a PNG."""
    cost_plot_file(path).write(png_of(partial(_draw, curve), COST_PLOT_INCHES, COST_PLOT_DPI))


def _draw(curve: CostCurve, figure: Any) -> None:
    from matplotlib import colormaps

    axes = figure.subplots()
    for place, (context, times) in enumerate(zip(curve.contexts, curve.milliseconds, strict=True)):
        color = colormaps["viridis"](0.9 * place / max(1, len(curve.contexts) - 1))
        axes.plot(curve.nodes, times, marker="o", markersize=3.5, color=color, label=f"{context:,}")
    axes.set(xlabel="draft nodes in the pass", ylabel="milliseconds", xlim=(0, None), ylim=(0, None))
    axes.legend(title="context, tokens", fontsize="small", title_fontsize="small")
    axes.set_title(f"A forward pass of {curve.model} in {curve.dtype}\n{curve.device}", fontsize="medium")


def cost_plot_file(path: Path) -> OutputFile:
    """Return the ``OutputFile`` of the plot, which never replaces a file that hdtool did not draw."""
    return OutputFile(path, "a picture of hdtool bench-cost", is_own_png, CostError)
