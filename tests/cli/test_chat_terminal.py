"""``hdtool chat`` in a real pseudo-terminal: keys, pastes and sizes of the window."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.terminal import Terminal

pytestmark = [
    pytest.mark.long,  # two processes that load torch
    pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are of Unix"),
    pytest.mark.usefixtures("known_cost"),
]

# Plain decoding by one thread, so that an answer takes long enough to be interrupted.
CHAT = ["chat", "--method", "ar", "--threads", "1", "--model-db", "none", "--corpus-db", "none"]
QUESTION = "What is a list in Python?"
UNICODE = "日本語 cafe\u0301 👩‍👩‍👧 🇩🇪 naïve"


@pytest.fixture(scope="module")
def terminal() -> Iterator[Terminal]:
    """One conversation for all tests, as each process takes seconds to start; ``/clear`` separates them."""
    # Without compiled layers, an answer lasts long enough to be interrupted.
    made = Terminal([*CHAT, "--max-new-tokens", "600", "--no-fused-layers"])
    made.wait_for("Ctrl-D leaves")
    made.wait(made.is_at_prompt)
    yield made
    made.ended_by("\x03")
    made.send("\x04")
    assert made.close() == 0


@pytest.fixture(autouse=True)
def cleared(terminal: Terminal) -> None:
    terminal.resize(80, 24)
    clear(terminal)


def clear(terminal: Terminal) -> None:
    terminal.enter("/clear")
    terminal.send("\f")  # Ctrl-L clears the screen
    terminal.wait(lambda: terminal.text.strip() == ">")


def ask_at_length(terminal: Terminal) -> None:
    """Ask on an empty screen, and wait for the first words of a long answer."""
    terminal.send(f"{QUESTION}\r")
    terminal.wait(lambda: any(line and not line.startswith(">") for line in terminal.lines))


def saved(terminal: Terminal, path: Path) -> list[dict[str, str]]:
    terminal.enter(f"/save {path}")
    messages: list[dict[str, str]] = json.loads(path.read_text())["messages"]
    return messages


def test_ctrl_c_ends_an_answer_and_keeps_the_conversation(terminal: Terminal, tmp_path: Path) -> None:
    note = "note: interrupted: the answer so far is part of the conversation"
    for _ in range(10):  # on a busy machine, an answer may end before the key arrives
        clear(terminal)
        ask_at_length(terminal)
        terminal.ended_by("\x03")
        if note in terminal.text:
            break
    assert note in terminal.text
    question, answer = saved(terminal, tmp_path / "chat.jsonl")
    assert question["content"] == QUESTION
    shown = terminal.text.replace("^C", "")  # the terminal's echo of the key
    assert "".join(answer["content"].splitlines()[0].split()) in "".join(shown.split())


def test_ctrl_c_at_the_prompt_discards_the_line_alone(terminal: Terminal, tmp_path: Path) -> None:
    terminal.send("half a mess")
    terminal.wait_for("> half a mess")
    terminal.ended_by("\x03")
    terminal.enter("Name a colour.")
    assert saved(terminal, tmp_path / "chat.jsonl")[0]["content"] == "Name a colour."


def test_a_paste_of_2000_lines_is_one_message_and_the_screen_shows_its_end(terminal: Terminal) -> None:
    lines = [f"line {number} of the paste" for number in range(2000)]
    terminal.paste("\n".join(lines))
    terminal.wait_for(lines[-1])
    assert [line.strip() for line in terminal.lines] == lines[-24:]
    terminal.enter()
    shown = " ".join(terminal.text.split())
    assert "/clear begins a new conversation" in shown and shown.count("error:") == 1


def test_a_pasted_message_keeps_its_lines_and_alt_enter_adds_one(terminal: Terminal, tmp_path: Path) -> None:
    terminal.paste("def add(a, b):\n    return a + b")
    terminal.send("\x1b\rExplain it.")
    terminal.wait_for("Explain it.")
    terminal.enter()
    question = saved(terminal, tmp_path / "chat.jsonl")[0]["content"]
    assert question == "def add(a, b):\n    return a + b\nExplain it."


def test_wide_and_combining_characters_reach_the_model_unchanged(terminal: Terminal, tmp_path: Path) -> None:
    terminal.enter(UNICODE)
    assert saved(terminal, tmp_path / "chat.jsonl")[0]["content"] == UNICODE


def test_a_window_of_20_columns_wraps_a_message_and_no_letter_is_lost(terminal: Terminal) -> None:
    terminal.resize(20, 24)
    text = "one two three four five six seven eight nine ten"
    terminal.send(text)
    terminal.wait_for("ten")
    shown = "".join(line[2:].ljust(18) for line in terminal.lines if line)
    assert text.replace(" ", "") in shown.replace(" ", "")
    assert max(map(len, terminal.lines)) <= 20
    terminal.resize(60, 24)
    terminal.wait(lambda: f"> {text}" in terminal.text)
    terminal.ended_by("\x03")


def test_the_window_may_change_its_size_during_an_answer(terminal: Terminal, tmp_path: Path) -> None:
    prompts = terminal.screen.prompts
    ask_at_length(terminal)
    for columns in (20, 132, 40):
        terminal.resize(columns, 24)
        terminal.update(0.1)
    terminal.wait(lambda: terminal.screen.prompts > prompts and terminal.is_at_prompt())
    assert len(saved(terminal, tmp_path / "chat.jsonl")) == 2


def test_the_arrow_brings_back_an_earlier_message(terminal: Terminal) -> None:
    terminal.enter("/undo")
    assert "error: the conversation has no message yet" in terminal.text
    terminal.send("\x1b[A")
    terminal.wait(lambda: terminal.lines[terminal.screen.cursor.y] == "> /undo")
    terminal.ended_by("\x03")


def test_ctrl_d_leaves_with_exit_code_0_and_writes_no_history(tmp_path: Path) -> None:
    terminal = Terminal(CHAT, HOME=str(tmp_path), HDTOOL_HOME=os.environ.get("HDTOOL_HOME", str(tmp_path / "home")))
    terminal.wait_for("Ctrl-D leaves")
    terminal.wait(terminal.is_at_prompt)
    terminal.send("\x04")
    assert terminal.close() == 0
    assert not [path for path in tmp_path.iterdir() if "history" in path.name]
