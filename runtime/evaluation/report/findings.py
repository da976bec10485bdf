"""The claims of the Hierarchy Drafting paper, compared with this data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hdtool.runtime.evaluation.report.tables import Coverage, Shares, Trials

SOURCES = ("context", "model", "corpus")
PAPER = "hd-paper"
"""The method that decides the verdict; the evidence of other methods is listed too."""


@dataclass(frozen=True)
class Finding:
    """A claim of the paper, and the evidence of this data."""

    claim: str
    holds: bool | None
    """None if this data does not decide it."""
    evidence: tuple[str, ...]
    """One line per method."""

    @property
    def verdict(self) -> str:
        return {True: "holds", False: "does not hold", None: "not decided"}[self.holds]


def findings(
    shares: Sequence[Shares], coverage: Sequence[Coverage], subsets: Sequence[Trials], orders: Trials | None
) -> tuple[Finding, ...]:
    return (
        _finding("C > M > S in verify success", _verify_success(shares)),
        _finding("each source accepts tokens that no other does", _own_tokens(coverage)),
        _finding("C+M beats any single source", _pair_beats_singles(subsets)),
        _finding("the order C, M, S is the best of the six", _best_order(orders)),
    )


def _finding(claim: str, found: Iterator[tuple[str, bool, str]]) -> Finding:
    verdicts = {method: (holds, evidence) for method, holds, evidence in found}
    if not verdicts:
        return Finding(claim, None, ("a source is missing, or nothing was drafted from one",))
    paper_first = sorted(verdicts.items(), key=lambda one: one[0] != PAPER)
    holds = paper_first[0][1][0]
    lines = (
        f"{method}: {evidence}{'' if own == holds else ' (differs from above)'}"
        for method, (own, evidence) in paper_first
    )
    return Finding(claim, holds, tuple(lines))


def _verify_success(shares: Sequence[Shares]) -> Iterator[tuple[str, bool, str]]:
    for share in shares:
        sources = [share.sources[name] for name in SOURCES if name in share.sources and share.sources[name].drafted]
        if len(sources) < len(SOURCES):
            continue
        counts = {
            "steps in which something of it was accepted, of those that it drafted in": [one.won for one in sources],
            "accepted of the tokens that it drafted": [one.verified for one in sources],
        }
        values = "; ".join(f"{what}: {_each(rates, '.1%')}" for what, rates in counts.items())
        yield share.method, all(rates[0] > rates[1] > rates[2] for rates in counts.values()), values


def _each(values: Sequence[float], form: str) -> str:
    return ", ".join(f"{name} {value:{form}}" for name, value in zip(SOURCES, values, strict=True))


def _own_tokens(coverage: Sequence[Coverage]) -> Iterator[tuple[str, bool, str]]:
    for covered in coverage:
        alone = [covered.sources[name].alone for name in SOURCES if name in covered.sources]
        if len(alone) == len(SOURCES):
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
