"""Draw the terminal session of the README: ``python -m tests.picture`` runs the command and writes the SVG.

It drafts from the stores in hdtool's home, made as the README says; each token has the colour of its source. Of the
figures of ``--stats``, the picture leaves out the times, which are those of one machine.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path

from hdtool.runtime.settings.draft_sources import registered

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "assets" / "terminal.svg"
QUESTION = (
    "Rewrite in the past tense: I walk to the store, I buy two apples, and I give one of them to my sister. "
    "She thanks me, and we walk home together."
)
SHOWN = ["hdtool", "generate", "smollm2", "--activations", "int8", "--draft-tokens", "16", "--show-drafts", "--stats"]
COLUMNS, CELL, LINE, MARGIN = 96, 8.4, 20, 18
BACKGROUND, PLAIN, FAINT = "#0d1117", "#e6edf3", "#8b949e"
COLOR = re.compile(r"\033\[([\d;]+)m")
OF_SOURCE = {str(source.terminal): source.dark for source in registered().values()}
"""What a page shows in the place of a terminal's colours."""
Run = tuple[str, str]
"""Text and its colour."""


def session() -> list[list[Run]]:
    """The command and its output, in lines that fit the terminal."""
    printed = subprocess.run(
        [sys.executable, "-m", "hdtool.cli", *SHOWN[1:], QUESTION],
        env=os.environ | {"FORCE_COLOR": "1"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    typed: list[Run] = [("$ ", FAINT), (" ".join(SHOWN) + " \\\n    " + f'"{QUESTION}"\n', PLAIN)]
    figures = re.findall(r"^(\d+ tokens) in .*?, (\d+ steps \(.*? per step\))", printed.stderr, re.MULTILINE)
    legend = [line for line in printed.stderr.splitlines() if line.startswith("drafted by")]
    below = "\n" + "\n".join([*legend, *(" in ".join(parts) for parts in figures)])
    return wrapped([*typed, *runs(printed.stdout, PLAIN), *runs(below, FAINT)])


def runs(text: str, usual: str) -> Iterator[Run]:
    """Parts of a text with terminal colours."""
    color = usual
    for number, part in enumerate(COLOR.split(text)):
        if number % 2:
            color = OF_SOURCE.get(part, usual)
        elif part:
            yield part, color


def wrapped(parts: list[Run]) -> list[list[Run]]:
    lines: list[list[Run]] = [[]]
    used = 0
    for text, color in parts:
        for piece in re.findall(r"\n|[^\S\n]*[^\s]+|[^\S\n]+", text):
            if piece == "\n" or used + len(piece) > COLUMNS:
                lines.append([])
                used = 0
                piece = piece if piece == "\n" else piece.lstrip()
            if piece != "\n":
                lines[-1].append((piece, color))
                used += len(piece)
    return lines


def svg(lines: list[list[Run]]) -> str:
    width, height = round(2 * MARGIN + COLUMNS * CELL), 2 * MARGIN + len(lines) * LINE
    parts = []
    for row, line in enumerate(lines):
        column = 0
        for text, color in line:
            x, y, length = MARGIN + column * CELL, MARGIN + row * LINE + 14, len(text) * CELL
            column += len(text)
            parts.append(
                f'<text x="{x:.1f}" y="{y}" fill="{color}" textLength="{length:.1f}" '
                f'xml:space="preserve">{escape(text)}</text>'
            )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, monospace" font-size="14">\n'
        f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def main() -> None:
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(svg(session()), encoding="utf-8")


if __name__ == "__main__":
    main()
