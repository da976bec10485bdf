"""Plot the losses and accuracies of a training run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hdtool.builders.evaluation.pictures import png_of
from hdtool.builders.head_training.training_loop import TrainingHistory
from hdtool.data.errors import HeadsError
from hdtool.data.output_files import OutputFile
from hdtool.data.own_files import is_own_png

CURVE_FILE = "training.png"
CURVE_INCHES, CURVE_DPI = (8.0, 4.0), 130
MIN_CURVE_POINTS = 50
"""Minimum number of points per curve if there are as many steps; each point is a mean over consecutive steps."""


def draw_training(history: TrainingHistory, folder: Path) -> None:
    """Plot the loss and the accuracy of each head over the steps, as a PNG in ``folder``."""
    curve_file(folder).write(png_of(partial(_draw, history), CURVE_INCHES, CURVE_DPI))


def _draw(history: TrainingHistory, figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    steps, losses = _smooth(np.array(history.losses))
    left.plot(steps, losses)
    left.set(xlabel="steps", ylabel="loss a token, nats")
    _, hits = _smooth(np.array(history.hits))
    for head, shares in enumerate(hits.T, start=1):
        right.plot(steps, 100 * shares, label=f"head {head}")
    right.set(xlabel="steps", ylabel="tokens that a head had first, %", ylim=(0, None))
    right.legend(fontsize="small")


def curve_file(folder: Path) -> OutputFile:
    return OutputFile(folder / CURVE_FILE, "a picture of hdtool train-heads", is_own_png, HeadsError)


def _smooth(values: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    size = max(1, len(values) // MIN_CURVE_POINTS)
    starts = np.arange(0, len(values), size)
    means = np.stack([values[start : start + size].mean(axis=0) for start in starts])
    return starts + size / 2, means
