"""What the device did, counted by kind and by the line of the project that asked for it."""

from __future__ import annotations

import sys
from collections import Counter
from functools import cache
from pathlib import Path
from types import FrameType

from tests.support.project import ROOT

KERNEL = "kernel"
REPLAYED = "kernel in a replay"
REPLAY = "replay"
CAPTURE = "capture"
COPY_IN, COPY_OUT = "pinned copy in", "pinned copy out"
"""Copies between pinned memory and the device that the host does not wait for."""
STAGED = "pageable copy in"
"""A copy from memory that is not pinned, which the driver copies first, while the host waits for the driver only."""
WAIT = "wait: "
"""What begins the name of each wait of the host for the device; the reason follows."""

OWN = str(Path(__file__).parent)
LIBRARY = "transformers/"


class DeviceError(RuntimeError):
    """What a CUDA device refuses, or what would read or write the wrong memory."""


class Counts:
    """Counters of a device; tests read and clear them."""

    def __init__(self) -> None:
        self.events: Counter[str] = Counter()
        self.lines: Counter[tuple[str, str]] = Counter()
        """The number of events by kind and by the line that caused them."""
        self.faults: Counter[str] = Counter()

    def add(self, kind: str) -> None:
        self.events[kind] += 1
        self.lines[kind, line_of_caller()] += 1

    def fault(self, text: str) -> DeviceError:
        """Count a fault; the caller raises what this returns."""
        self.faults[f"{text}, at {line_of_caller()}"] += 1
        return DeviceError(text)

    def clear(self) -> None:
        for counter in (self.events, self.lines, self.faults):
            counter.clear()


def waits(events: Counter[str]) -> int:
    return sum(number for kind, number in events.items() if kind.startswith(WAIT))


def line_of_caller() -> str:
    """The innermost line of the project, outside this package, and before it that of transformers which it called."""
    frame: FrameType | None = sys._getframe(1)
    line = ""
    while frame:
        place = _place_of(frame.f_code.co_filename)
        if place and not (line and place.startswith(LIBRARY)):
            line += f"{' < ' * bool(line)}{place}:{frame.f_lineno}"
            if not place.startswith(LIBRARY):
                break
        frame = frame.f_back
    return line


@cache
def _place_of(file: str) -> str:
    """The short name of a file of the project or of transformers; none for another."""
    _, is_library, place = file.rpartition(f"/{LIBRARY}")
    if is_library:
        return LIBRARY + place
    if file.startswith(OWN) or "site-packages" in file or not file.startswith(str(ROOT)):
        return ""
    return str(Path(file).relative_to(ROOT))
