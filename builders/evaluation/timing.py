"""Times work in wall and CPU time, and decides whether timings are steady enough to state a speed-up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

MAX_WAITED = 0.25
"""Seconds that a method's threads may wait for cores, per second of wall time, before a comparison is in doubt."""
MAX_SPREAD = 0.25
"""Spread of the repeats of an answer, as a share of their median, above which a comparison is in doubt."""
OWN_THREADS = Path("/proc/self/task")

T = TypeVar("T")


class Stopwatch:
    """Context manager that measures work: its wall time, its CPU time, and how long its threads waited for cores."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun = (0.0, 0.0, 0.0)
        self.seconds = 0.0
        self.cpu_seconds = 0.0
        """CPU time of all threads of the process."""
        self.waited_seconds = 0.0
        """Time that all threads together were ready to run and had no core."""
        self.first_seconds: float | None = None
        """Time to the first token; None if ``first_token`` was not called."""

    def __enter__(self) -> Stopwatch:
        _synchronize(self._device)
        self._begun = (_queued_seconds(), time.process_time(), time.perf_counter())
        return self

    def __exit__(self, *error: object) -> None:
        _synchronize(self._device)
        queued, cpu, began = self._begun
        self.seconds = time.perf_counter() - began
        self.cpu_seconds = time.process_time() - cpu
        self.waited_seconds = max(0.0, _queued_seconds() - queued)
        if self._device.type == "cpu":  # at least one thread always computes, also where the system counts no waits
            self.waited_seconds = max(self.waited_seconds, self.seconds - self.cpu_seconds)

    def times(self) -> dict[str, Any]:
        """Return the measured times by field of ``AnsweredTurn``."""
        names = ("seconds", "first_seconds", "cpu_seconds", "waited_seconds")
        return {name: getattr(self, name) for name in names}

    def first_token(self) -> None:
        """Record the time to the first token; later calls have no effect."""
        if self.first_seconds is None:
            _synchronize(self._device)
            self.first_seconds = time.perf_counter() - self._begun[2]


def timed(device: torch.device, action: Callable[[], T]) -> tuple[T, float]:
    """Run an action; return ``(result, seconds)``, with the device synchronized before and after it."""
    with Stopwatch(device) as watch:
        result = action()
    return result, watch.seconds


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        import torch  # not needed by those who only judge timings

        torch.accelerator.synchronize(device)


def _queued_seconds(threads: Path = OWN_THREADS) -> float:
    """Return how long all threads of this process have waited for a core; 0 if the system does not tell."""
    nanoseconds = 0
    for path in threads.glob("*/schedstat"):
        try:
            nanoseconds += int(path.read_text().split()[1])
        except (OSError, ValueError, IndexError):  # the thread has ended
            continue
    return nanoseconds / 1e9


class Measured(Protocol):
    """Protocol of a measurement: a ``Stopwatch``, an answer, or the total of several."""

    @property
    def seconds(self) -> float: ...
    @property
    def waited_seconds(self) -> float | None: ...


@dataclass(frozen=True)
class Timings:
    """Timings of one method."""

    seconds: float
    waited_seconds: float = 0.0
    repeats: Sequence[Sequence[float]] = ()
    """For each answer, the seconds of all its repeats."""

    @classmethod
    def of(cls, measured: Iterable[Measured], repeats: Sequence[Sequence[float]] = ()) -> Timings:
        parts = list(measured)
        return cls(sum(one.seconds for one in parts), sum(one.waited_seconds or 0.0 for one in parts), repeats)

    @property
    def waited(self) -> float:
        """Seconds that the threads waited for cores, per second of wall time."""
        return self.waited_seconds / self.seconds if self.seconds else 0.0

    @property
    def spread(self) -> float:
        """Median over the answers of (slowest repeat - fastest repeat) / median repeat; 0 without repeats."""
        spreads = [(max(times) - min(times)) / median(times) for times in self.repeats if len(times) > 1 and min(times)]
        return median(spreads) if spreads else 0.0


def doubt(timings: Mapping[str, Timings]) -> str:
    """Return a sentence that says why no speed-up follows from these timings; empty if they are sound.

    They are in doubt if the threads of a method waited for cores longer than ``MAX_WAITED`` per second, or if repeats
    of the same answer scatter by more than ``MAX_SPREAD``.
    """
    if not timings:
        return ""
    delayed = max(timings, key=lambda name: timings[name].waited)
    if (waited := timings[delayed].waited) > MAX_WAITED:
        return (
            f"No speed-up is stated, because the machine was busy: the threads of {delayed} waited "
            f"{waited:.1f} s for a core in each second. Measure again on an idle machine."
        )
    uneven = max(timings, key=lambda name: timings[name].spread)
    if (spread := timings[uneven].spread) > MAX_SPREAD:
        return (
            f"No speed-up is stated, because repeats of the same answer by {uneven} differ by {spread:.0%} of their "
            "median. Measure again on an idle machine."
        )
    return ""
