"""Figures of a report in order, each with its title, caption, alternative text and table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

from hdtool.builders.evaluation.report import plots
from hdtool.builders.evaluation.report.plots import Draw
from hdtool.builders.evaluation.report.tables import (
    Coverage,
    Durations,
    IndexSizes,
    Repeats,
    SourceShares,
    Speeds,
    Table,
    Trials,
    TypicalCase,
)
from hdtool.builders.evaluation.scores import method_in_words

BENCH_COMMAND = "hdtool bench --report DIR"
TEMPERATURES_COMMAND = "hdtool bench --temperatures 0.1,0.4,0.7,1.0 --report DIR"
STORES_COMMAND = "hdtool replay --report DIR with a model store and a corpus index"


@dataclass(frozen=True)
class ReportData:
    """Data of a report; parts without data are empty."""

    tables: tuple[Table, ...] = ()
    speedups: Speeds | None = None
    durations: Durations | None = None
    temperatures: Speeds | None = None
    shares: tuple[SourceShares, ...] = ()
    shares_are_measured: bool = False
    """True if ``shares`` come from a benchmark's answers, not from a replay."""
    subsets: tuple[Trials, ...] = ()
    orders: Trials | None = None
    coverage: tuple[Coverage, ...] = ()
    repeats: Repeats | None = None
    sizes: IndexSizes | str = "it was not asked for"
    """Drafting times by index size, or the reason why there are none."""
    case: TypicalCase | None = None
    replayed: str = ""
    """Caption that states the number of draft tokens in the replays."""


@dataclass(frozen=True)
class Figure:
    """Plot with its title, caption, alternative text and table."""

    name: str
    title: str
    caption: str
    alt: str
    draw: Draw
    table: Table | None = None
    """Plotted numbers; None if another table has them."""
    height: float = 3.6


def figures_of(data: ReportData) -> Iterator[Figure]:
    """Yield the figures that have data."""

    def replayed(figure: Figure) -> Figure:
        return replace(figure, caption=f"{figure.caption} {data.replayed}".rstrip())

    if data.speedups:
        yield _speedups(data.speedups)
    if data.durations:
        yield _durations(data.durations)
    if data.temperatures:
        yield _temperatures(data.temperatures)
    shares = map(_shares, data.shares)
    yield from shares if data.shares_are_measured else map(replayed, shares)
    for trials in data.subsets:
        yield replayed(_trials(trials, "subsets", "The sources of"))
    if data.orders:
        yield replayed(_trials(data.orders, "orders", "The order of the sources of"))
    yield from map(replayed, map(_coverage, data.coverage))
    if data.repeats:
        yield from _repeats(data.repeats)
    if isinstance(data.sizes, IndexSizes):
        yield replayed(_sizes(data.sizes))


def missing_figures(data: ReportData) -> Iterator[tuple[str, str]]:
    """Yield the names of figures without data, each with the command or data that would add it."""
    needs: Sequence[tuple[str, Any, str]] = (
        ("speed-up per task and method", data.speedups, f"{BENCH_COMMAND} on an idle machine"),
        ("generation time against tokens", data.durations, BENCH_COMMAND),
        ("speed over temperatures", data.temperatures, TEMPERATURES_COMMAND),
        ("draft and verify success per source", data.shares, STORES_COMMAND),
        ("order of the sources", data.orders, STORES_COMMAND),
        ("tokens that only one source had accepted", data.coverage, STORES_COMMAND),
        ("repeated 4-grams", data.repeats, "answers of four tokens or more"),
    )
    yield from ((name, command) for name, part, command in needs if not part)
    if isinstance(data.sizes, str):
        yield "drafting time against the size of the corpus index", f"{STORES_COMMAND} ({data.sizes})"


