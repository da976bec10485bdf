"""The plot of a cost curve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hdtool.data.errors import CostError
from hdtool.data.files.atomic_write import OutputFile
from hdtool.data.files.ownership import PNG_METADATA, is_own_png
from hdtool.runtime.budget.cost_curve import CostCurve

INCHES, DOTS = (7.0, 4.2), 150


def draw_cost(curve: CostCurve, path: Path) -> None:
    """Milliseconds over draft nodes, a line for each context, as a PNG."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure  # not pyplot: nothing is shown, and no state is kept

    figure: Any = Figure(figsize=INCHES, layout="constrained")
    axes = figure.subplots()
    for place, (context, times) in enumerate(zip(curve.contexts, curve.milliseconds, strict=True)):
        color = colormaps["viridis"](0.9 * place / max(1, len(curve.contexts) - 1))
        axes.plot(curve.nodes, times, marker="o", markersize=3.5, color=color, label=f"{context:,}")
    axes.set(xlabel="draft nodes in the pass", ylabel="milliseconds", xlim=(0, None), ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(title="context, tokens", fontsize="small", title_fontsize="small")
    axes.set_title(f"A forward pass of {curve.model} in {curve.dtype}\n{curve.device}", fontsize="medium")
    with picture_file(path).replaced() as stream:
        figure.savefig(stream, format="png", dpi=DOTS, metadata=PNG_METADATA)


def picture_file(path: Path) -> OutputFile:
    """The plot, replaced only if hdtool drew the old one."""
    return OutputFile(path, "a picture of hdtool bench-cost", is_own_png, CostError)
