"""How a step whose shapes never change is repeated: as a CUDA graph, or by calling it again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

WARM_UPS = 2
"""Runs before a capture: libraries set themselves up in the first one, which a graph cannot record."""

Run = Callable[[], None]


class Capture(Protocol):
    """Records runs, so that they can be repeated on the same tensors."""

    def record(self, run: Run) -> Run:
        """What repeats ``run``; on the way there it may run any number of times."""
        ...

    def forget(self) -> None:
        """Hear that nothing recorded so far will be repeated again."""
        ...


class Direct:
    """Nothing is recorded: the same shapes and the same tensors on any device, which is what tests ask for."""

    def record(self, run: Run) -> Run:
        return run

    def forget(self) -> None:
        pass


class CudaGraphs:
    """Graphs that share one pool of memory, so that all of them take little more than the largest alone.

    That works because nothing that a run leaves in the pool is read after another has begun.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)
        self.forget()

    def record(self, run: Run) -> Run:
        with torch.cuda.device(self._device):
            main = torch.cuda.current_stream()
            self._side.wait_stream(main)
            with torch.cuda.stream(self._side):
                for _ in range(WARM_UPS):
                    run()
            main.wait_stream(self._side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._side):
                run()
        return graph.replay

    def forget(self) -> None:
        # A pool ends with the last of its graphs, and its handle with it.
        self._pool = torch.cuda.graph_pool_handle()


CaptureMaker = Callable[[torch.device], Capture | None]
"""None where steps are not recorded, and their shapes follow the tree."""


def by_device(device: torch.device) -> Capture | None:
    """Graphs where there are some; elsewhere the fewest numbers to compute are the fastest."""
    return CudaGraphs(device) if device.type == "cuda" else None


def never(device: torch.device) -> Capture | None:
    return None


def direct(device: torch.device) -> Capture | None:
    return Direct()
