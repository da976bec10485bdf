"""Available memory, anonymous memory mappings, and exclusion of objects from garbage collection."""

from __future__ import annotations

import atexit
import gc
import mmap
import sys
from contextlib import suppress

PRIVATE = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
HUGE_PAGE = 2 << 20
"""Size of a huge page of x86-64, and of AArch64 with pages of 4 KiB, in bytes."""


def mapped_memory(size: int, *, huge_pages: bool = False) -> mmap.mmap:
    """Return ``size`` zeroed bytes in a separate anonymous mapping, which is unmapped when nothing refers to it.

    With ``huge_pages``, huge pages are requested, which reduce TLB misses in memory that is read whole, as weights are.
    """
    memory = mmap.mmap(-1, size, **PRIVATE)
    if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def available_memory() -> int | None:
    """Return the memory that is free or reclaimable, in bytes; None if the system does not report it."""
    try:
        with open("/proc/meminfo", encoding="ascii") as stream:
            rows = dict(line.split(":", 1) for line in stream)
        return int(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def freeze_objects() -> None:
    """Exclude all objects that exist now from garbage collection."""
    gc.freeze()
    atexit.register(_thaw_objects)


def _thaw_objects() -> None:
    if "triton" in sys.modules:  # it prints what is not collected at exit
        gc.unfreeze()
