"""A terminal obeys no escape sequence of an answer, a log or a store."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any, cast

import pytest

from hdtool.cli.answer_output import colored, stream_answer
from hdtool.cli.terminal import ERASE_LINE, guard_terminal
from hdtool.runtime.settings.draft_sources import SourceId
from tests.support.terminal import Terminal

RETITLING = "\033]0;title\007"
FOREIGN = [
    RETITLING,
    "\033]52;c;Y29weQ==\033\\",
    "\033[6n",
    "\033[2J",
    "\033P+q544e\033\\",
    "\x9b6n",
    "\x9d0;title\x9c",
    "\b\b\b",
    "\0\x7f",
]
OWN = ["plain\ttext\r\n", "é 你好 \N{NO-BREAK SPACE}", "\r 50%|█  | 1/2", ERASE_LINE, "\033[A"]


class FakeTerminal(StringIO):
    def isatty(self) -> bool:
        return True


class FakeAnswer:
    def __init__(self, *pieces: str) -> None:
        self._pieces = pieces

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def by_source(self) -> Iterator[tuple[str, SourceId]]:
        return ((piece, SourceId.CONTEXT) for piece in self._pieces)


@pytest.mark.parametrize("name", ["stdout", "stderr"])
@pytest.mark.parametrize("text", [*FOREIGN, *OWN, colored("text", SourceId.CONTEXT)], ids=repr)
def test_only_sequences_of_our_own_reach_a_terminal(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", FakeTerminal())
    monkeypatch.setattr(sys, "stderr", FakeTerminal())
    stream = getattr(sys, name)
    guard_terminal()
    guard_terminal()
    getattr(sys, name).write(text)
    assert (stream.getvalue() == text) is (text not in FOREIGN)
    assert text not in FOREIGN or not any(ord(sign) < 32 or 127 <= ord(sign) < 160 for sign in stream.getvalue())


@pytest.mark.parametrize("color", [False, True])
def test_an_answer_has_not_even_colours_of_its_own(color: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", terminal := FakeTerminal())
    stream_answer(cast(Any, FakeAnswer("a\n", "\033", "[8m", "\033[8mb")), color=color)
    shown = terminal.getvalue()
    assert "␛[8mb" in shown and "\033[8m" not in shown
    assert ("\033" in shown) is color


def test_what_is_piped_on_stays_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    guard_terminal()
    stream_answer(cast(Any, FakeAnswer(*FOREIGN)))
    assert capsys.readouterr().out == "".join(FOREIGN) + "\n"


def test_a_file_name_in_an_error_retitles_no_window(tmp_path: Path) -> None:
    terminal = Terminal(["inspect", str(tmp_path / RETITLING)])
    terminal.wait_for("error: ")
    assert terminal.close() == 1
    assert not terminal.screen.title
