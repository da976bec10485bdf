"""The data of a benchmark's figures, computed from its results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from hdtool.data.bench_results import Results
from hdtool.data.spec_bench import AnsweredQuestion
from hdtool.runtime.evaluation.report.tables import Durations, Share, Shares, Speeds, Table, wins_of
from hdtool.runtime.evaluation.scores import OVERALL, Scores, in_words, scores_of
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

    def speedups(self) -> Speeds:
        """Over plain decoding, unless it was not measured or another baseline is named."""
        scores = self.scores
        other = scores.comparisons[0] if self.baseline is None else scores.baseline
        methods = {
            method: tuple(scores.speedup(task, method, other) for task in scores.tasks)
            for method in self.results.run.methods
            if method != other
        }
        return Speeds(tuple(scores.tasks), methods, other)

    def durations(self) -> Durations:
        answers = {
            method: tuple((len(turn.output_ids), turn.seconds) for row in rows for turn in row.turns if turn.output_ids)
            for method, rows in self.results.answers.items()
        }
        return Durations({method: points for method, points in answers.items() if points})

    def temperatures(self) -> Speeds | None:
        """None if there is only one temperature."""
        runs = {temperature_of(one): one for one in (self.results, *self.others)}
        if len(runs) < 2:
            return None
        overall = {at: scores_of(runs[at], self.baseline).tasks[OVERALL] for at in sorted(runs)}
        methods = {
            method: tuple(scores[method].tokens_per_second for scores in overall.values())
            for method in self.results.run.methods
            if all(method in scores for scores in overall.values())  # llama.cpp has greedy answers alone
        }
        return Speeds(tuple(overall), methods)

    def shares(self) -> tuple[Shares, ...]:
        """The sources of the methods that drafted from more than one."""
        found = (_shares(method, rows) for method, rows in self.results.answers.items())
        return tuple(shares for shares in found if len(shares.sources) > 1)

    def tables(self) -> tuple[Table, ...]:
        scores = self.scores
        rows = (
            (
                method,
                None if score.identical is None else f"{score.identical:,} of {score.questions:,}",
                score.nodes_per_step,
                score.draft_us_per_step,
                score.model_ms_per_step,
            )
            for method, score in scores.tasks[OVERALL].items()
        )
        columns = {
            "method": "",
            "identical answers": "",
            "nodes a step": ".1f",
            "drafting, µs a step": ",.0f",
            "in the model, ms a step": ".2f",
        }
        note = f"Identical: questions with the very tokens of {scores.reference} in all turns."
        return (
            _by_task(
                "Tokens per second", scores, lambda task, name: scores.tasks[task][name].tokens_per_second, ",.1f"
            ),
            *(
                _by_task(f"Times as fast as {in_words(other)}", scores, partial(scores.speedup, other=other), ".2f")
                for other in scores.comparisons
            ),
            _by_task("Tokens per step", scores, lambda task, name: scores.tasks[task][name].tokens_per_step, ".2f"),
            Table.of("All questions", columns, rows, note if scores.reference else ""),
        )


def temperature_of(results: Results) -> float:
    return float(results.run.options["temperature"])


def _by_task(title: str, scores: Scores, value: Callable[[str, str], float], form: str) -> Table:
    sizes = (f"{task} ({next(iter(found.values())).questions})" for task, found in scores.tasks.items())
    rows = ((method, *(value(task, method) for task in scores.tasks)) for method in scores.tasks[OVERALL])
    return Table.of(title, {"method": "", **dict.fromkeys(sizes, form)}, rows)


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
