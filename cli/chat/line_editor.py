"""Reads the messages of a conversation: with a line editor in a terminal, line by line from a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress

from hdtool.data.errors import PromptError

ReadMessage = Callable[[], str]
"""Returns the next message; raises EOFError at the end of the input."""
PROMPT = "> "


def is_interactive() -> bool:
    """Whether both ends are a terminal."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


def message_reader() -> ReadMessage:
    """The line editor in a terminal, else lines of standard input."""
    return _line_editor() if is_interactive() else _next_line


def _line_editor() -> ReadMessage:
    """An editor in which Enter sends, Alt-Enter begins a line, and a paste may have many lines.

    Messages are remembered until the program ends, and not written to the disk.
    """
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(PROMPT, multiline=True, key_bindings=keys)

    def read() -> str:
        while True:
            with suppress(KeyboardInterrupt):  # Ctrl-C discards the line
                return session.prompt()

    return read


def _next_line() -> str:
    line = sys.stdin.buffer.readline() if sys.stdin is not None else b""
    if not line:
        raise EOFError
    try:
        return line.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError:
        raise PromptError("standard input is not UTF-8 text: pipe messages in as text, one per line") from None
