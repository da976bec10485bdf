"""How much memory the system has to spare, memory mappings of their own, and objects that are never collected."""

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
    """Return ``size`` bytes of zeros in a mapping of their own, which is released with its last user.

    With ``huge_pages``, it lies in huge pages where the system has them: memory that is read whole, such as weights, is
    then read faster, with fewer misses of the TLB.
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
    """Exclude all objects of this process from garbage collection."""
    gc.freeze()
    atexit.register(_thaw_objects)


def _thaw_objects() -> None:
    if "triton" in sys.modules:  # it prints what is not collected at exit
        gc.unfreeze()
