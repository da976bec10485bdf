"""Writing a report: its pictures, its page and its tables into one folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hdtool.builders.report.ink import LIGHT, THEMES, picture
from hdtool.builders.report.page import Page
from hdtool.data.errors import ResultError

INDEX = "index.html"
TABLES = "tables.md"


def write(folder: Path, page: Page) -> Path:
    """The place of the page."""
    pictures = {
        one.name: {theme.name: picture(one.draw, theme, one.height) for theme in THEMES} for one in page.exhibits
    }
    with _told(folder):
        prepare(folder)
        for name, shown in pictures.items():
            for theme, data in shown.items():
                (folder / f"{name}{'' if theme == LIGHT.name else f'.{theme}'}.png").write_bytes(data)
        (folder / TABLES).write_text(page.markdown(), encoding="utf-8")
        (folder / INDEX).write_text(page.html(pictures), encoding="utf-8")
    return folder / INDEX


def prepare(folder: Path) -> None:
    """Have the folder, before anybody waits for what will be written into it."""
    with _told(folder):
        folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ResultError(f"{folder} cannot be written ({error.strerror or error}): choose another --report") from None
