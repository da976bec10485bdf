"""Tables of text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from textwrap import fill

WIDTH = 80


def rounded(source: object, **digits: int) -> dict[str, float]:
    """Attributes of an object, as JSON shows them."""
    return {name: round(getattr(source, name), places) for name, places in digits.items()}


def filled(text: str) -> str:
    """A text broken between words, so that paths and commands stay whole."""
    return fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def table(rows: Sequence[Sequence[str]], *, left: int = 1, widths: Sequence[int] = (), gap: int = 2) -> str:
    """Rows in columns, the first ``left`` of them aligned to the left; ``widths`` are the least ones,
    ``gap`` is the space between columns."""
    columns = zip_longest(*rows, fillvalue="")
    least = [*widths, *[0] * max(map(len, rows))]
    fitted = [max(size, *map(len, column)) for size, column in zip(least, columns, strict=False)]
    return "\n".join(
        (" " * gap)
        .join(
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, fitted, strict=False))
        )
        .rstrip()
        for row in rows
    )
