"""Watches the memory, threads and file descriptors of a process."""

from __future__ import annotations

import threading
import time

import numpy as np
import psutil


class ProcessWatch:
    """Context manager that samples a process once a second."""

    def __init__(self, pid: int) -> None:
        self._process, self._started, self._done = psutil.Process(pid), time.monotonic(), threading.Event()
        self._samples: list[tuple[float, ...]] = []
        """Seconds, resident MiB, threads and file descriptors."""
        self._watching = threading.Thread(target=self._watch)

    def __enter__(self) -> ProcessWatch:
        self._watching.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._done.set()
        self._watching.join()

    def _watch(self) -> None:
        while not self._done.wait(1):
            memory, seconds = self._process.memory_info().rss / 2**20, time.monotonic() - self._started
            self._samples.append((seconds, memory, self._process.num_threads(), self._process.num_fds()))

    def growth(self, settled: float = 120.0) -> str:
        """Describe the growth of memory, threads and file descriptors after ``settled`` seconds or half of the time.

        Each line has the means of the first minute and of the last one, the maximum, and the slope per minute.
        """
        end = self._samples[-1][0]
        start = min(settled, end / 2)
        kept = np.array([sample for sample in self._samples if sample[0] >= start])
        lines = []
        for column, name in enumerate(("resident MiB", "threads", "descriptors"), 1):
            seconds, values = kept[:, 0], kept[:, column]
            early, late = values[seconds < start + 60].mean(), values[seconds >= end - 60].mean()
            slope = 60 * np.polyfit(seconds, values, 1)[0] if len(kept) > 1 else 0.0
            lines.append(
                f"{name}: {early:.1f} after {start:.0f} s, {late:.1f} at the end, {values.max():.0f} at most, "
                f"{slope:+.2f} a minute"
            )
        return "\n".join(lines)
