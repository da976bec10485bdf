"""What the figures of a report show, as plain numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np


@dataclass(frozen=True)
class Speedups:
    """How many times as fast as a baseline each method answered the questions of each task."""

    baseline: str
    tasks: tuple[str, ...]
    methods: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class Durations:
    """Tokens and seconds of every answer, by method."""

    answers: Mapping[str, tuple[tuple[int, float], ...]]

    def line(self, method: str) -> tuple[float, float]:
        """Seconds a token and seconds before the first one: the line nearest to all answers of a method."""
        tokens, seconds = np.array(self.answers[method], np.float64).T
        if len(set(tokens.tolist())) < 2:
            return float(seconds.sum() / tokens.sum()), 0.0
        slope, start = np.polyfit(tokens, seconds, 1)
        return float(slope), float(start)


@dataclass(frozen=True)
class Warmth:
    """Tokens per second of each method at each temperature."""

    temperatures: tuple[float, ...]
    methods: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class Share:
    """What one source brought."""

    drafted: int
    accepted: int
    hits: int
    """Steps for which it had something to draft."""
    wins: int
    """Those of them in which something of it was accepted."""

    @property
    def verified(self) -> float:
        """Of the tokens that it drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def won(self) -> float:
        """Of the steps that it drafted in."""
        return self.wins / self.hits if self.hits else 0.0


@dataclass(frozen=True)
class Shares:
    """What each source brought to one method, over so many steps that could be drafted for."""

    method: str
    steps: int
    sources: Mapping[str, Share]


@dataclass(frozen=True)
class Trial:
    """A replay of one choice of databases."""

    databases: str
    """Their letters, in the order in which they are asked."""
    tokens_per_step: float
    nodes_per_step: float
    draft_us: float
    """Of a step, the median."""


@dataclass(frozen=True)
class Trials:
    """Replays of one method that differ in their databases alone."""

    method: str
    rows: tuple[Trial, ...]

    def __getitem__(self, databases: str) -> Trial:
        return next(row for row in self.rows if row.databases == databases)

    @property
    def best(self) -> Trial:
        return max(self.rows, key=lambda row: row.tokens_per_step)


@dataclass(frozen=True)
class Covered:
    """What was accepted from one database when it was the only one."""

    positions: int
    """Tokens of the answers."""
    alone: int
    """Those of them that neither of the other databases, alone, had accepted."""
    words: int
    """Different tokens of the vocabulary."""
    words_alone: int


@dataclass(frozen=True)
class Coverage:
    """Which part of the answers each database had accepted."""

    method: str
    positions: int
    """Tokens of all answers."""
    databases: Mapping[str, Covered]
    nobody: int
    """Tokens that were accepted from none."""


@dataclass(frozen=True)
class Repeats:
    """Where the 4-grams of generations stood before."""

    generations: tuple[int, ...]
    """The last generation of each group."""
    places: Mapping[str, tuple[float, ...]]
    """For each place, the share of a group's 4-grams that stand there."""
    distances: tuple[int, ...]
    within: tuple[float, ...]
    """The share of all 4-grams that stood at most so many tokens before."""


@dataclass(frozen=True)
class Size:
    """A replay with a corpus index of some size."""

    tokens: int
    tokens_per_step: float
    draft_us: float
    """Of a step, the median."""
    draft_us_p90: float
    corpus_us: float
    """Of a step, the mean: the share of the corpus index."""


@dataclass(frozen=True)
class Sizes:
    method: str
    rows: tuple[Size, ...]


@dataclass(frozen=True)
class Case:
    """One answer, each piece of it with the source that it was accepted from."""

    method: str
    question: str
    pieces: tuple[tuple[str, str], ...]
    """Text and the name of its source, ``none`` for the model itself."""
    tokens: int
    steps: int


@dataclass(frozen=True)
class Table:
    """Figures in rows and columns; the first column names the row."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def markdown(self) -> str:
        lines = (f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |" for row in (self.columns, *self.rows))
        head, *body = lines
        return "\n".join([head, "|---" * len(self.columns) + "|", *body])


def wins_of(sources: Iterable[int], step_tokens: Iterable[int]) -> Counter[int]:
    """In how many steps each source had something accepted; there is a source for each token of the steps."""
    rest = iter(sources)
    return Counter(chain.from_iterable(set(islice(rest, tokens)) for tokens in step_tokens))
