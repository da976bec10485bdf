"""Report data from benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from hdtool.builders.evaluation.report.source_shares import SourceShares, measured_shares
from hdtool.builders.evaluation.report.tables import Durations, Speeds, Table
from hdtool.builders.evaluation.report.typical_case import DraftedAnswer
from hdtool.builders.evaluation.scores import ALL_TASKS, Scores, method_in_words, scores_of
from hdtool.data.bench_results import Results
from hdtool.data.prompts import Prompt


@dataclass(frozen=True)
class BenchMeasurements:
    """Results of a benchmark, and of the same benchmark at other temperatures."""

    results: Results
    baseline: str | None = None
    other_temperatures: Sequence[Results] = ()

    @property
    def scores(self) -> Scores:
        return scores_of(self.results, self.baseline)

    def speedups(self) -> Speeds | None:
        """Return speedups over plain decoding, or over the baseline if one was named or plain decoding is missing.

        Return None if the measured times cannot be compared.
        """
        scores = self.scores
        if scores.doubt:
            return None
        compared = scores.comparisons[0] if self.baseline is None else scores.baseline
        methods = {
            method: tuple(scores.speedup(task, method, compared) for task in scores.tasks)
            for method in self.results.run.methods
            if method != compared
        }
        return Speeds(tuple(scores.tasks), methods, compared)

    def durations(self) -> Durations:
        answers = {
            method: tuple(
                (len(turn.output_ids), turn.seconds, turn.first_seconds)
                for row in rows
                for turn in row.turns
                if turn.output_ids
            )
            for method, rows in self.results.answers.items()
        }
        return Durations({method: points for method, points in answers.items() if points})

    def temperatures(self) -> Speeds | None:
        """Return speeds by temperature; None if there is only one temperature."""
        runs = {run_temperature(run): run for run in (self.results, *self.other_temperatures)}
        if len(runs) < 2:
            return None
        overall = {at: scores_of(runs[at], self.baseline).tasks[ALL_TASKS] for at in sorted(runs)}
        methods = {
            method: tuple(scores[method].tokens_per_second for scores in overall.values())
            for method in self.results.run.methods
            if all(method in scores for scores in overall.values())  # llama.cpp is measured with greedy answers only
        }
        return Speeds(tuple(overall), methods)

    def shares(self) -> tuple[SourceShares, ...]:
        """Return, for each method that drafted from more than one source, the draft counts of its sources."""
        method_shares = (measured_shares(method, rows) for method, rows in self.results.answers.items())
        return tuple(shares for shares in method_shares if len(shares.sources) > 1)

    def drafted_answers(self, method: str, questions: Sequence[Prompt]) -> Iterator[DraftedAnswer]:
        """Yield the method's answers with the source of each token; none for peers, which do not report sources."""
        rows = self.results.answers[method]
        for question, row in zip(questions, rows, strict=False):  # a benchmark may be incomplete
            texts = [question.messages[-1]["content"], *question.later_turns]
            for text, turn in zip(texts, row.turns, strict=True):
                if turn.drafted_by:  # turns are empty once the context is full
                    yield DraftedAnswer(text, turn.output_ids, turn.drafted_by, len(turn.step_tokens))

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
            for method, score in scores.tasks[ALL_TASKS].items()
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
            _by_task(
                "Tokens per second of CPU time",
                scores,
                lambda task, name: scores.tasks[task][name].tokens_per_cpu_second,
                ",.1f",
            ),
            *(
                _by_task(
                    f"Times as fast as {method_in_words(compared)}",
                    scores,
                    partial(scores.speedup, reference=compared),
                    ".2f",
                )
                for compared in scores.comparisons
            ),
            _by_task("Tokens per step", scores, lambda task, name: scores.tasks[task][name].tokens_per_step, ".2f"),
            Table.of("All questions", columns, rows, note if scores.reference else ""),
        )


def run_temperature(results: Results) -> float:
    return float(results.run.options["temperature"])


def _by_task(title: str, scores: Scores, value: Callable[[str, str], float | None], form: str) -> Table:
    sizes = (
        f"{task} ({next(iter(scores_of_task.values())).questions})" for task, scores_of_task in scores.tasks.items()
    )
    rows = ((method, *(value(task, method) for task in scores.tasks)) for method in scores.tasks[ALL_TASKS])
    return Table.of(title, {"method": "", **dict.fromkeys(sizes, form)}, rows)
