"""The demo's screen: answers shortened to a few lines, figures in a line, and honest words on what hardly pays."""

from __future__ import annotations

import re

import pytest

from hdtool.builders.demo.comparison import Comparison
from hdtool.builders.evaluation.experiment import Figures
from hdtool.cli.demo_output import figures, reasons, shortened_answer, title_and_questions, total_figures
from hdtool.cli.terminal import COLOR_CODE
from hdtool.data import demo
from hdtool.data.prompts import read_prompts
from hdtool.runtime.core.step import Stats, Step
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.generation.stop_strings import TextPiece
from hdtool.runtime.settings.draft_sources import SourceId

PIECES: list[TextPiece] = [
    (text, SourceId.CONTEXT if number % 3 else SourceId.NONE)
    for number, text in enumerate(re.findall(r"\s*\S+", "def one(two):\n\n    return " + "two plus one " * 60))
]


def compared(tokens_drafted: int, seconds: float = 1.0, cpu_seconds: float = 1.0) -> Comparison:
    """Plain decoding took one second for 20 tokens; with drafts, so many of them came from the context."""
    made = Stats()
    for number in range(20 - tokens_drafted):
        drafted = number < tokens_drafted
        tree = DraftTree.of(1, [2], [-1], SourceId.CONTEXT) if number < 9 else DraftTree.bare(1)
        made.add(Step([2, 3][: 1 + drafted], tree, [0] * drafted, 0.0, 0.1, 0.1))
    return Comparison(Figures(20, 1.0, 1.0), Figures(20, seconds, cpu_seconds, stats=made), 1, tuple(PIECES))


@pytest.mark.parametrize("width", [40, 80, 200])
def test_every_line_fits_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    plain, colorful = (shortened_answer(PIECES, color=color) for color in (False, True))
    assert COLOR_CODE.sub("", colorful) == plain
    assert len(plain.splitlines()) == 5 and re.fullmatch(r"  … \d+ more lines", plain.splitlines()[-1])
    questions = [title_and_questions(task) for task in read_prompts(demo.TASKS)]
    disturbed = compared(2, seconds=1.2)
    for text in (plain, figures(disturbed), total_figures([disturbed]), *reasons(disturbed), *questions):
        assert all(len(line) <= min(width, 110) for line in text.splitlines()), text


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.usefixtures("wide")
def test_the_figures_take_one_line_and_name_the_sources() -> None:
    assert (
        figures(compared(8, 0.8, 0.8))
        == "  20 tokens, 1.67 per step; 25 tokens/s, 1.25 times plain's 20; drafted: 40% context"
    )
    assert figures(compared(0, 0.8, 1.0)).endswith(
        "25 tokens/s, 1.25 times plain's 20 (in CPU time 1.00); drafted: nothing"
    )


@pytest.mark.usefixtures("wide")
def test_a_reason_is_given_only_where_drafting_hardly_pays() -> None:
    assert reasons(compared(8, 0.8, 0.8)) == reasons(compared(8, 1.2, 0.8)) == [], "CPU time counts on a busy machine"
    assert reasons(compared(2)) == [
        "  hardly faster: 90% of this text could not be drafted from the conversation or the stores"
    ]
    assert reasons(compared(8)) == [
        "  hardly faster: verifying all drafts took about as long as the accepted ones saved"
    ]


def test_the_total_says_when_other_programs_disturbed_the_clock() -> None:
    quiet, busy = total_figures([compared(8)] * 2), total_figures([compared(8), compared(8, seconds=1.2)])
    assert "▌ in total: 2 of 2 answers are identical" in quiet and "  40 tokens, 1.67 per step" in quiet
    assert "trust CPU time" in busy and "trust CPU time" not in quiet


def test_an_earlier_question_stands_above_the_last_one() -> None:
    (task,) = (task for task in read_prompts(demo.TASKS) if task.later_turns)
    title, first, second = title_and_questions(task).splitlines()
    assert title == "▌ the second question of a conversation"
    assert first.startswith("  > Write an SQL table") and first.endswith("(answered; the KV cache is kept)")
    assert second == f"  > {task.later_turns[0]}"
