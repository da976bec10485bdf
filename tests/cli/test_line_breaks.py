"""Messages are broken between words at the edge of a terminal."""

from __future__ import annotations

import re
from io import StringIO

import pyte
import pytest
from hypothesis import given, strategies as st

from hdtool.cli.terminal import COLOR_CODE, _WrappedStream, wrap_text
from tests.support.terminal import Terminal


@given(st.lists(st.text("ab-/", min_size=1, max_size=30), min_size=1), st.integers(31, 60), st.integers(0, 3))
def test_lines_fit_and_keep_their_words(words: list[str], width: int, margin: int) -> None:
    text = " " * margin + " ".join(words)
    lines = wrap_text(text, width).split("\n")
    assert [word for line in lines for word in line.split()] == words
    assert all(len(line) <= width or len(line.split()) == 1 for line in lines)


@pytest.mark.parametrize("text", ["\r 40%|████      | 2/5 answers", "\033[2K a line that is erased", "short\n" * 9])
def test_what_moves_the_cursor_or_fits_is_left_alone(text: str) -> None:
    assert wrap_text(text, 10) == text


def test_colours_take_no_columns() -> None:
    text = " ".join(f"\033[38;5;28m{word}\033[0m" for word in ("context", "model", "corpus"))
    assert wrap_text(text, 20) == text
    assert [len(re.sub(COLOR_CODE, "", line)) for line in wrap_text(text, 14).split("\n")] == [13, 8]


def test_an_error_is_broken_between_words_in_a_terminal() -> None:
    terminal = Terminal(["generate", "--max-new-tokens", "many"], columns=40)
    terminal.wait_for("--help")
    shown = [line.strip() for line in terminal.lines if line]
    assert terminal.close() == 2
    said = "error: Invalid value for '-n' / '--max-new-tokens': Input should be a valid integer, unable to parse string"
    assert len(shown) > 2 and " ".join(shown).startswith(said)


def test_a_message_replaces_a_progress_bar() -> None:
    stream = StringIO()
    messages = _WrappedStream(stream)
    for text in ("\r 50%|█  | 1/2", "note: busy", "\n", "\r100%|██| 2/2", "\n", "done", "\n"):
        messages.write(text)
    screen = pyte.Screen(40, 5)
    pyte.Stream(screen).feed(stream.getvalue().replace("\n", "\r\n"))
    assert [line.strip() for line in screen.display][:3] == ["note: busy", "100%|██| 2/2", "done"]
