"""The data of a benchmark's figures, computed from its results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hdtool.data.bench_results import Results
from hdtool.data.spec_bench import AnsweredQuestion
from hdtool.runtime.evaluation.report.tables import (
    Durations,
    Share,
    Shares,
    Speedups,
    Table,
    TemperatureSpeeds,
    wins_of,
)
from hdtool.runtime.evaluation.scores import OVERALL, Score, Scores, scores_of
from hdtool.runtime.source_names import source_named


@dataclass(frozen=True)
class Measured:
    """The results of a benchmark, and those of the same one at other temperatures."""

    results: Results
    baseline: str | None = None
    others: Sequence[Results] = ()

    @property
    def scores(self) -> Scores:
        return scores_of(self.results, self.baseline)

    def speedups(self) -> Speedups:
        scores = self.scores
        methods = {
            method: tuple(found[method].speedup for found in scores.tasks.values())
            for method in self.results.run.methods
            if method != scores.baseline
        }
        return Speedups(scores.baseline, tuple(scores.tasks), methods)

    def durations(self) -> Durations:
        answers = {
            method: tuple((len(turn.output_ids), turn.seconds) for row in rows for turn in row.turns if turn.output_ids)
            for method, rows in self.results.answers.items()
        }
        return Durations({method: points for method, points in answers.items() if points})

    def temperatures(self) -> TemperatureSpeeds | None:
        """None if there is only one temperature."""
        runs = {temperature_of(one): one for one in (self.results, *self.others)}
        if len(runs) < 2:
            return None
        overall = {at: scores_of(runs[at], self.baseline).tasks[OVERALL] for at in sorted(runs)}
        methods = {
            method: tuple(scores[method].tokens_per_second for scores in overall.values())
            for method in self.results.run.methods
        }
        return TemperatureSpeeds(tuple(overall), methods)

    def shares(self) -> tuple[Shares, ...]:
        """The sources of the methods that drafted from more than one."""
        found = (_shares(method, rows) for method, rows in self.results.answers.items())
        return tuple(shares for shares in found if len(shares.sources) > 1)

    def tables(self) -> tuple[Table, ...]:
        scores = self.scores
        against = f"against {scores.baseline}"
        whole = scores.tasks[OVERALL]
        return (
            _by_task("Tokens per second", scores, lambda score: f"{score.tokens_per_second:,.1f}"),
            _by_task(f"Speed-up {against}", scores, lambda score: f"{score.speedup:.2f}"),
            _by_task("Tokens per step", scores, lambda score: f"{score.tokens_per_step:.2f}"),
            Table(
                "All questions",
                ("method", "identical answers", "nodes a step", "drafting, µs a step", "in the model, ms a step"),
                tuple((method, *_cells(score)) for method, score in whole.items()),
                f"Identical: questions with the very tokens of {scores.reference} in all turns."
                if scores.reference
                else "",
            ),
        )


def temperature_of(results: Results) -> float:
    return float(results.run.options["temperature"])


def _by_task(title: str, scores: Scores, formatted: Callable[[Score], str]) -> Table:
    methods = scores.tasks[OVERALL]
    rows = ((method, *(formatted(found[method]) for found in scores.tasks.values())) for method in methods)
    sizes = (f"{task} ({next(iter(found.values())).questions})" for task, found in scores.tasks.items())
    return Table(title, ("method", *sizes), tuple(rows))


def _cells(score: Score) -> tuple[str, ...]:
    return (
        "-" if score.identical is None else f"{score.identical:,} of {score.questions:,}",
        f"{score.nodes_per_step:.1f}",
        "-" if score.draft_us_per_step is None else f"{score.draft_us_per_step:,.0f}",
        "-" if score.model_ms_per_step is None else f"{score.model_ms_per_step:.2f}",
    )


def _shares(method: str, rows: Sequence[AnsweredQuestion]) -> Shares:
    turns = [turn for row in rows for turn in row.turns if turn.output_ids]
    names = dict.fromkeys(name for turn in turns for name, found in turn.sources.items() if found["drafted"])
    wins = Counter[int]()
    for turn in turns:
        wins += wins_of(turn.drafted_by, turn.step_tokens)
    sources = {}
    for name in names:
        drafted, accepted, hits = (
            int(sum(turn.sources.get(name, {}).get(key, 0) for turn in turns))
            for key in ("drafted", "accepted", "hits")
        )
        sources[name] = Share(drafted, accepted, hits, wins[source_named(name)])
    # Nothing is drafted for the pass over the prompt.
    return Shares(method, sum(len(turn.step_tokens) - 1 for turn in turns), sources)
