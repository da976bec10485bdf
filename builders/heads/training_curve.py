"""The plot of a training: its loss, and the accuracy of each head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hdtool.builders.heads.training import History
from hdtool.data.errors import HeadsError
from hdtool.data.files.atomic_write import OutputFile
from hdtool.data.files.ownership import PNG_METADATA, is_own_png

CURVE = "training.png"
INCHES, DOTS = (8.0, 4.0), 130
SMOOTHED = 50
"""Points of a curve at least; each is the mean over some steps."""


def draw_training(history: History, folder: Path) -> None:
    """Two curves over the steps, as a PNG."""
    from matplotlib.figure import Figure  # not pyplot: nothing is shown, and no state is kept

    figure: Any = Figure(figsize=INCHES, layout="constrained")
    left, right = figure.subplots(1, 2)
    steps, losses = _smooth(np.array(history.losses))
    left.plot(steps, losses)
    left.set_ylabel("loss a token, nats")
    _, hits = _smooth(np.array(history.hits))
    for head, shares in enumerate(hits.T, start=1):
        right.plot(steps, 100 * shares, label=f"head {head}")
    right.set_ylabel("tokens that a head had first, %")
    right.set_ylim(bottom=0)
    right.legend(fontsize="small")
    for axes in (left, right):
        axes.set_xlabel("steps")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    with curve_file(folder).replaced() as stream:
        figure.savefig(stream, format="png", dpi=DOTS, metadata=PNG_METADATA)


def curve_file(folder: Path) -> OutputFile:
    return OutputFile(folder / CURVE, "a picture of hdtool train-heads", is_own_png, HeadsError)


def _smooth(values: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    size = max(1, len(values) // SMOOTHED)
    starts = np.arange(0, len(values), size)
    means = np.stack([values[start : start + size].mean(axis=0) for start in starts])
    return starts + size / 2, means
