"""Measures how long a device takes for work that the host doesn't wait for."""

from __future__ import annotations

import time

import torch


class DeviceClock:
    """Measures the duration of work on a device: with events on CUDA, with the host's clock elsewhere."""

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
        """Wait until the device has reached ``stop``; return the seconds from ``start`` to ``stop``."""
        if not self._events:
            return self._times[1] - self._times[0]
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3
