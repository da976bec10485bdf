"""Start commands as a shell does, and wait for them without hanging if they end early."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from threading import Timer
from typing import Any

HDTOOL = [sys.executable, "-m", "hdtool.cli"]
TIMEOUT_SECONDS = 120.0
"""Timeout in seconds, for a busy machine."""


def start(command: list[str], **options: Any) -> subprocess.Popen[str]:
    """Start a process with captured output that reacts to Ctrl-C, which a shell's background processes ignore."""
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=accept_ctrl_c, **options
    )


def accept_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def read_until(process: subprocess.Popen[str], words: str) -> str:
    """Return the lines of standard error up to one with these words. Fails if the process ends before."""
    assert process.stderr
    stuck = Timer(TIMEOUT_SECONDS, process.kill)
    stuck.start()
    output = ""
    try:
        for line in process.stderr:
            output += line
            if words in line:
                return output
    finally:
        stuck.cancel()
    raise AssertionError(f"the process ended with {process.wait()} before it printed {words!r}:\n{output}")


def wait_until(process: subprocess.Popen[str], done: Callable[[], bool]) -> None:
    """Wait until ``done`` returns True or the process succeeds. Fails if the process fails or times out."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not done():
        if process.poll() is not None:
            if process.returncode:
                raise AssertionError(f"the process ended with {process.returncode}:\n{process.communicate()[1]}")
            return
        if time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"nothing happened for {TIMEOUT_SECONDS:.0f} seconds:\n{process.communicate()[1]}")
        time.sleep(0.005)
