"""Pictures, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from io import BytesIO
from typing import Any

from hdtool.data.file_origins import PNG_METADATA

OPEN_FRAME = {"axes.spines.top": False, "axes.spines.right": False}
GRID = {**OPEN_FRAME, "axes.grid": True, "grid.alpha": 0.3}
"""Settings of matplotlib."""


def png_of(
    draw: Callable[[Any], object], inches: tuple[float, float], dpi: int, settings: Mapping[str, Any] = GRID
) -> bytes:
    """Return what ``draw`` draws on a new figure."""
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
