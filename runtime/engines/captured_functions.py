"""Interface for capturing functions on a device to replay them, and captured functions by shape."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Generic, Protocol, TypeVar

import torch

from hdtool.data.notes import note

Shape = TypeVar("Shape")
Output = TypeVar("Output")
RETRY_AFTER = 256
"""Number of uses after which capturing a function is tried again, if memory was too short before."""

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


class CapturedRun(Generic[Output]):
    """A captured function; if memory was too short to capture it, another attempt is due after ``RETRY_AFTER`` uses."""

    run: Run | None = None
    """Replays the function, or runs it if it is not captured; None if memory was too short even for running it."""
    output: Output | None = None
    """What the function returned when it was last called, such as tensors that replays overwrite."""

    def __init__(self, capture: Capture, compute: Callable[[], Output]) -> None:
        def run() -> None:
            self.output = compute()

        try:
            self.run = capture.record(run)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            note_uncaptured()
        self._uses_left = RETRY_AFTER if self.run in (run, None) else None
        """Number of uses before another attempt to capture the function; None if it is captured."""

    def is_due(self) -> bool:
        """Count a use; return True if another attempt to capture the function is due now."""
        if self._uses_left is not None:
            self._uses_left -= 1
        return self._uses_left == 0


class CapturedRuns(dict[Shape, CapturedRun[Output]]):
    """Functions captured once for each shape of the buffers that they read and write, and then replayed."""

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self._capture = capture
        self.has_failed = False
        """True if a function could not be captured by ``of_any``."""

    def of(
        self, shape: Shape, compute: Callable[[], Output], before: Callable[[], None] = lambda: None
    ) -> CapturedRun[Output]:
        """Return a shape's function; if none is captured or a retry is due, call ``before`` and capture ``compute``."""
        captured = self.get(shape)
        if captured is None or captured.is_due():
            before()
            captured = self[shape] = CapturedRun(self._capture, compute)
        return captured

    def of_any(self, shape: Shape, compute: Callable[[], Output]) -> CapturedRun[Output] | None:
        """Return a shape's function as ``of`` does, or None if capturing any function here has raised an error."""
        try:
            return None if self.has_failed else self.of(shape, compute)
        except Exception:  # code that cannot be captured may raise any error
            self.has_failed = True
            return None


OUT_OF_MEMORY = "out of memory", "alloc_failed"
"""Parts of the messages, in lower case, by which CUDA and its libraries report a lack of memory."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if an error, or one in its chain of causes, says that the device is out of memory.

    A capture that runs out of memory may end with a second error, about the end of the capture.
    """
    while error:
        if isinstance(error, torch.OutOfMemoryError) or any(part in str(error).lower() for part in OUT_OF_MEMORY):
            return True
        error = error.__cause__ or error.__context__
    return False


@cache
def note_uncaptured() -> None:
    """Tell the user, once per process, that memory is too short to capture a step."""
    note(
        "there is not enough GPU memory to capture a step as a CUDA graph: it runs without one, which is slower, "
        f"and capturing is tried again every {RETRY_AFTER} steps"
    )
