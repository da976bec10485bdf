"""How much memory the system has to spare."""

from __future__ import annotations


def available_memory() -> int | None:
    """Return the memory that is free or reclaimable, in bytes; None if the system does not report it."""
    try:
        with open("/proc/meminfo", encoding="ascii") as stream:
            rows = dict(line.split(":", 1) for line in stream)
        return int(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
