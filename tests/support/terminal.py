"""Run a command in a pseudo-terminal, with the screen that a user would see."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import pexpect
import pyte

from tests.support.processes import accept_ctrl_c

PASTE = "\x1b[200~{}\x1b[201~"
"""Bracketed paste, as terminals send it."""
TIMEOUT_SECONDS = 180
"""Default timeout in seconds. A busy machine needs a minute to start a command."""
BRACKETED_PASTE = 2004
"""Terminal mode in which pastes are marked."""


class _Screen(pyte.Screen):
    """Screen that answers cursor queries as terminals do, and counts prompts of the line editor."""

    answer: Callable[[str], None]
    prompts = 0

    def set_mode(self, *modes: int, **options: Any) -> None:
        # The editor enables bracketed paste whenever it begins to read.
        self.prompts += BRACKETED_PASTE in modes
        super().set_mode(*modes, **options)

    def write_process_input(self, data: str) -> None:
        self.answer(data)


class Terminal:
    """``hdtool`` command with a keyboard and a screen."""

    def __init__(self, arguments: Sequence[str], *, columns: int = 80, rows: int = 24, **environment: str) -> None:
        self.screen = _Screen(columns, rows)
        self.screen.answer = self.send
        self._stream = pyte.Stream(self.screen)
        self.process = pexpect.spawn(
            sys.executable,
            ["-m", "hdtool.cli", *arguments],
            dimensions=(rows, columns),
            env={**os.environ, "TERM": "xterm-256color", **environment},
            encoding="utf-8",
            timeout=TIMEOUT_SECONDS,
            preexec_fn=accept_ctrl_c,
        )
        self.process.delaybeforesend = None

    def send(self, keys: str) -> None:
        self.process.send(keys)

    def paste(self, text: str) -> None:
        self.send(PASTE.format(text))

    def resize(self, columns: int, rows: int) -> None:
        self.screen.resize(rows, columns)
        self.process.setwinsize(rows, columns)

    @property
    def lines(self) -> list[str]:
        """Lines on the screen, without trailing spaces."""
        return [line.rstrip() for line in self.screen.display]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait(self, holds: Callable[[], object], seconds: float = TIMEOUT_SECONDS) -> None:
        """Update the screen until ``holds`` returns True. Fails after the timeout."""
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, f"never seen; the screen:\n{self.text}"
            self.update(0.05)

    def update(self, seconds: float) -> None:
        """Show what the command prints within this time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                printed = self.process.read_nonblocking(1 << 16, 0.05)
            except pexpect.TIMEOUT:
                continue
            except pexpect.EOF:
                return
            self._stream.feed(printed)

    def wait_for(self, text: str) -> None:
        self.wait(lambda: text in self.text)

    def is_at_prompt(self) -> bool:
        """Return True if the cursor is at an empty prompt."""
        return self.lines[self.screen.cursor.y] == ">" and self.screen.cursor.x == 2

    def enter(self, keys: str = "") -> None:
        """Send a message and wait for the next prompt."""
        self.ended_by(f"{keys}\r")

    def ended_by(self, keys: str) -> None:
        """Send keys that end the prompt or an answer, and wait for the next prompt."""
        before = self.screen.prompts
        self.send(keys)
        self.wait(lambda: self.screen.prompts > before and self.is_at_prompt())

    def close(self) -> int | None:
        """Wait until the command ends, and return its exit code."""
        self.process.expect(pexpect.EOF)
        self.process.close()
        code: int | None = self.process.exitstatus
        return code
