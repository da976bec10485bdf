"""The figures of a report in their order, each with title, caption, alternative text and table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hdtool.runtime.evaluation.report import plots
from hdtool.runtime.evaluation.report.tables import (
    Case,
    Coverage,
    Durations,
    Repeats,
    Shares,
    Sizes,
    Speedups,
    Table,
    TemperatureSpeeds,
    Trials,
)
from hdtool.runtime.evaluation.report.theme import Draw

BENCH = "hdtool bench --report DIR"
TEMPERATURES = "hdtool bench --temperatures 0.1,0.4,0.7,1.0 --report DIR"
STORES = "hdtool replay --report DIR with a model store and a corpus index"


@dataclass(frozen=True)
class ReportData:
    """The data of a report; parts without data are empty."""

    tables: tuple[Table, ...] = ()
    speedups: Speedups | None = None
    durations: Durations | None = None
    temperatures: TemperatureSpeeds | None = None
    shares: tuple[Shares, ...] = ()
    subsets: tuple[Trials, ...] = ()
    orders: Trials | None = None
    coverage: tuple[Coverage, ...] = ()
    repeats: Repeats | None = None
    sizes: Sizes | str = "it was not asked for"
    """A text gives the reason why there is no data."""
    case: Case | None = None


@dataclass(frozen=True)
class Figure:
    """A plot and its texts."""

    name: str
    title: str
    caption: str
    alt: str
    """Alternative text."""
    draw: Draw
    table: Table | None = None
    """The same data in numbers, unless another table has them."""
    height: float = 3.6


def figures_of(data: ReportData) -> Iterator[Figure]:
    """The figures that there is data for."""
    if data.speedups:
        yield _speedups(data.speedups)
    if data.durations:
        yield _durations(data.durations)
    if data.temperatures:
        yield _temperatures(data.temperatures)
    yield from map(_shares, data.shares)
    for trials in data.subsets:
        yield _trials(trials, "subsets", "The databases of")
    if data.orders:
        yield _trials(data.orders, "orders", "The order of the databases of")
    yield from map(_coverage, data.coverage)
    if data.repeats:
        yield from _repeats(data.repeats)
    if isinstance(data.sizes, Sizes):
        yield _sizes(data.sizes)


def missing(data: ReportData) -> Iterator[tuple[str, str]]:
    """The figures without data, each with the command that would add it."""
    needs: Sequence[tuple[str, Any, str]] = (
        ("speed-up per task and method", data.speedups, BENCH),
        ("generation time against tokens", data.durations, BENCH),
        ("speed over temperatures", data.temperatures, TEMPERATURES),
        ("draft and verify success per database", data.shares, STORES),
        ("order of the databases", data.orders, STORES),
        ("tokens that only one database had accepted", data.coverage, STORES),
        ("repeated 4-grams", data.repeats, "answers of four tokens or more"),
    )
    yield from ((name, command) for name, part, command in needs if not part)
    if isinstance(data.sizes, str):
        yield "drafting time against database size", f"{STORES} ({data.sizes})"


def _speedups(data: Speedups) -> Figure:
    rows = len(data.tasks) * (0.11 * len(data.methods) + 0.14)
    legend = 0.2 * -(-len(data.methods) // 4)
    best = {task: max(data.methods, key=lambda name: data.methods[name][at]) for at, task in enumerate(data.tasks)}
    values = "; ".join(f"{task}: {name} {data.methods[name][at]:.2f}" for at, (task, name) in enumerate(best.items()))
    return Figure(
        name="speed-up",
        title="Speed-up per task",
        caption=f"Tokens per second over those of {data.baseline}, the mean over the questions of a task.",
        alt=f"Bars; the fastest on each task: {values}",
        draw=partial(plots.speedups, data),
        height=max(2.6, rows + legend + 0.6),
    )


def _durations(data: Durations) -> Figure:
    lines = {method: data.line(method) for method in data.answers}
    rows = (
        (method, f"{slope * 1e3:.3f}", f"{start * 1e3:.1f}", f"{len(data.answers[method]):,}")
        for method, (slope, start) in lines.items()
    )
    values = ", ".join(f"{method} {slope * 1e3:.2f}" for method, (slope, _) in lines.items())
    return Figure(
        name="generation-time",
        title="Generation time against generated tokens",
        caption="A point for each answer; the slope of a line is what one more token takes.",
        alt=f"Points and lines; milliseconds a token: {values}",
        draw=partial(plots.durations, data),
        table=Table("Generation time", ("method", "ms a token", "ms before the first", "answers"), tuple(rows)),
        height=3.8,
    )


def _temperatures(data: TemperatureSpeeds) -> Figure:
    columns = [f"{temperature:g}" for temperature in data.temperatures]
    values = "; ".join(f"{name}: {', '.join(f'{speed:.0f}' for speed in row)}" for name, row in data.methods.items())
    return Figure(
        name="temperatures",
        title="Speed over temperatures",
        caption="Tokens per second, the mean over all questions. "
        "The higher the temperature, the fewer draft tokens are accepted.",
        alt=f"Lines over temperatures {', '.join(columns)}. {values}",
        draw=partial(plots.temperatures, data),
        table=Table(
            "Tokens per second over temperatures",
            ("method", *columns),
            tuple((name, *(f"{speed:,.1f}" for speed in row)) for name, row in data.methods.items()),
        ),
    )


def _shares(data: Shares) -> Figure:
    steps = max(1, data.steps)
    values = "; ".join(
        f"{name} drafts in {share.hits / steps:.0%} of the steps, has a token accepted in {share.won:.0%} of these, "
        f"and {share.verified:.0%} of its tokens are accepted"
        for name, share in data.sources.items()
    )
    rows = (
        (
            name,
            f"{one.hits / steps:.1%}",
            f"{one.won:.1%}",
            f"{one.drafted:,}",
            f"{one.accepted:,}",
            f"{one.verified:.1%}",
        )
        for name, one in data.sources.items()
    )
    return Figure(
        name=f"sources-{data.method}",
        title=f"Draft and verify success of {data.method}",
        caption="How often a source had something to draft, how often some of that was accepted, and how much of it.",
        alt=f"Bars. {values}",
        draw=partial(plots.shares, data),
        table=Table(
            f"Sources of {data.method}",
            ("source", "drafts in", "of these, accepted from in", "tokens drafted", "accepted", "of the drafted"),
            tuple(rows),
            f"Of {data.steps:,} steps.",
        ),
    )


def _trials(data: Trials, name: str, title: str) -> Figure:
    values = ", ".join(f"{row.databases} {row.tokens_per_step:.2f}" for row in data.rows)
    rows = (
        (row.databases, f"{row.tokens_per_step:.3f}", f"{row.nodes_per_step:.1f}", f"{row.draft_us:.0f}")
        for row in data.rows
    )
    return Figure(
        name=f"{name}-{data.method}",
        title=f"{title} {data.method}",
        caption="Tokens per step on recorded answers, and what drafting took in the median step. "
        f"The best, {'+'.join(data.best.databases)}, has a thick edge.",
        alt=f"Bars; tokens per step: {values}",
        draw=partial(plots.trials, data),
        table=Table(
            f"{title} {data.method}",
            ("databases", "tokens per step", "nodes a step", "drafting, µs a step"),
            tuple(rows),
            "Drafting: the median of the steps, the tree's mask included.",
        ),
    )


def _coverage(data: Coverage) -> Figure:
    found = data.databases.items()
    values = "; ".join(f"{name} {one.positions:,}, of which {one.alone:,} from no other" for name, one in found)
    words = ", ".join(f"{name} {one.words:,} ({one.words_alone:,})" for name, one in found)
    return Figure(
        name=f"coverage-{data.method}",
        title=f"Token coverage of {data.method}",
        caption=f"Tokens accepted where a database is the only one, of {data.positions:,} in all; {data.nobody:,} were "
        "accepted from none. Filled: where neither of the others, alone, had the same token accepted. Different "
        f"tokens of the vocabulary (from no other database): {words}.",
        alt=f"Bars. {values}",
        draw=partial(plots.coverage, data),
        table=Table(
            f"Token coverage of {data.method}",
            ("only database", "accepted", "from no other", "different tokens", "from no other"),
            tuple(
                (name, f"{one.positions:,}", f"{one.alone:,}", f"{one.words:,}", f"{one.words_alone:,}")
                for name, one in found
            ),
            f"Of {data.positions:,} tokens; {data.nobody:,} were accepted from none.",
        ),
    )


def _repeats(data: Repeats) -> Iterator[Figure]:
    means = ", ".join(f"{name} {sum(values) / len(values):.0%}" for name, values in data.places.items())
    yield Figure(
        name="repeated-4-grams",
        title="Temporal locality: 4-grams seen before",
        caption="The share of an answer's 4-grams that occur earlier in the same conversation, in answers to earlier "
        "ones, or in a store.",
        alt=f"Lines over the generations; on average: {means}",
        draw=partial(plots.repeats, data),
        table=Table(
            "4-grams seen before, percent",
            ("up to generation", *data.places),
            tuple(
                (f"{last:,}", *(f"{100 * values[at]:.1f}" for values in data.places.values()))
                for at, last in enumerate(data.generations)
            ),
        ),
    )
    shares = list(zip(data.distances, data.within, strict=True))
    yield Figure(
        name="4-gram-distances",
        title="Distance to the last occurrence of a 4-gram",
        caption="All answers one after another: the share of 4-grams that occurred at most so many tokens before.",
        alt=f"A rising line: {', '.join(f'{share:.0%} within {distance:,}' for distance, share in shares[6::4])}",
        draw=partial(plots.distances, data),
        table=Table(
            "4-grams that occurred at most so many tokens before",
            ("tokens", "percent"),
            tuple((f"{distance:,}", f"{100 * share:.1f}") for distance, share in shares),
        ),
    )


def _sizes(data: Sizes) -> Figure:
    values = "; ".join(
        f"{row.tokens:,} tokens: {row.draft_us:.0f} µs, {row.tokens_per_step:.2f} tokens per step" for row in data.rows
    )
    rows = (
        (
            f"{row.tokens:,}",
            f"{row.tokens_per_step:.3f}",
            f"{row.draft_us:.0f}",
            f"{row.draft_us_p90:.0f}",
            f"{row.corpus_us:.0f}",
        )
        for row in data.rows
    )
    return Figure(
        name="database-size",
        title=f"Drafting time of {data.method} against database size",
        caption="Replays with the corpus index over 1/16, 1/8, 1/4, 1/2 and all of its documents, "
        "all databases in use.",
        alt=f"Lines. {values}",
        draw=partial(plots.sizes, data),
        table=Table(
            f"Size of the corpus index of {data.method}",
            ("tokens", "tokens per step", "drafting, µs p50", "p90", "in the corpus index, mean"),
            tuple(rows),
        ),
    )
