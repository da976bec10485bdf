"""The simulated device, which queues work until the host waits or records it during a capture."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.support.simulated_cuda.counts import KERNEL, REPLAYED, WAIT, Counts

if TYPE_CHECKING:
    from tests.support.simulated_cuda.graphs import CUDAGraph

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
SECONDS_PER_KERNEL = 2e-6
FIRST_ADDRESS, ALIGNMENT = 1 << 40, 512


class Allocation:
    """Device memory, which is freed with the last tensor that refers to it."""

    _next_address = FIRST_ADDRESS

    def __init__(self, size: int) -> None:
        self.size, self.address = size, Allocation._next_address
        Allocation._next_address += -(-max(size, 1) // ALIGNMENT) * ALIGNMENT

    def data_ptr(self) -> int:
        return self.address

    def nbytes(self) -> int:
        return self.size


class PartOfAllocation(Allocation):
    """Part of an allocation that looks like a separate one and keeps the whole alive."""

    def __init__(self, whole: Allocation, address: int, size: int) -> None:
        self.whole, self.address, self.size = whole, address, size


@dataclass(slots=True)
class Operation:
    """Kernel or copy. It keeps its operands, and ``uses`` tells whether their memory has been freed."""

    kind: str
    """``KERNEL``, ``COPY_IN``, ``COPY_OUT`` or ``STAGED``."""
    name: str
    function: Callable[..., Any]
    arguments: Sequence[Any]
    options: dict[str, Any] = field(default_factory=dict)
    results: Sequence[Any] = ()
    """Memory for the results of a function that returns them."""
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
        """True if any of the memory has been freed."""
        return any(use() is None for use in self.uses)


class Device:
    """Simulated device, of which a process has one."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.seconds = 0.0
        """Simulated time that the work has taken so far, which events read."""
        self.capture: CUDAGraph | None = None
        """Graph that records launched operations instead of the queue; None outside a capture."""
        self.is_working = False
        """True while queued work runs, whose torch calls are not simulated again."""
        self._queue: list[Callable[[], None]] = []

    def launch(self, operation: Operation) -> None:
        """Queue an operation, or record it during a capture."""
        if self.capture:
            self.capture.operations.append(operation)
            return
        self.counts.add(operation.kind)
        self.seconds += SECONDS_PER_KERNEL
        self._queue.append(operation)

    def replay(self, operations: Iterable[Operation], before: Iterable[Callable[[], None]]) -> None:
        """Queue the operations of a graph after ``before``, which overwrites the memory of the graph's pool."""
        self._queue += before
        for operation in operations:
            if operation.freed:
                raise self.counts.fault(f"a graph uses freed memory: {operation.name}")
            self.counts.events[REPLAYED if operation.kind == KERNEL else operation.kind] += 1
            self.seconds += SECONDS_PER_KERNEL
            self._queue.append(operation)

    def wait(self, reason: str) -> None:
        """Run all queued work, for which the host waits."""
        if self.capture:
            raise self.counts.fault(f"operation not permitted when stream is capturing: {reason}")
        self.counts.add(WAIT + reason)
        queue, self._queue = self._queue, []
        with self.working():
            for operation in queue:
                operation()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Let torch compute on the device's memory as on the host's inside this block."""
        before, self.is_working = self.is_working, True
        try:
            with torch.inference_mode(), _disable_current_modes():
                yield
        finally:
            self.is_working = before

    def abandon(self) -> None:
        """Discard queued work and a capture after a fault."""
        self._queue.clear()
        self.capture = None


DEVICE = Device()
