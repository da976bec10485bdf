"""Data classes of a report, and checks of the Hierarchy Drafting paper's claims against them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any


@dataclass(frozen=True)
class Speeds:
    """Speed of each method: by task relative to a baseline, or by temperature in tokens per second."""

    labels: tuple[Any, ...]
    """Tasks or temperatures."""
    methods: Mapping[str, tuple[float, ...]]
    baseline: str = ""


@dataclass(frozen=True)
class Durations:
    """Number of tokens and seconds of every answer, by method."""

    answers: Mapping[str, tuple[tuple[int, float], ...]]

    def line(self, method: str) -> tuple[float, float]:
        """Fit a least-squares line through a method's answers.

        Returns ``(seconds per token, seconds before the first token)``.
        """
        import numpy as np

        tokens, seconds = np.array(self.answers[method], np.float64).T
        if len(set(tokens.tolist())) < 2:
            return float(seconds.sum() / tokens.sum()), 0.0
        slope, start = np.polyfit(tokens, seconds, 1)
        return float(slope), float(start)


@dataclass(frozen=True)
class SourceCounts:
    """What one source drafted in all steps of a method, and what was accepted."""

    drafted: int
    accepted: int
    hits: int
    """Number of steps in which the source drafted anything."""
    wins: int
    """Number of steps in which at least one token of the source was accepted."""

    @property
    def acceptance_rate(self) -> float:
        """Ratio of accepted to drafted tokens."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def win_rate(self) -> float:
        """Ratio of steps with an accepted token to steps with a draft."""
        return self.wins / self.hits if self.hits else 0.0


@dataclass(frozen=True)
class SourceShares:
    """Counts of each source over the steps of one method; ``steps`` is the number of steps without prefills."""

    method: str
    steps: int
    sources: Mapping[str, SourceCounts]


@dataclass(frozen=True)
class Trial:
    """Replay with one choice of sources."""

    sources: str
    """Letters of the sources, in lookup order."""
    tokens_per_step: float
    nodes_per_step: float
    draft_us: float
    """Median over steps."""


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
    """Tokens accepted from a source when it is the only one."""

    positions: int
    """Number of accepted tokens."""
    alone: int
    """Number of accepted tokens that no other source, as the only one, had accepted."""
    distinct_tokens: int
    """Number of distinct accepted tokens."""
    distinct_tokens_alone: int
    """Number of distinct accepted tokens that no other source, as the only one, had accepted."""


@dataclass(frozen=True)
class Coverage:
    """Number of answer tokens that are accepted from each source when it is the only one."""

    method: str
    positions: int
    """Number of tokens of all answers."""
    sources: Mapping[str, SourceCoverage]
    unaccepted: int
    """Number of tokens that were accepted from no source."""


@dataclass(frozen=True)
class Repeats:
    """How often 4-grams of answers occurred before, by place and by distance."""

    generations: tuple[int, ...]
    """Index of the last answer in each group, from 1."""
    origins: Mapping[str, tuple[float, ...]]
    """Per place, the share of each group's 4-grams that occurred there before."""
    distances: tuple[int, ...]
    shares_within: tuple[float, ...]
    """Per distance, the share of all 4-grams whose last occurrence is at most that many tokens back."""


@dataclass(frozen=True)
class IndexSize:
    """Replay with a corpus index of a given size."""

    tokens: int
    tokens_per_step: float
    draft_us: float
    """Median over steps."""
    draft_us_p90: float
    corpus_us: float
    """Microseconds in the corpus index, averaged over steps."""


@dataclass(frozen=True)
class IndexSizes:
    method: str
    rows: tuple[IndexSize, ...]


@dataclass(frozen=True)
class TypicalCase:
    """One answer in pieces, each with the source that drafted it."""

    method: str
    question: str
    pieces: tuple[tuple[str, str], ...]
    """Text and source name of each piece; the source of bonus tokens is ``none``."""
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
        """Create a table of values; ``columns`` maps names to formats, and None is shown as ``-``."""

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


def source_wins(sources: Iterable[int], step_tokens: Iterable[int]) -> Counter[int]:
    """Count the steps in which each source had a token accepted.

    ``sources`` has an entry per token, and ``step_tokens`` the number of tokens per step.
    """
    rest = iter(sources)
    return Counter(chain.from_iterable(set(islice(rest, tokens)) for tokens in step_tokens))


PAPER_SOURCES = ("context", "model", "corpus")
PAPER_METHOD = "hd-paper"
"""Method that decides the verdict; evidence of other methods is listed too."""


@dataclass(frozen=True)
class ClaimFinding:
    """Claim of the paper, and what this data says about it."""

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
        _finding("each source accepts tokens that no other does", _unique_tokens(coverage)),
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
            "steps in which something of it was accepted, of those that it drafted in": [
                one.win_rate for one in sources
            ],
            "accepted of the tokens that it drafted": [one.acceptance_rate for one in sources],
        }
        values = "; ".join(f"{what}: {_values_by_source(rates, '.1%')}" for what, rates in counts.items())
        yield share.method, all(rates[0] > rates[1] > rates[2] for rates in counts.values()), values


def _values_by_source(values: Sequence[float], form: str) -> str:
    return ", ".join(f"{name} {value:{form}}" for name, value in zip(PAPER_SOURCES, values, strict=True))


def _unique_tokens(coverage: Sequence[Coverage]) -> Iterator[tuple[str, bool, str]]:
    for covered in coverage:
        alone = [covered.sources[name].alone for name in PAPER_SOURCES if name in covered.sources]
        if len(alone) == len(PAPER_SOURCES):
            values = (
                f"of {covered.positions:,} tokens, accepted from this source alone: {_values_by_source(alone, ',')}"
            )
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
