"""The name of the processor."""

from __future__ import annotations

import platform
from pathlib import Path


def processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        found = dict(line.replace("\t", "").split(": ", 1) for line in lines if ": " in line)
        return f"{found['model name'].strip()} (family {found['cpu family']}, model {found['model']})"
    except (OSError, KeyError):
        return platform.processor() or platform.machine()
