"""The data of a report's figures and tables, as plain numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Speeds:
    """The speed of each method on each task, over that of a baseline, or at each temperature, in tokens per second."""

    places: tuple[Any, ...]
    """Tasks or temperatures."""
    methods: Mapping[str, tuple[float, ...]]
    baseline: str = ""


@dataclass(frozen=True)
class Durations:
    """Tokens and seconds of every answer per method."""

    answers: Mapping[str, tuple[tuple[int, float], ...]]

    def line(self, method: str) -> tuple[float, float]:
        """Seconds per token and seconds before the first token: a least-squares line through a method's answers."""
        tokens, seconds = np.array(self.answers[method], np.float64).T
        if len(set(tokens.tolist())) < 2:
            return float(seconds.sum() / tokens.sum()), 0.0
        slope, start = np.polyfit(tokens, seconds, 1)
        return float(slope), float(start)


@dataclass(frozen=True)
class Share:
    """Counts of one source."""

    drafted: int
    accepted: int
    hits: int
    """Steps in which it drafted anything."""
    wins: int
    """Steps in which at least one of its tokens was accepted."""

    @property
    def verified(self) -> float:
        """Accepted tokens over drafted tokens."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def won(self) -> float:
        """Steps with an accepted token over steps with a draft."""
        return self.wins / self.hits if self.hits else 0.0


@dataclass(frozen=True)
class Shares:
    """The counts of each source in one method; ``steps`` leaves out the passes over prompts."""

    method: str
    steps: int
    sources: Mapping[str, Share]


@dataclass(frozen=True)
class Trial:
    """A replay of one choice of sources."""

    sources: str
    """Their letters, in the order of look-up."""
    tokens_per_step: float
    nodes_per_step: float
    draft_us: float
    """The median over steps."""


@dataclass(frozen=True)
class Trials:
    """Replays of one method that differ only in their sources."""

    method: str
    rows: tuple[Trial, ...]

    @property
    def best(self) -> Trial:
        return max(self.rows, key=lambda row: row.tokens_per_step)


@dataclass(frozen=True)
class Covered:
    """The tokens accepted from one source when it is the only one."""

    positions: int
    """Accepted tokens."""
    alone: int
    """Accepted tokens that no other source, as the only one, had accepted."""
    words: int
    """Distinct accepted tokens."""
    words_alone: int


@dataclass(frozen=True)
class Coverage:
    """The part of the answers accepted from each source."""

    method: str
    positions: int
    """Tokens of all answers."""
    sources: Mapping[str, Covered]
    nobody: int
    """Tokens that were accepted from no source."""


@dataclass(frozen=True)
class Repeats:
    """Earlier occurrences of the 4-grams of answers."""

    generations: tuple[int, ...]
    """The number of the last answer in each group."""
    places: Mapping[str, tuple[float, ...]]
    """For each place, the share of a group's 4-grams that occur there."""
    distances: tuple[int, ...]
    within: tuple[float, ...]
    """The share of all 4-grams whose last occurrence is at most this far back."""


@dataclass(frozen=True)
class Size:
    """A replay with a corpus index of some size."""

    tokens: int
    tokens_per_step: float
    draft_us: float
    """The median over steps."""
    draft_us_p90: float
    corpus_us: float
    """The time in the corpus index, the mean over steps."""


@dataclass(frozen=True)
class Sizes:
    method: str
    rows: tuple[Size, ...]


@dataclass(frozen=True)
class Case:
    """One answer in pieces, each with the source that it was accepted from."""

    method: str
    question: str
    pieces: tuple[tuple[str, str], ...]
    """Text and the name of its source, ``none`` for bonus tokens."""
    tokens: int
    steps: int

    @property
    def sources(self) -> set[str]:
        return {source for _, source in self.pieces}


@dataclass(frozen=True)
class Table:
    """Text cells in rows and columns; the first column names the row."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    @classmethod
    def of(cls, title: str, columns: Mapping[str, str], rows: Iterable[Sequence[Any]], note: str = "") -> Table:
        """A table of values; ``columns`` holds the format of each, and ``-`` stands for None."""

        def cells(row: Sequence[Any]) -> tuple[str, ...]:
            forms = columns.values()
            return tuple("-" if cell is None else format(cell, form) for cell, form in zip(row, forms, strict=True))

        return cls(title, tuple(columns), tuple(map(cells, rows)), note)

    @property
    def lines(self) -> tuple[tuple[str, ...], ...]:
        """The names of the columns, and the rows."""
        return (self.columns, *self.rows)

    def markdown(self) -> str:
        lines = (f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |" for row in self.lines)
        head, *body = lines
        return "\n".join([head, "|---" * len(self.columns) + "|", *body])


def wins_of(sources: Iterable[int], step_tokens: Iterable[int]) -> Counter[int]:
    """The number of steps in which each source had a token accepted; ``sources`` has one entry per token."""
    rest = iter(sources)
    return Counter(chain.from_iterable(set(islice(rest, tokens)) for tokens in step_tokens))
