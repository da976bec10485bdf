"""The plot of a training's losses and accuracies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hdtool.builders.heads.training_loop import TrainingHistory
from hdtool.data.errors import HeadsError
from hdtool.data.file_origins import PNG_METADATA, is_own_png
from hdtool.data.output_files import OutputFile

CURVE_FILE = "training.png"
CURVE_INCHES, CURVE_DPI = (8.0, 4.0), 130
MIN_CURVE_POINTS = 50
"""Minimum number of points per curve; each point is a mean over consecutive steps."""


def draw_training(history: TrainingHistory, folder: Path) -> None:
    """Plot the loss and the accuracy of each head over the steps, as a PNG in ``folder``."""
    from matplotlib import style
    from matplotlib.figure import Figure  # not pyplot, which keeps global state

    with style.context("default"):  # the current folder may hold a matplotlibrc, which can even run LaTeX
        figure: Any = Figure(figsize=CURVE_INCHES, layout="constrained")
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
            figure.savefig(stream, format="png", dpi=CURVE_DPI, metadata=PNG_METADATA)


def curve_file(folder: Path) -> OutputFile:
    return OutputFile(folder / CURVE_FILE, "a picture of hdtool train-heads", is_own_png, HeadsError)


def _smooth(values: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    size = max(1, len(values) // MIN_CURVE_POINTS)
    starts = np.arange(0, len(values), size)
    means = np.stack([values[start : start + size].mean(axis=0) for start in starts])
    return starts + size / 2, means
