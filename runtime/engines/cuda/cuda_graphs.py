"""Captures functions as CUDA graphs, trying once more after a failure; if memory is short, they run uncaptured."""

from __future__ import annotations

import gc

import torch

from hdtool.runtime.engines.captured_functions import Run, is_out_of_memory, note_uncaptured
from hdtool.runtime.engines.cuda.refused_waits import waits_refused

WARM_UPS = 1
"""Number of warm-up runs before a capture, since compilation and lazy initialization cannot be captured."""

FIRST_RECOVERING_TORCH = 2, 12
"""First torch release that can capture again after a failed capture (pytorch/pytorch#180395)."""


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
        """Return a function that replays ``run``, or ``run`` itself if memory is too short even in a second attempt.

        Raise the error of a second attempt that fails otherwise, or of ``run`` if memory is too short even for that.
        """
        try:
            return self._record(run)
        except Exception:  # from any code; memory or another thread may have been in the way
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


def can_capture_after_failure() -> bool:
    """Return True if torch can capture again after a failed capture."""
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) >= FIRST_RECOVERING_TORCH


def release_memory() -> None:
    """Give unused memory of Python objects and of torch back to the device."""
    gc.collect()
    torch.cuda.empty_cache()


def clear_cublas_workspaces() -> None:
    """Free cuBLAS's workspaces, one per handle and stream; the next matmul allocates a new one."""
    torch._C._cuda_clearCublasWorkspaces()
