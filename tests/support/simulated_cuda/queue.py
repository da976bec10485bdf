"""The device: its queue of work, which is done when the host waits, and the capture that records work instead."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.support.simulated_cuda.counts import KERNEL, REPLAYED, WAIT, Counts, DeviceError

if TYPE_CHECKING:
    from tests.support.simulated_cuda.graphs import CUDAGraph

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
EXPLICIT = {"an event", "a stream", "the device", "a capture begins"}
"""Reasons of waits that the host asks for."""
SECONDS_PER_KERNEL = 2e-6
FIRST_ADDRESS, ALIGNMENT = 1 << 40, 512


class Allocation:
    """Memory of the device, which is freed with the last tensor that refers to it."""

    _next_address = FIRST_ADDRESS

    def __init__(self, size: int) -> None:
        self.size, self.address = size, Allocation._next_address
        Allocation._next_address += -(-max(size, 1) // ALIGNMENT) * ALIGNMENT

    def data_ptr(self) -> int:
        return self.address

    def nbytes(self) -> int:
        return self.size


class PartOfAllocation(Allocation):
    """A part of other memory that looks like memory of its own, and keeps the whole."""

    def __init__(self, whole: Allocation, address: int, size: int) -> None:
        self.whole, self.address, self.size = whole, address, size


@dataclass(slots=True)
class Operation:
    """A kernel or a copy. It keeps the numbers that it computes with; ``uses`` tell whether their memory is freed."""

    kind: str
    """``KERNEL``, ``COPY_IN``, ``COPY_OUT`` or ``STAGED``."""
    name: str
    function: Callable[..., Any]
    arguments: Sequence[Any]
    options: dict[str, Any] = field(default_factory=dict)
    results: Sequence[Any] = ()
    """Where results are written, for a function that returns them."""
    uses: Sequence[weakref.ref[Allocation]] = ()

    def __call__(self) -> None:
        found = self.function(*self.arguments, **self.options)
        if self.results:
            parts = found if isinstance(found, tuple | list) else [found]
            for result, part in zip(self.results, parts, strict=True):
                if isinstance(result, torch.Tensor):
                    result.copy_(part)

    @property
    def freed(self) -> bool:
        """Whether any of the memory is freed."""
        return any(use() is None for use in self.uses)


class Device:
    """The only simulated device of a process."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.seconds = 0.0
        """The time that its work has taken, for events."""
        self.capture: CUDAGraph | None = None
        """The graph that records, instead of the queue, what is launched."""
        self.is_working = False
        """Whether queued work is being done; what it calls is not simulated again."""
        self.refuses_waits = False
        """Whether operations that wait raise; those that do nothing else may."""
        self._queue: list[Callable[[], None]] = []

    def launch(self, operation: Operation) -> None:
        """Queue an operation, or record it."""
        if self.capture:
            self.capture.operations.append(operation)
            return
        self.counts.add(operation.kind)
        self.seconds += SECONDS_PER_KERNEL
        self._queue.append(operation)

    def replay(self, operations: Iterable[Operation], before: Iterable[Callable[[], None]]) -> None:
        """Queue the operations of a graph, and before them what becomes of the memory of its pool."""
        self._queue += before
        for operation in operations:
            if operation.freed:
                raise self.counts.fault(f"a graph uses freed memory: {operation.name}")
            self.counts.events[REPLAYED if operation.kind == KERNEL else operation.kind] += 1
            self.seconds += SECONDS_PER_KERNEL
            self._queue.append(operation)

    def wait(self, reason: str) -> None:
        """Have the host wait until all queued work is done."""
        if self.capture:
            raise self.counts.fault(f"operation not permitted when stream is capturing: {reason}")
        if self.refuses_waits and reason not in EXPLICIT:
            raise DeviceError(f"called a synchronizing CUDA operation: {reason}")
        self.counts.add(WAIT + reason)
        queue, self._queue = self._queue, []
        with self.working():
            for operation in queue:
                operation()

    @contextmanager
    def working(self) -> Iterator[None]:
        """In this block, torch computes on the device's memory as on that of the host."""
        before, self.is_working = self.is_working, True
        try:
            with torch.inference_mode(), _disable_current_modes():
                yield
        finally:
            self.is_working = before

    def abandon(self) -> None:
        """Forget queued work and a capture, after a fault."""
        self._queue.clear()
        self.capture = None


DEVICE = Device()
