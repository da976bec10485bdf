"""CUDA graphs: captures functions on a device, again after failures, and runs them directly if memory is short."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache
from typing import Generic, TypeVar

import torch

from hdtool.data.notes import note
from hdtool.runtime.engines.capture_interface import Capture, Run
from hdtool.runtime.engines.cuda.waits import waits_refused

Shape = TypeVar("Shape")
Output = TypeVar("Output")
WARM_UPS = 1
"""Number of warm-up runs before a capture, since compilation and lazy initialization cannot be captured."""

FIRST_RECOVERING_TORCH = 2, 12
"""First torch release that can capture again after a failed capture (pytorch/pytorch#180395)."""
RETRY_AFTER = 256
"""Number of steps of one shape after which it is captured again, if there was not enough memory before."""


class CudaGraphs:
    """Captures CUDA graphs that share a memory pool, which is only slightly larger than the largest graph needs.

    Sharing is safe because nothing in the pool is read after the next replay has started. An empty graph keeps the pool
    alive when all others are released: torch refuses to capture into a pool that has lost its last graph.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        self._failure: Exception | None = None
        """Error that ended a capture, if torch cannot capture again after it."""
        # The first capture of a process creates the seed tensor of the device's generator. If it were created in
        # inference mode, every later capture outside of that mode would fail, such as that of a compiled `generate`.
        with torch.inference_mode(False):
            number = torch.zeros(1, device=device)

            def run() -> None:
                number.zero_()

            self._kept = self.record(run)

    def record(self, run: Run) -> Run:
        """Try twice, because memory or another thread may have been in the way the first time."""
        try:
            return self._record(run)
        except Exception:  # any code may run in a capture
            release_memory()
        try:
            return self._record(run)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        run()  # raises an error if there is not even enough memory for that
        note_uncaptured()
        return run

    def _record(self, run: Run) -> Run:
        if self._failure:
            raise RuntimeError("this release of torch cannot capture again after a failure") from self._failure
        with torch.cuda.device(self._device):
            main = torch.cuda.current_stream()
            self._side.wait_stream(main)
            try:
                with torch.cuda.stream(self._side):
                    for _ in range(WARM_UPS):
                        run()
                    if not can_capture_after_failure():
                        with waits_refused():
                            run()
            finally:
                main.wait_stream(self._side)
            graph = torch.cuda.CUDAGraph()
            # A cuBLAS workspace from before the capture could be freed or used elsewhere while graphs still write to
            # it; one that is allocated during the capture belongs to the graphs' pool.
            clear_cublas_workspaces()
            try:
                # Thread-local, so that other threads may use the device meanwhile.
                with torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"):
                    run()
            except Exception as error:
                self._failure = None if can_capture_after_failure() else error
                raise
            finally:
                torch.cuda.set_stream(main)  # a capture that fails as it ends leaves the side stream current
                clear_cublas_workspaces()
        return graph.replay


class CapturedRun(Generic[Output]):
    """A captured function. If memory was too short to capture it, that is due again after ``RETRY_AFTER`` uses."""

    run: Run | None = None
    """Replays the function, or runs it if memory was too short to capture it; None if it is too short to run it."""
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
        """Count a use; return True if the function should be captured now."""
        if self._uses_left is not None:
            self._uses_left -= 1
        return self._uses_left == 0


class CapturedRuns(dict[Shape, CapturedRun[Output]]):
    """Functions captured once for each shape of the buffers that they read and write, and then replayed."""

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self._capture = capture

    def of(
        self, shape: Shape, compute: Callable[[], Output], before: Callable[[], None] = lambda: None
    ) -> CapturedRun[Output]:
        """Return the captured function of a shape; if there is none, capture ``compute`` after calling ``before``."""
        captured = self.get(shape)
        if captured is None or captured.is_due():
            before()
            captured = self[shape] = CapturedRun(self._capture, compute)
        return captured


def can_capture_after_failure() -> bool:
    """Return True if torch can capture again after a failed capture."""
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) >= FIRST_RECOVERING_TORCH


OUT_OF_MEMORY = "out of memory", "alloc_failed"
"""Parts of messages by CUDA and its libraries, in lower case."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if an error, or one that it followed, says that the device's memory is short.

    A capture that runs out of memory may end with a second error, about the end of the capture.
    """
    while error:
        if isinstance(error, torch.OutOfMemoryError) or any(part in str(error).lower() for part in OUT_OF_MEMORY):
            return True
        error = error.__cause__ or error.__context__
    return False


def release_memory() -> None:
    """Give unused memory of Python objects and of torch back to the device."""
    gc.collect()
    torch.cuda.empty_cache()


@cache
def note_uncaptured() -> None:
    """Print a note, once."""
    note(
        "there is not enough GPU memory to capture a step as a CUDA graph: it runs without one, which is slower, "
        f"and capturing is tried again every {RETRY_AFTER} steps"
    )


def clear_cublas_workspaces() -> None:
    """Free cuBLAS's workspaces, one per handle and stream; the next matmul allocates a new one."""
    torch._C._cuda_clearCublasWorkspaces()
