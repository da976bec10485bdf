"""Keep Python processes from importing modules, and numba from reading settings, in the current folder.

With ``-c`` and ``-m``, Python searches the current folder before its libraries, so a ``numpy.py`` among a user's files
would be executed. Multiprocessing and other libraries start their processes with these options.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hdtool
from hdtool.data.errors import HdtoolError

ISOLATION_VARIABLE = "PYTHONSAFEPATH"
"""Environment variable that keeps the current folder off Python's search path, as ``-P`` does."""
NUMBA_SETTINGS = ".numba_config.yaml"
"""File that numba reads in the current folder. It can name a folder of compiled code, which numba then loads."""


def isolated_python(*arguments: str) -> list[str]:
    """Return the command that runs this Python with ``arguments``, such as ``-m`` and the name of a module."""
    return [sys.executable, "-P", *arguments]


@contextmanager
def isolated_children() -> Iterator[None]:
    """Keep the processes that are started in the ``with`` block from importing modules from the current folder."""
    before = os.environ.get(ISOLATION_VARIABLE)
    os.environ[ISOLATION_VARIABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[ISOLATION_VARIABLE]
        else:
            os.environ[ISOLATION_VARIABLE] = before


def leave_current_folder() -> None:
    """Remove the current folder from this process's search path if ``-m`` put it there, unless hdtool lies in it."""
    current = os.getcwd()
    if not sys.flags.safe_path and sys.path[:1] == [current] and Path(hdtool.__file__).parents[1] != Path(current):
        del sys.path[0]


def refuse_numba_settings() -> None:
    """Raise HdtoolError if numba would read settings from the current folder."""
    if os.path.isfile(NUMBA_SETTINGS):
        raise HdtoolError(
            f"the current folder contains {NUMBA_SETTINGS}, which can make numba run code from any folder: "
            "start hdtool in another folder"
        )
