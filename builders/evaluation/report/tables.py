"""Data classes of a report, and the claims of the Hierarchy Drafting paper checked against them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any


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
        import numpy as np

        tokens, seconds = np.array(self.answers[method], np.float64).T
        if len(set(tokens.tolist())) < 2:
            return float(seconds.sum() / tokens.sum()), 0.0
        slope, start = np.polyfit(tokens, seconds, 1)
        return float(slope), float(start)


@dataclass(frozen=True)
class SourceCounts:
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
class SourceShares:
    """The counts of each source in one method; ``steps`` leaves out the passes over prompts."""

    method: str
    steps: int
    sources: Mapping[str, SourceCounts]


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
class SourceCoverage:
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
    sources: Mapping[str, SourceCoverage]
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
class IndexSize:
    """A replay with a corpus index of some size."""

    tokens: int
    tokens_per_step: float
    draft_us: float
    """The median over steps."""
    draft_us_p90: float
    corpus_us: float
    """The time in the corpus index, the mean over steps."""


@dataclass(frozen=True)
class IndexSizes:
    method: str
    rows: tuple[IndexSize, ...]


@dataclass(frozen=True)
class TypicalCase:
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


def source_wins(sources: Iterable[int], step_tokens: Iterable[int]) -> Counter[int]:
    """The number of steps in which each source had a token accepted; ``sources`` has one entry per token."""
    rest = iter(sources)
    return Counter(chain.from_iterable(set(islice(rest, tokens)) for tokens in step_tokens))


PAPER_SOURCES = ("context", "model", "corpus")
PAPER_METHOD = "hd-paper"
"""The method that decides the verdict; the evidence of other methods is listed too."""


@dataclass(frozen=True)
class ClaimFinding:
    """A claim of the paper, and the evidence of this data."""

    claim: str
    holds: bool | None
    """None if this data does not decide it."""
    evidence: tuple[str, ...]
    """One line per method."""

    @property
    def verdict(self) -> str:
        return {True: "holds", False: "does not hold", None: "not decided"}[self.holds]


def claim_findings(
    shares: Sequence[SourceShares], coverage: Sequence[Coverage], subsets: Sequence[Trials], orders: Trials | None
) -> tuple[ClaimFinding, ...]:
    return (
        _finding("C > M > S in verify success", _verify_success(shares)),
        _finding("each source accepts tokens that no other does", _own_tokens(coverage)),
        _finding("C+M beats any single source", _pair_beats_singles(subsets)),
        _finding("the order C, M, S is the best of the six", _best_order(orders)),
    )


def _finding(claim: str, evidence_rows: Iterator[tuple[str, bool, str]]) -> ClaimFinding:
    verdicts = {method: (holds, evidence) for method, holds, evidence in evidence_rows}
    if not verdicts:
        return ClaimFinding(claim, None, ("a source is missing, or nothing was drafted from one",))
    paper_first = sorted(verdicts.items(), key=lambda item: item[0] != PAPER_METHOD)
    holds = paper_first[0][1][0]
    lines = (
        f"{method}: {evidence}{'' if own == holds else ' (differs from above)'}"
        for method, (own, evidence) in paper_first
    )
    return ClaimFinding(claim, holds, tuple(lines))


def _verify_success(shares: Sequence[SourceShares]) -> Iterator[tuple[str, bool, str]]:
    for share in shares:
        sources = [
            share.sources[name] for name in PAPER_SOURCES if name in share.sources and share.sources[name].drafted
        ]
        if len(sources) < len(PAPER_SOURCES):
            continue
        counts = {
            "steps in which something of it was accepted, of those that it drafted in": [one.won for one in sources],
            "accepted of the tokens that it drafted": [one.verified for one in sources],
        }
        values = "; ".join(f"{what}: {_each(rates, '.1%')}" for what, rates in counts.items())
        yield share.method, all(rates[0] > rates[1] > rates[2] for rates in counts.values()), values


def _each(values: Sequence[float], form: str) -> str:
    return ", ".join(f"{name} {value:{form}}" for name, value in zip(PAPER_SOURCES, values, strict=True))


def _own_tokens(coverage: Sequence[Coverage]) -> Iterator[tuple[str, bool, str]]:
    for covered in coverage:
        alone = [covered.sources[name].alone for name in PAPER_SOURCES if name in covered.sources]
        if len(alone) == len(PAPER_SOURCES):
            values = f"of {covered.positions:,} tokens, accepted from this source alone: {_each(alone, ',')}"
            yield covered.method, min(alone) > 0, values


def _pair_beats_singles(subsets: Sequence[Trials]) -> Iterator[tuple[str, bool, str]]:
    for trials in subsets:
        rates = {row.sources: row.tokens_per_step for row in trials.rows}
        if {"C", "M", "S", "CM"} <= rates.keys():
            values = ", ".join(f"{'+'.join(name)} {rates[name]:.3f}" for name in ("CM", "C", "M", "S"))
            yield trials.method, all(rates["CM"] > rates[name] for name in "CMS"), f"tokens per step: {values}"


def _best_order(orders: Trials | None) -> Iterator[tuple[str, bool, str]]:
    if orders is None or len(orders.rows) < 6:
        return
    ranked = sorted(orders.rows, key=lambda row: -row.tokens_per_step)
    values = ", ".join(f"{row.sources} {row.tokens_per_step:.3f} ({row.draft_us:.0f} µs)" for row in ranked)
    best = ranked[0].sources == "CMS" and ranked[0].tokens_per_step > ranked[1].tokens_per_step
    yield orders.method, best, f"tokens per step (drafting, median of the steps): {values}"
