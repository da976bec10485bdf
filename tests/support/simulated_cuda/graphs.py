"""Streams, events and graphs with the interface of ``torch.cuda``."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch

from tests.support.simulated_cuda.counts import CAPTURE, REPLAY
from tests.support.simulated_cuda.queue import CUDA, DEVICE, Allocation, Operation
from tests.support.simulated_cuda.tensors import spoil

MIN_EVENT_SECONDS = 1e-6
"""Minimum time between two events in seconds."""


class Stream:
    """Stream of the device. All streams share one queue, as if each waited for the others."""

    def __init__(self, device: object = None, **options: Any) -> None:
        self.device = CUDA

    def wait_stream(self, other: Stream) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def synchronize(self) -> None:
        DEVICE.wait("a stream")


class Event:
    def __init__(self, enable_timing: bool = False, **options: Any) -> None:
        self._seconds = 0.0

    def record(self, stream: Stream | None = None) -> None:
        if DEVICE.capture:
            raise DEVICE.counts.fault("an event is recorded during a capture")
        self._seconds = DEVICE.seconds

    def wait(self, stream: Stream | None = None) -> None: ...

    def synchronize(self) -> None:
        DEVICE.wait("an event")

    def elapsed_time(self, other: Event) -> float:
        """Return the milliseconds from this event to the other one."""
        return 1e3 * max(MIN_EVENT_SECONDS, other._seconds - self._seconds)


class Streams:
    """The default stream and the current stream."""

    def __init__(self) -> None:
        self.default = self._current = Stream()

    def current(self, device: object = None) -> Stream:
        return self._current

    def set(self, stream: Stream) -> None:
        self._current = stream

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before


STREAMS = Streams()


class Pool:
    """Memory that graphs share. Only one of them runs at a time, and each overwrites what the others left there.

    Once the last graph is released, the pool ends, and its handle must not be used again.
    """

    def __init__(self) -> None:
        self.graphs: weakref.WeakSet[CUDAGraph] = weakref.WeakSet()
        self._has_begun = False

    def begin(self) -> None:
        """Begin a capture into the pool, with torch's own assertion."""
        if self._has_begun and not self.graphs:
            raise DEVICE.counts.fault("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self._has_begun = True


class CUDAGraph:
    """Recorded operations, with the memory that was allocated during the recording."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.operations: list[Operation] = []
        self.pool = Pool()
        self._memory: list[tuple[torch.Tensor, Allocation]] = []
        self._is_spoiled = False

    def keep_memory(self, numbers: torch.Tensor, allocation: Allocation) -> None:
        """Keep memory that is allocated while the graph is recorded."""
        self._memory.append((numbers, allocation))

    def replay(self) -> None:
        if DEVICE.capture:
            raise DEVICE.counts.fault("a graph is replayed during a capture")
        DEVICE.counts.add(REPLAY)
        DEVICE.replay(self.operations, [graph.spoil for graph in self.pool.graphs if not graph._is_spoiled])
        for graph in self.pool.graphs:
            graph._is_spoiled = graph is not self

    def spoil(self) -> None:
        for numbers, _ in self._memory:
            spoil(numbers)

    def reset(self) -> None:
        self.operations.clear()
        self._memory.clear()


class GraphCapture:
    """Context manager that records a graph, as ``torch.cuda.graph`` does."""

    def __init__(
        self,
        cuda_graph: CUDAGraph,
        pool: Pool | None = None,
        stream: Stream | None = None,
        capture_error_mode: str = "global",
    ) -> None:
        self._graph, self._stream = cuda_graph, stream or Stream()
        cuda_graph.pool = pool or Pool()

    def __enter__(self) -> None:
        DEVICE.wait("a capture begins")
        self._graph.pool.begin()
        DEVICE.counts.add(CAPTURE)
        self._before = STREAMS.current()
        STREAMS.set(self._stream)
        DEVICE.capture = self._graph

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        DEVICE.capture = None
        if kind is None:
            STREAMS.set(self._before)
            self._graph.pool.graphs.add(self._graph)
        # After a failure, the capture's stream remains the current one, as in torch.