def _speedups(data: Speeds) -> Figure:
    rows = len(data.labels) * (0.11 * len(data.methods) + 0.14)
    legend = 0.2 * -(-len(data.methods) // 4)
    best = {task: max(data.methods, key=lambda name: data.methods[name][at]) for at, task in enumerate(data.labels)}
    values = "; ".join(f"{task}: {name} {data.methods[name][at]:.2f}" for at, (task, name) in enumerate(best.items()))
    return Figure(
        "speed-up",
        "Speed-up per task",
        f"Tokens per second over those of {method_in_words(data.baseline)}, the mean over the questions of a task.",
        f"Bars; the fastest on each task: {values}",
        partial(plots.speedups, data),
        height=max(2.6, rows + legend + 0.6),
    )


def _durations(data: Durations) -> Figure:
    rates = {method: data.rates(method) for method in data.answers}
    values = ", ".join(f"{method} {1e3 * each:.2f}" for method, (_, each) in rates.items() if each is not None)
    return Figure(
        "generation-time",
        "Generation time against generated tokens",
        "A point for each answer. The legend has the time per token after the first.",
        f"Points; milliseconds a token after the first: {values}",
        partial(plots.durations, data),
        Table.of(
            "Generation time",
            {"method": "", "ms to the first token": ",.1f", "ms a token after it": ",.2f", "answers": ","},
            (
                (name, *(None if seconds is None else 1e3 * seconds for seconds in pair), len(data.answers[name]))
                for name, pair in rates.items()
            ),
            "Both are measured: the mean over the answers, and over all tokens after the first.",
        ),
        height=3.8,
    )


def _temperatures(data: Speeds) -> Figure:
    columns = [f"{temperature:g}" for temperature in data.labels]
    values = "; ".join(f"{name}: {', '.join(f'{speed:.0f}' for speed in row)}" for name, row in data.methods.items())
    return Figure(
        "temperatures",
        "Speed over temperatures",
        "Tokens per second, the mean over all questions. "
        "The higher the temperature, the fewer draft tokens are accepted.",
        f"Lines over temperatures {', '.join(columns)}. {values}",
        partial(plots.temperatures, data),
        Table.of(
            "Tokens per second over temperatures",
            {"method": "", **dict.fromkeys(columns, ",.1f")},
            ((name, *row) for name, row in data.methods.items()),
        ),
    )


def _shares(data: SourceShares) -> Figure:
    steps = max(1, data.steps)
    sources = data.sources.items()
    values = "; ".join(
        f"{name} drafts in {share.hits / steps:.0%} of the steps, has a token accepted in {share.win_rate:.0%} of "
        f"these, and {share.acceptance_rate:.0%} of its tokens are accepted"
        for name, share in sources
    )
    columns = {
        "source": "",
        "drafts in": ".1%",
        "of these, accepted from in": ".1%",
        "tokens drafted": ",",
        "accepted": ",",
        "of the drafted": ".1%",
    }
    return Figure(
        f"sources-{data.method}",
        f"Draft and verify success of {data.method}",
        "How often a source had something to draft, how often some of that was accepted, and how much of it.",
        f"Bars. {values}",
        partial(plots.shares, data),
        Table.of(
            f"Sources of {data.method}",
            columns,
            (
                (name, counts.hits / steps, counts.win_rate, counts.drafted, counts.accepted, counts.acceptance_rate)
                for name, counts in sources
            ),
            f"Of {data.steps:,} steps.",
        ),
    )


def _trials(data: Trials, name: str, title: str) -> Figure:
    values = ", ".join(f"{row.sources} {row.tokens_per_step:.2f}" for row in data.rows)
    return Figure(
        f"{name}-{data.method}",
        f"{title} {data.method}",
        "Tokens per step on recorded answers, and what drafting took in the median step. "
        f"The best, {'+'.join(data.best.sources)}, has a thick edge.",
        f"Bars; tokens per step: {values}",
        partial(plots.trials, data),
        Table.of(
            f"{title} {data.method}",
            {"sources": "", "tokens per step": ".3f", "nodes a step": ".1f", "drafting, µs a step": ".0f"},
            map(astuple, data.rows),
            "Drafting: the median of the steps, the tree's mask included.",
        ),
    )


def _coverage(data: Coverage) -> Figure:
    sources = data.sources.items()
    values = "; ".join(
        f"{name} {source.positions:,}, of which {source.alone:,} from no other" for name, source in sources
    )
    distinct = ", ".join(
        f"{name} {source.distinct_tokens:,} ({source.distinct_tokens_alone:,})" for name, source in sources
    )
    columns = ("accepted", "from no other", "different tokens", "of these, from no other")
    return Figure(
        f"coverage-{data.method}",
        f"Token coverage of {data.method}",
        f"Tokens accepted where a source is the only one, of {data.positions:,} in all; {data.unaccepted:,} were "
        "accepted from none. Filled: where neither of the others, alone, had the same token accepted. Different "
        f"tokens of the vocabulary (from no other source): {distinct}.",
        f"Bars. {values}",
        partial(plots.coverage, data),
        Table.of(
            f"Token coverage of {data.method}",
            {"only source": "", **dict.fromkeys(columns, ",")},
            ((name, *astuple(source)) for name, source in sources),
            f"Of {data.positions:,} tokens; {data.unaccepted:,} were accepted from none.",
        ),
    )


def _repeats(data: Repeats) -> Iterator[Figure]:
    means = ", ".join(f"{name} {sum(values) / len(values):.0%}" for name, values in data.origins.items())
    yield Figure(
        "repeated-4-grams",
        "Temporal locality: 4-grams seen before",
        "The share of an answer's 4-grams that occur earlier in the same conversation, in answers to earlier ones, or "
        "in a store.",
        f"Lines over the generations; on average: {means}",
        partial(plots.repeats, data),
        Table.of(
            "4-grams seen before, percent",
            {"up to generation": ",", **dict.fromkeys(data.origins, ".1f")},
            (
                (last, *(100 * values[at] for values in data.origins.values()))
                for at, last in enumerate(data.generations)
            ),
        ),
    )
    shares = list(zip(data.distances, data.shares_within, strict=True))
    yield Figure(
        "4-gram-distances",
        "Distance to the last occurrence of a 4-gram",
        "All answers one after another: the share of 4-grams that occurred at most so many tokens before.",
        f"A rising line: {', '.join(f'{share:.0%} within {distance:,}' for distance, share in shares[6::4])}",
        partial(plots.distances, data),
        Table.of(
            "4-grams that occurred at most so many tokens before",
            {"tokens": ",", "percent": ".1f"},
            ((distance, 100 * share) for distance, share in shares),
        ),
    )


def _sizes(data: IndexSizes) -> Figure:
    values = "; ".join(
        f"{row.tokens:,} tokens: {row.draft_us:.0f} µs, {row.tokens_per_step:.2f} tokens per step" for row in data.rows
    )
    columns = {
        "tokens": ",",
        "tokens per step": ".3f",
        "drafting, µs p50": ".0f",
        "p90": ".0f",
        "in the corpus index, mean": ".0f",
    }
    return Figure(
        "database-size",
        f"Drafting time of {data.method} against the size of the corpus index",
        "Replays with the corpus index over 1/16, 1/8, 1/4, 1/2 and all of its documents, all sources in use.",
        f"Lines. {values}",
        partial(plots.sizes, data),
        Table.of(f"Size of the corpus index of {data.method}", columns, map(astuple, data.rows)),
    )
