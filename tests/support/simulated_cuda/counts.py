"""Count events of the device by kind, and by the line of the project that caused them."""

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
"""Copies between pinned memory and the device, for which the host does not wait."""
STAGED = "pageable copy in"
"""Copy from pageable memory. The driver copies it to a buffer first, and the host waits only for that."""
WAIT = "wait: "
"""Prefix of events in which the host waits for the device, followed by the reason."""

OWN = str(Path(__file__).parent)
LIBRARY = "transformers/"


class DeviceError(RuntimeError):
    """Raised for what a CUDA device rejects, and for what would access the wrong memory."""


class Counts:
    """Counters of a device, which tests read and clear."""

    def __init__(self) -> None:
        self.events: Counter[str] = Counter()
        self.lines: Counter[tuple[str, str]] = Counter()
        """Number of events by kind and by the line that caused them."""
        self.faults: Counter[str] = Counter()

    def add(self, kind: str) -> None:
        self.events[kind] += 1
        self.lines[kind, line_of_caller()] += 1

    def fault(self, text: str) -> DeviceError:
        """Count a fault, and return the error for the caller to raise."""
        self.faults[f"{text}, at {line_of_caller()}"] += 1
        return DeviceError(text)

    def clear(self) -> None:
        for counter in (self.events, self.lines, self.faults):
            counter.clear()


def waits(events: Counter[str]) -> int:
    return sum(number for kind, number in events.items() if kind.startswith(WAIT))


def line_of_caller() -> str:
    """Return the innermost line of the project outside this package, after the line of transformers that it called."""
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
    """Return the short name of a file of the project or of transformers, and an empty string for any other file."""
    _, is_library, place = file.rpartition(f"/{LIBRARY}")
    if is_library:
        return LIBRARY + place
    if file.startswith(OWN) or "site-packages" in file or not file.startswith(str(ROOT)):
        return ""
    return str(Path(file).relative_to(ROOT))
