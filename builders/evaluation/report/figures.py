"""Figures of a report in order, each with its title, caption, alternative text and table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hdtool.builders.evaluation.report import plots
from hdtool.builders.evaluation.report.plots import Draw
from hdtool.builders.evaluation.report.source_shares import SourceShares
from hdtool.builders.evaluation.report.tables import Durations, Speeds, Table
from hdtool.builders.evaluation.report.typical_case import TypicalCase
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
    case: TypicalCase | None = None


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

    if data.speedups:
        yield _speedups(data.speedups)
    if data.durations:
        yield _durations(data.durations)
    if data.temperatures:
        yield _temperatures(data.temperatures)
    yield from map(_shares, data.shares)


def missing_figures(data: ReportData) -> Iterator[tuple[str, str]]:
    """Yield the names of figures without data, each with the command or data that would add it."""
    needs: Sequence[tuple[str, Any, str]] = (
        ("speed-up per task and method", data.speedups, f"{BENCH_COMMAND} on an idle machine"),
        ("generation time against tokens", data.durations, BENCH_COMMAND),
        ("speed over temperatures", data.temperatures, TEMPERATURES_COMMAND),
        ("draft and verify success per source", data.shares, STORES_COMMAND),
    )
    yield from ((name, command) for name, part, command in needs if not part)


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
