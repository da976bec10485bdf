"""Processes in tests: the command as a shell starts it, and waiting that ends when the process ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from threading import Timer
from typing import Any

HDTOOL = [sys.executable, "-m", "hdtool.cli"]
LONGEST = 120.0
"""Seconds after which a process is taken to hang, on a machine that does much else."""


def start(command: list[str], **options: Any) -> subprocess.Popen[str]:
    """A process whose output is read; it hears Ctrl-C, which what a shell starts in the background ignores."""
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=hear_ctrl_c, **options
    )


def hear_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def read_until(process: subprocess.Popen[str], words: str) -> str:
    """The lines of standard error up to one with these words; fails if the process ends before it prints them."""
    assert process.stderr
    stuck = Timer(LONGEST, process.kill)
    stuck.start()
    told = ""
    try:
        for line in process.stderr:
            told += line
            if words in line:
                return told
    finally:
        stuck.cancel()
    raise AssertionError(f"the process ended with {process.wait()} before it printed {words!r}:\n{told}")


def wait_until(process: subprocess.Popen[str], done: Callable[[], bool]) -> None:
    """Until something has happened or the process has succeeded; fails if it fails or hangs before."""
    deadline = time.monotonic() + LONGEST
    while not done():
        if process.poll() is not None:
            if process.returncode:
                raise AssertionError(f"the process ended with {process.returncode}:\n{process.communicate()[1]}")
            return
        if time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"nothing happened for {LONGEST:.0f} seconds:\n{process.communicate()[1]}")
        time.sleep(0.005)
