"""The interface of what captures the steps of a model on its device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Run = Callable[[], None]


class Capture(Protocol):
    """Captures functions so that they can be replayed on the same tensors."""

    def record(self, run: Run) -> Run:
        """Return a function that replays ``run``, or ``run`` itself if there is not enough memory to capture it.

        Capturing may call ``run`` any number of times. What was captured is released with the returned function.
        """
        ...


CaptureMaker = Callable[[torch.device], Capture | None]
"""Returns a ``Capture`` for a device, or None if steps on that device are neither captured nor padded."""


def never(device: torch.device) -> Capture | None:
    return None
