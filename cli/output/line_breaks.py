"""Lines that a terminal would break at its edge, in mid-word, are broken between words."""

from __future__ import annotations

import os
import re
import sys
from typing import Any, TextIO, cast

COLOR = re.compile("\033\\[[0-9;]*m")
CONTROLS = re.compile("[\\x00-\\x08\\x0b-\\x1f]")
"""Other than line breaks, tabs and colours: text that holds one moves the cursor itself, as progress bars do."""
ERASED = "\r\033[K"
"""Erases the line of the cursor: a message replaces a bar, which is drawn again below it."""
INDENT = "  "
"""Indent of a continued line beyond that of its first line."""


def broken(text: str, width: int, indent: str = INDENT) -> str:
    """The text with its long lines broken between words; a longer word, such as a path, stays whole."""
    if len(text) <= width or CONTROLS.search(COLOR.sub("", text)):
        return text
    return "\n".join(_broken_line(line, width, indent) for line in text.split("\n"))


def printable(text: str, indent: str = INDENT) -> str:
    """A text as standard output takes it: lines are broken where it is a terminal."""
    return broken(text, width, indent) if (width := _width(sys.stdout)) else text


def break_messages_between_words() -> None:
    """Break long lines of everything that this process prints on standard error, if that is a terminal."""
    if _width(sys.stderr) and not isinstance(cast(Any, sys.stderr), _Messages):
        sys.stderr = cast(TextIO, _Messages(sys.stderr))


class _Messages:
    """A stream for messages to people."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_on_bar = False
        """Whether the line of the cursor holds a progress bar."""

    def write(self, text: str) -> int:
        erased = ERASED if self._is_on_bar and not text.startswith(("\r", "\n")) else ""
        if text:
            self._is_on_bar = text.startswith("\r") and not text.endswith("\n")
        return self._stream.write(erased + (broken(text, width) if (width := _width(self._stream)) else text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _broken_line(line: str, width: int, indent: str) -> str:
    if _length(line) <= width:
        return line
    words = re.findall("[ \t]*[^ \t]+", line)
    margin = indent + line[: len(line) - len(line.lstrip())]
    lines = words[:1]
    for word in words[1:]:
        if _length(lines[-1] + word) <= width:
            lines[-1] += word
        else:
            lines.append(margin + word.lstrip())
    return "\n".join(lines)


def _length(text: str) -> int:
    """Columns of a text, without its colours."""
    return len(COLOR.sub("", text))


def _width(stream: TextIO) -> int:
    """Columns of a terminal, 0 for anything else."""
    try:
        return os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except (OSError, ValueError):
        return 0
