"""Format the demo's shortened answers and the gain from drafting so that everything fits one screen."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import TYPE_CHECKING

from hdtool.builders.demo.comparison import Comparison, SpeedUp
from hdtool.builders.evaluation.experiment import Figures
from hdtool.cli.answer_output import colored
from hdtool.cli.terminal import wrap_text

if TYPE_CHECKING:
    from hdtool.data.prompts import Prompt
    from hdtool.runtime.generation.stop_strings import TextPiece

MAX_COLUMNS = 110
INDENT = "  "
ANSWER_LINES = 5
"""Maximum number of lines shown of an answer; the last one may say how many are left out."""
END_COLOR = "\033[0m"
HARDLY_FASTER = 1.1
"""Speed-up below which a line explains why drafting hardly paid."""
MOSTLY_NEW = 0.75
"""Share of undrafted tokens in an answer above which they are given as the reason for a small speed-up."""


def fitted(text: str) -> str:
    """Break and indent lines so that they fit the terminal, and no more than ``MAX_COLUMNS``."""
    return "\n".join(INDENT + line for line in wrap_text(text, _columns(), indent="").split("\n"))


def _columns() -> int:
    """Return the number of columns that the indent leaves for text."""
    return min(MAX_COLUMNS, shutil.get_terminal_size((MAX_COLUMNS, 0)).columns) - len(INDENT)


def title_and_questions(prompt: Prompt) -> str:
    """Return a title and a line for each question of a conversation; long questions are cut in the middle."""
    *earlier, last = [prompt.messages[-1]["content"], *prompt.later_turns]
    lines = [*(f"> {question} (answered; the KV cache is kept)" for question in earlier), f"> {last}"]
    return "\n".join([f"▌ {prompt.category}", *(INDENT + _shortened(line) for line in lines)])


def _shortened(text: str) -> str:
    line, width = " ".join(text.split()), _columns()
    if len(line) <= width:
        return line
    half = (width - len(" … ")) // 2
    begin, end = line[: half + 1].rpartition(" ")[0], line[-half - 1 :].partition(" ")[2]
    return f"{begin} … {end}"


def shortened_answer(pieces: Sequence[TextPiece], *, color: bool) -> str:
    """Return the first lines of an answer; if ``color`` is True, drafted tokens have the colors of their sources."""
    parts = (
        colored(part, source) if color and part != "\n" else part
        for text, source in pieces
        for part in re.split("(\n)", text)
    )
    lines = fitted("".join(parts).strip()).split("\n")
    if (left := len(lines) - ANSWER_LINES) > 0:
        lines[ANSWER_LINES - 1 :] = [f"{END_COLOR * color}{INDENT}… {left + 1} more lines"]
    return "\n".join(lines)


def figures(compared: Comparison) -> str:
    """Format tokens per step, the speed beside that of plain decoding, and the shares of the sources in the text."""
    drafted, stats, speed_up = compared.drafted, compared.drafted.stats, compared.speed_up
    shares = [f"{stats.accepted[one] / stats.tokens:.0%} {one}" for one in stats.sources if stats.accepted[one]]
    by_cpu = f" (in CPU time {speed_up.by_cpu:.2f})" if speed_up.is_disturbed else ""
    return fitted(
        f"{drafted.tokens} tokens, {stats.tokens_per_step:.2f} per step; {drafted.tokens_per_second:.0f} tokens/s, "
        f"{speed_up.by_clock:.2f} times plain's {compared.plain.tokens_per_second:.0f}{by_cpu}; "
        f"drafted: {', '.join(shares) or 'nothing'}"
    )


def reasons(compared: Comparison) -> list[str]:
    """Return a list with one line on why drafting hardly paid; an empty list if it paid or drafted nothing."""
    stats = compared.drafted.stats
    if compared.speed_up.best_known >= HARDLY_FASTER or not stats.drafted.any():
        return []
    new = 1 - stats.accepted.sum() / stats.tokens
    if new < MOSTLY_NEW:
        return [fitted("hardly faster: verifying all drafts took about as long as the accepted ones saved")]
    return [fitted(f"hardly faster: {new:.0%} of this text could not be drafted from the conversation or the stores")]


def total_figures(parts: Sequence[Comparison]) -> str:
    """Format the gain from drafting over all answers, with a warning if other programs disturbed the wall times."""
    total = reduce(add, parts)
    title = f"▌ in total: {total.same} of {len(parts)} answers are identical; the times include reading the prompt"
    lines = [wrap_text(title, _columns() + len(INDENT)), figures(total)]
    if any(one.speed_up.is_disturbed for one in (*parts, total)):
        lines.append(fitted("Other programs kept this one waiting: trust CPU time where the clock disagrees with it."))
    return "\n".join(lines)


def engine_figures(name: str, generate: Figures, plain: Figures) -> str:
    """Return a sentence that compares plain decoding by the engine called ``name`` with ``generate``."""
    speed_up = SpeedUp.of(plain, generate)
    return fitted(
        f"The engine without drafts, {name}, is {speed_up.best_known:.1f} times as fast as transformers' generate"
        f"{' in CPU time' if speed_up.is_disturbed else ''} ({plain.tokens_per_second:.0f} and "
        f"{generate.tokens_per_second:.0f} tokens/s on one thread)."
    )
