"""Capture and replay of steps with fixed shapes, as CUDA graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

WARM_UPS = 1
"""Runs before a capture: compilation and lazy initialization of libraries cannot be captured."""

FIRST_THAT_RECOVERS = 2, 12
"""Releases of torch before this one cannot capture after a capture that failed (pytorch/pytorch#180395)."""

Run = Callable[[], None]


class Capture(Protocol):
    """Captures runs so that they can be replayed on the same tensors."""

    def record(self, run: Run) -> Run:
        """Return a function that replays ``run``; capturing may call ``run`` any number of times."""
        ...

    def reset(self) -> None:
        """Release what was captured so far; it is not replayed again."""
        ...


class CudaGraphs:
    """CUDA graphs that share one memory pool, which is little larger than that of the largest graph.

    Sharing is safe because nothing in the pool is read after the next replay has started.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)
        self.reset()
        # The first capture of a process makes the seed tensor of the device's generator. Made under inference mode, it
        # would fail every later capture outside of it, such as those of a compiled `generate`.
        with torch.inference_mode(False):
            number = torch.zeros(1, device=device)

            def run() -> None:
                number.zero_()

            self._kept = self.record(run)

    def record(self, run: Run) -> Run:
        with torch.cuda.device(self._device):
            main = torch.cuda.current_stream()
            self._side.wait_stream(main)
            try:
                with torch.cuda.stream(self._side):
                    for _ in range(WARM_UPS):
                        run()
                    if not recovers():
                        with refused_waits():
                            run()
            finally:
                main.wait_stream(self._side)
            graph = torch.cuda.CUDAGraph()
            # A workspace from before the capture would be freed or used by others while graphs still write to it; one
            # that is allocated during the capture lies in the pool of the graphs.
            clear_cublas_workspaces()
            try:
                # Other threads may use the device meanwhile.
                with torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"):
                    run()
            finally:
                torch.cuda.set_stream(main)  # a capture that fails at its end leaves the side stream current
                clear_cublas_workspaces()
        return graph.replay

    def reset(self) -> None:
        # A pool and its handle end with the last of its graphs.
        self._pool = torch.cuda.graph_pool_handle()


class DeviceClock:
    """Measures work that a device does by itself, whatever the host does meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
        self._device = device
        self._times = [0.0, 0.0]

    def start(self) -> None:
        self._mark(0)

    def stop(self) -> None:
        self._mark(1)

    def _mark(self, which: int) -> None:
        if self._events:
            self._events[which].record(torch.cuda.current_stream(self._device))
        else:
            self._times[which] = time.perf_counter()

    def seconds(self) -> float:
        """Wait for the device to arrive at ``stop``; the seconds since ``start``."""
        if not self._events:
            return self._times[1] - self._times[0]
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3


def recovers() -> bool:
    """Whether torch can capture again after a capture that failed."""
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) >= FIRST_THAT_RECOVERS


@contextmanager
def refused_waits() -> Iterator[None]:
    """In this block, operations that wait for the device raise, as none of them can be captured.

    This holds for all threads: another one that waits meanwhile raises, too.
    """
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def clear_cublas_workspaces() -> None:
    """Free the memory that cuBLAS keeps for each handle and stream; the next product allocates it again."""
    torch._C._cuda_clearCublasWorkspaces()


CaptureMaker = Callable[[torch.device], Capture | None]
"""Makes a Capture for a device; None if steps are not captured and have the shape of their tree."""


def by_device(device: torch.device) -> Capture | None:
    """CUDA graphs on CUDA devices; elsewhere steps without padding are faster."""
    return CudaGraphs(device) if device.type == "cuda" else None


def never(device: torch.device) -> Capture | None:
    return None
