"""Writing a report into a folder: the page, the tables and the figures as PNG."""

from __future__ import annotations

import re
from pathlib import Path

from hdtool.data.errors import ResultError, worded
from hdtool.data.files.atomic_write import OutputFile
from hdtool.data.files.ownership import is_own_html, is_own_markdown, is_own_png
from hdtool.runtime.evaluation.report.page import Page
from hdtool.runtime.evaluation.report.theme import LIGHT, THEMES, render_png

INDEX = "index.html"
TABLES = "tables.md"
PICTURE = re.compile(
    r"(speed-up|generation-time|temperatures|repeated-4-grams|4-gram-distances|database-size"
    r"|(sources|subsets|orders|coverage)-[a-z+-]+)(\.dark)?\.png"
)
"""The names of all figures that a report may have."""


def write(folder: Path, page: Page) -> Path:
    """Write a report and return the path of its page."""
    prepare(folder)
    contents: dict[str, bytes | str] = {}
    pictures = {
        one.name: {theme.name: render_png(one.draw, theme, one.height) for theme in THEMES} for one in page.figures
    }
    for name, themes in pictures.items():
        for theme, data in themes.items():
            contents[f"{name}{'' if theme == LIGHT.name else f'.{theme}'}.png"] = data
    contents |= {TABLES: page.markdown(), INDEX: page.html(pictures)}
    for name in contents:  # check all files before replacing the first
        _file(folder, name).check()
    for name, content in contents.items():
        _file(folder, name).write(content)
    return folder / INDEX


def prepare(folder: Path) -> None:
    """Refuse a folder that cannot take the report, before anything is measured for it."""
    with worded(ResultError, f"{folder} cannot be written", "choose another --report"):
        folder.mkdir(parents=True, exist_ok=True)
        names = [path.name for path in folder.iterdir() if PICTURE.fullmatch(path.name)]
    for name in (INDEX, TABLES, *names):
        _file(folder, name).check()


def _file(folder: Path, name: str) -> OutputFile:
    """A file of the report, replaced only if an earlier report wrote it."""
    is_ours = {INDEX: is_own_html, TABLES: is_own_markdown}.get(name, is_own_png)
    advice = "choose another --report, or move it away"
    return OutputFile(folder / name, "a file of an hdtool report", is_ours, ResultError, advice)
