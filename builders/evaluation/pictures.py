"""Draw figures with matplotlib and encode them as PNG."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from io import BytesIO
from typing import Any

from hdtool.data.own_files import PNG_METADATA

OPEN_FRAME = {"axes.spines.top": False, "axes.spines.right": False}
GRID = {**OPEN_FRAME, "axes.grid": True, "grid.alpha": 0.3}
"""matplotlib settings for a faint grid without the top and right spines."""


def png_of(
    draw: Callable[[Any], object], inches: tuple[float, float], dpi: int, settings: Mapping[str, Any] = GRID
) -> bytes:
    """Call ``draw`` with a new figure of size ``inches``; return the figure as a PNG."""
    from matplotlib import style
    from matplotlib.figure import Figure  # not pyplot, which keeps global state

    # Not the user's settings: the current folder may hold a matplotlibrc, which can even run LaTeX.
    with style.context(["default", dict(settings)]):
        figure = Figure(inches, dpi=dpi, layout="constrained")
        draw(figure)
        out = BytesIO()
        # Replace matplotlib's version in the metadata, so that equal figures give equal files.
        figure.savefig(out, format="png", metadata=PNG_METADATA)
    return out.getvalue()
