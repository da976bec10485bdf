"""Memory that a process has freed, returned to the system."""

from __future__ import annotations

import ctypes
import sys


def return_free_memory() -> None:
    """Return what was freed, where the system's allocator would keep it for later."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)
