"""Fit what hdtool prints to a terminal: break long lines, and make control characters visible and harmless.

Answers, logs and names in stores are foreign text. A terminal would obey its escape sequences, which can retitle the
window, write to the clipboard or type a reply.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any, TextIO, cast

COLOR_CODE = re.compile("\033\\[[0-9;]*m")
CONTROL_CHARACTERS = re.compile("[\\x00-\\x08\\x0b-\\x1f]")
"""Matches C0 control characters except tabs and newlines. Progress bars move the cursor with such characters."""
ERASE_LINE = "\r\033[K"
"""Sequence that clears the current line, so that a message replaces a progress bar, which is drawn again below."""
CONTINUATION_INDENT = "  "
"""Additional indent of the lines into which a long line is broken."""
PICTURES = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n\r"},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}
"""Visible character for each control character except tabs and line breaks, for ``str.translate``."""
USED_SEQUENCE = re.compile("(\033\\[(?:[0-9;]*m|[AK]))|[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
"""Matches a control character or, as group 1, a sequence that sets colors, erases a line's rest or moves up a line."""


def wrap_text(text: str, width: int, indent: str = CONTINUATION_INDENT) -> str:
    """Break lines longer than ``width`` between words; a word longer than ``width``, such as a path, stays whole.

    Text with control characters is returned unchanged.
    """
    if len(text) <= width or CONTROL_CHARACTERS.search(COLOR_CODE.sub("", text)):
        return text
    return "\n".join(_wrap_line(line, width, indent) for line in text.split("\n"))


def wrap_for_terminal(text: str) -> str:
    """Break long lines if standard output is a terminal, else return the text unchanged."""
    return wrap_text(text, width) if (width := _terminal_width(sys.stdout)) else text


def guard_terminal() -> None:
    """Show control characters on terminals, and wrap long lines of standard error, by replacing the two streams."""
    if sys.stdout and sys.stdout.isatty() and not isinstance(cast(Any, sys.stdout), _TerminalStream):
        sys.stdout = cast(TextIO, _TerminalStream(sys.stdout))
    if sys.stderr and sys.stderr.isatty() and not isinstance(cast(Any, sys.stderr), _TerminalStream):
        sys.stderr = cast(TextIO, _WrappedStream(sys.stderr))


def without_control_characters(text: str) -> str:
    """Replace the control characters of a foreign text, except tabs and line breaks, by visible characters."""
    return text.translate(PICTURES)


class _TerminalStream:
    """Stream that makes control characters visible, except those that hdtool and its progress bars use."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(USED_SEQUENCE.sub(lambda found: found[1] or found[0].translate(PICTURES), text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _WrappedStream(_TerminalStream):
    """Stream that also breaks long lines and erases a progress bar before it prints a message."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._is_on_bar = False
        """True if the current line holds a progress bar."""

    def write(self, text: str) -> int:
        erased = ERASE_LINE if self._is_on_bar and not text.startswith(("\r", "\n")) else ""
        if text:
            self._is_on_bar = text.startswith("\r") and not text.endswith("\n")
        return super().write(erased + (wrap_text(text, width) if (width := _terminal_width(self._stream)) else text))


def _wrap_line(line: str, width: int, indent: str) -> str:
    if _visible_length(line) <= width:
        return line
    words, shown = re.findall("[ \t]*[^ \t]+", line), COLOR_CODE.sub("", line)
    margin = indent + shown[: len(shown) - len(shown.lstrip())]
    lines = words[:1]
    for word in words[1:]:
        if _visible_length(lines[-1] + word) <= width:
            lines[-1] += word
        else:
            lines.append(margin + word.lstrip())
    return "\n".join(lines)


def _visible_length(text: str) -> int:
    """Return the number of columns that a text takes up, ignoring color codes."""
    return len(COLOR_CODE.sub("", text))


def _terminal_width(stream: TextIO) -> int:
    """Return the terminal's width in columns if ``stream`` is a terminal, else 0."""
    try:
        return os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except (OSError, ValueError):
        return 0
