"""The figures of a report in their order: what each is called, what it shows, and what is missing for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hdtool.runtime.evaluation.report import formatted, plots
from hdtool.runtime.evaluation.report.tables import (
    Case,
    Coverage,
    Durations,
    Repeats,
    Shares,
    Sizes,
    Speedups,
    Table,
    Trials,
    Warmth,
)
from hdtool.runtime.evaluation.report.theme import Draw

BENCH = "hdtool bench --report DIR"
HEAT = "hdtool bench --temperatures 0.1,0.4,0.7,1.0 --report DIR"
STORES = "hdtool replay --report DIR with a model store and a corpus index"


@dataclass(frozen=True)
class Shown:
    """All that a page may show; what there is no data for is empty."""

    tables: tuple[Table, ...] = ()
    speedups: Speedups | None = None
    durations: Durations | None = None
    warmth: Warmth | None = None
    shares: tuple[Shares, ...] = ()
    subsets: tuple[Trials, ...] = ()
    orders: Trials | None = None
    coverage: tuple[Coverage, ...] = ()
    repeats: Repeats | None = None
    sizes: Sizes | str = "it was not asked for"
    """Or why there is nothing to show."""
    case: Case | None = None


@dataclass(frozen=True)
class Exhibit:
    """A figure."""

    name: str
    title: str
    caption: str
    alt: str
    """For those who do not see it."""
    draw: Draw
    table: Table | None = None
    """The same in numbers, where no other table has them."""
    height: float = 3.6


def exhibits(shown: Shown) -> Iterator[Exhibit]:
    """The figures that there is data for."""
    if shown.speedups:
        yield _speedups(shown.speedups)
    if shown.durations:
        yield _durations(shown.durations)
    if shown.warmth:
        yield _warmth(shown.warmth)
    for shares in shown.shares:
        yield _shares(shares)
    for trials in shown.subsets:
        yield _trials(trials, "subsets", "The databases of")
    if shown.orders:
        yield _trials(shown.orders, "orders", "The order of the databases of")
    for coverage in shown.coverage:
        yield _coverage(coverage)
    if shown.repeats:
        yield from _repeats(shown.repeats)
    if isinstance(shown.sizes, Sizes):
        yield _sizes(shown.sizes)


def missing(shown: Shown) -> Iterator[tuple[str, str]]:
    """What is not shown, and what would bring it."""
    needs: Sequence[tuple[str, Any, str]] = (
        ("speed-up per task and method", shown.speedups, BENCH),
        ("generation time against tokens", shown.durations, BENCH),
        ("speed over temperatures", shown.warmth, HEAT),
        ("draft and verify success per database", shown.shares, STORES),
        ("order of the databases", shown.orders, STORES),
        ("tokens that only one database had accepted", shown.coverage, STORES),
        ("repeated 4-grams", shown.repeats, "answers of four tokens or more"),
    )
    for name, data, command in needs:
        if not data:
            yield name, command
    if isinstance(shown.sizes, str):
        yield "drafting time against database size", f"{STORES} ({shown.sizes})"


def _speedups(data: Speedups) -> Exhibit:
    rows = len(data.tasks) * (0.11 * len(data.methods) + 0.14)
    legend = 0.2 * -(-len(data.methods) // 4)
    best = {task: max(data.methods, key=lambda name: data.methods[name][at]) for at, task in enumerate(data.tasks)}
    seen = "; ".join(f"{task}: {name} {data.methods[name][at]:.2f}" for at, (task, name) in enumerate(best.items()))
    return Exhibit(
        "speed-up",
        "Speed-up per task",
        f"Tokens per second over those of {data.baseline}, the mean over the questions of a task.",
        f"Bars; the fastest on each task: {seen}",
        partial(plots.speedups, data),
        height=max(2.6, rows + legend + 0.6),
    )


def _durations(data: Durations) -> Exhibit:
    seen = ", ".join(f"{method} {data.line(method)[0] * 1e3:.2f}" for method in data.answers)
    return Exhibit(
        "generation-time",
        "Generation time against generated tokens",
        "A point for each answer; the slope of a line is what one more token takes.",
        f"Points and lines; milliseconds a token: {seen}",
        partial(plots.durations, data),
        formatted.durations(data),
        height=3.8,
    )


def _warmth(data: Warmth) -> Exhibit:
    seen = "; ".join(
        f"{method}: {', '.join(f'{speed:.0f}' for speed in speeds)}" for method, speeds in data.methods.items()
    )
    return Exhibit(
        "temperatures",
        "Speed over temperatures",
        "Tokens per second, the mean over all questions. The hotter, the more the model surprises its drafts.",
        f"Lines over temperatures {', '.join(f'{at:g}' for at in data.temperatures)}. {seen}",
        partial(plots.warmth, data),
        formatted.warmth(data),
    )


def _shares(data: Shares) -> Exhibit:
    seen = "; ".join(
        f"{name} drafts in {share.hits / max(1, data.steps):.0%} of the steps, has a token accepted in {share.won:.0%} "
        f"of these, and {share.verified:.0%} of its tokens stand"
        for name, share in data.sources.items()
    )
    return Exhibit(
        f"sources-{data.method}",
        f"Draft and verify success of {data.method}",
        "How often a source had something to draft, how often some of that was accepted, and how much of it.",
        f"Bars. {seen}",
        partial(plots.shares, data),
        formatted.shares(data),
    )


def _trials(data: Trials, name: str, title: str) -> Exhibit:
    seen = ", ".join(f"{row.databases} {row.tokens_per_step:.2f}" for row in data.rows)
    return Exhibit(
        f"{name}-{data.method}",
        f"{title} {data.method}",
        "Tokens per step on recorded answers, and what drafting took in the median step. "
        f"The best, {'+'.join(data.best.databases)}, has a thick edge.",
        f"Bars; tokens per step: {seen}",
        partial(plots.trials, data),
        formatted.trials(data, f"{title} {data.method}"),
    )


def _coverage(data: Coverage) -> Exhibit:
    seen = "; ".join(
        f"{name} {found.positions:,}, of which {found.alone:,} from no other" for name, found in data.databases.items()
    )
    words = ", ".join(f"{name} {found.words:,} ({found.words_alone:,})" for name, found in data.databases.items())
    return Exhibit(
        f"coverage-{data.method}",
        f"Token coverage of {data.method}",
        f"Tokens accepted where a database is the only one, of {data.positions:,} in all; {data.nobody:,} were "
        "accepted from none. Filled: where neither of the others, alone, had the same token accepted. Different "
        f"tokens of the vocabulary (from no other database): {words}.",
        f"Bars. {seen}",
        partial(plots.coverage, data),
        formatted.coverage(data),
    )


def _repeats(data: Repeats) -> Iterator[Exhibit]:
    means = ", ".join(f"{name} {sum(values) / len(values):.0%}" for name, values in data.places.items())
    yield Exhibit(
        "repeated-4-grams",
        "Temporal locality: 4-grams seen before",
        "The share of an answer's 4-grams that stand earlier in the same conversation, in answers to earlier ones, "
        "or in a store.",
        f"Lines over the generations; on average: {means}",
        partial(plots.repeats, data),
        formatted.repeats(data),
    )
    far = ", ".join(f"{data.within[at]:.0%} within {data.distances[at]:,}" for at in range(6, len(data.distances), 4))
    yield Exhibit(
        "4-gram-distances",
        "How far back a 4-gram stood last",
        "All answers one after another: the share of 4-grams that were said at most so many tokens ago.",
        f"A rising line: {far}",
        partial(plots.distances, data),
        formatted.distances(data),
    )


def _sizes(data: Sizes) -> Exhibit:
    seen = "; ".join(
        f"{row.tokens:,} tokens: {row.draft_us:.0f} µs, {row.tokens_per_step:.2f} tokens per step" for row in data.rows
    )
    return Exhibit(
        "database-size",
        f"Drafting time of {data.method} against database size",
        "Replays with the corpus index over 1/16, 1/8, 1/4, 1/2 and all of its documents, all databases in use.",
        f"Lines. {seen}",
        partial(plots.sizes, data),
        formatted.sizes(data),
    )
