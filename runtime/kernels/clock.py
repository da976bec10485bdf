"""A clock for compiled code: ``clock_gettime`` of the C library, linked by name so that disk caches stay valid."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import numpy as np
from numba import types

from hdtool.runtime.kernels.compiled import Array, compiled


def _has_clock() -> bool:
    try:
        return hasattr(time, "CLOCK_MONOTONIC") and hasattr(ctypes.CDLL(None), "clock_gettime")
    except (OSError, TypeError):  # Windows has no library without a name
        return False


HAS_CLOCK = _has_clock()
MONOTONIC = getattr(time, "CLOCK_MONOTONIC", 0)

if HAS_CLOCK:
    _read: Any = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))
else:

    @compiled
    def _read(clock: int, address: int) -> int:
        return 0


@compiled
def lap(work: Any, source: int) -> None:
    """Add the time since the last lap to a source, if this draft is timed."""
    if work.timed:
        _read(MONOTONIC, work.instant_at)
        now = work.instant[0] * 1_000_000_000 + work.instant[1]
        work.laps[source] += now - work.since
        work.since = now


@compiled
def start_clock(work: Any) -> None:
    """Start the first lap."""
    lap(work, 0)
    work.laps[:] = 0


class SharedTime:
    """Time that is measured as a whole, and shared out by the laps of a part of it."""

    def __init__(self, parts: int) -> None:
        self._laps, self._shared_out = np.zeros((2, parts))
        self._spent = 0.0

    def spend(self, seconds: float) -> None:
        self._spent += seconds

    def clock(self, laps: Array) -> None:
        self._laps += laps

    def read(self) -> list[float]:
        """The time of each part. What was read before keeps its shares, so that no part's time goes down."""
        if whole := self._laps.sum():
            self._shared_out += self._spent * self._laps / whole
            self._spent = 0.0
        return self._shared_out.tolist()  # type: ignore[no-any-return]
