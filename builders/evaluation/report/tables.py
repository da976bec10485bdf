"""Data classes of a report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any


@dataclass(frozen=True)
class Speeds:
    """Speed of each method, either per task as a ratio to a baseline, or per temperature in tokens per second."""

    labels: tuple[Any, ...]
    """Tasks or temperatures."""
    methods: Mapping[str, tuple[float, ...]]
    baseline: str = ""


@dataclass(frozen=True)
class Durations:
    """Length and duration of every answer, by method."""

    answers: Mapping[str, tuple[tuple[int, float, float | None], ...]]
    """By method, for each answer: number of tokens, duration in seconds, and seconds to the first token, if known."""

    def rates(self, method: str) -> tuple[float | None, float | None]:
        """Return the means ``(seconds to the first token, seconds per token after it)``, each None if unknown."""
        known = [(tokens, seconds, first) for tokens, seconds, first in self.answers[method] if first is not None]
        later = sum(tokens - 1 for tokens, _, _ in known)
        return (
            fmean(first for _, _, first in known) if known else None,
            sum(seconds - first for _, seconds, first in known) / later if later else None,
        )


@dataclass(frozen=True)
class Table:
    """Text cells in rows and columns; the first column names the row."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    @classmethod
    def of(cls, title: str, columns: Mapping[str, str], rows: Iterable[Sequence[Any]], note: str = "") -> Table:
        """Create a table of values; ``columns`` maps column names to format specs, and None is shown as ``-``."""

        def cells(row: Sequence[Any]) -> tuple[str, ...]:
            forms = columns.values()
            return tuple("-" if cell is None else format(cell, form) for cell, form in zip(row, forms, strict=True))

        return cls(title, tuple(columns), tuple(map(cells, rows)), note)

    @property
    def lines(self) -> tuple[tuple[str, ...], ...]:
        """Column names, followed by the rows."""
        return (self.columns, *self.rows)

    def markdown(self) -> str:
        lines = (f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |" for row in self.lines)
        head, *body = lines
        return "\n".join([head, "|---" * len(self.columns) + "|", *body])
